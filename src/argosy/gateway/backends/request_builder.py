"""The bodies that servers of each kind are sent: the request as it came, and what carries its answer on."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Raw

from argosy.gateway.backends.backend_adapter import (
    CHAT_PATH,
    COMPLETION_PATH,
    PRIVILEGED_FIELDS,
    BackendAdapter,
)
from argosy.gateway.request_fields import RequestFields
from argosy.protocol import ApiError, invalid_request

_encode = msgspec.json.Encoder().encode

_CHAT_ONLY_FIELDS = frozenset(
    {
        "messages",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
        "include_reasoning",
        "documents",
        "echo",
    }
)
"""What a completion has no use for, or means something else by."""

_NON_TEXT_FIELDS = frozenset(
    {
        "tools",
        "functions",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "json_schema",
        "grammar",
        "regex",
        "ebnf",
        "prompt_logprobs",
        "prompt_embeds",
        "echo",
        "suffix",
        "audio",
        "use_beam_search",
        "truncate_prompt_tokens",
    }
)
_UNSET_VALUES = frozenset({b"null", b"false", b"[]", b"{}", b'""'})


def has_plain_text_output(request_fields: RequestFields, path: bytes) -> bool:
    """Whether the answer is one text and nothing else, so that any server can go on where another stopped.

    A grammar, a schema and the log-probabilities of what was told would begin anew.
    """
    fields = request_fields.raw
    if request_fields.choice_count != 1 or any(_is_set(fields, name) for name in _NON_TEXT_FIELDS):
        return False
    if _is_set(fields, "logprobs") or bytes(fields.get("best_of", Raw(b"1"))) not in {
        b"1",
        b"null",
    }:
        return False
    if not _is_set(fields, "response_format"):
        return True
    wanted = _decode_field(request_fields, "response_format")
    return path == CHAT_PATH and isinstance(wanted, dict) and wanted.get("type") == "text"


def has_text_only_prompt(fields: RequestFields, path: bytes) -> bool:
    """Whether the token ids of its prompt say all of it: those of a picture or a sound only say where it stands."""
    if path == COMPLETION_PATH:
        return True
    messages = _decode_field(fields, "messages", list[dict[str, Any]])
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(
        isinstance(part, str) or (isinstance(part, dict) and "text" in part) for part in parts
    )


def has_stop_strings(fields: RequestFields) -> bool:
    """Servers hold back what could become one: then the text that was told lags behind the tokens."""
    return _is_set(fields.raw, "stop") or _is_set(fields.raw, "stop_regex")


def gateway_stop_strings(fields: RequestFields, adapter: BackendAdapter) -> tuple[str, ...]:
    """The stop strings that this kind of server is asked to leave in its text, for the gateway to take out.

    None where it would leave the text of stop tokens there, too: nobody here could tell that from the answer's.
    """
    shows_tokens = bytes(fields.raw.get("skip_special_tokens", Raw(b"true"))) == b"false"
    if (
        not adapter.include_stop_field
        or shows_tokens
        or any(_is_set(fields.raw, name) for name in (adapter.include_stop_field, "stop_token_ids"))
    ):
        return ()
    stops = _decode_field(fields, "stop")
    listed = [stops] if isinstance(stops, str) else stops
    if not isinstance(listed, list) or not all(isinstance(stop, str) for stop in listed):
        return ()
    return tuple(stop for stop in listed if stop)


def min_output_tokens(fields: RequestFields) -> int:
    """Tokens before which no stop string counts."""
    least = _decode_field(fields, "min_tokens")
    return least if isinstance(least, int) else 0


def is_echo_requested(fields: RequestFields) -> bool:
    """Whether its answers begin with their prompts."""
    return _is_set(fields.raw, "echo")


def is_usage_requested(fields: RequestFields) -> bool:
    """Whether the client asked for the usage of its stream."""
    return bool(_stream_options(fields).get("include_usage"))


def is_continuous_usage_requested(fields: RequestFields) -> bool:
    """Whether it asked for it with each event."""
    return bool(_stream_options(fields).get("continuous_usage_stats"))


def is_timings_requested(fields: RequestFields) -> bool:
    """Whether it asked for what llama.cpp has to tell of its time with each event."""
    return _is_set(fields.raw, "timings_per_token")


def is_token_ids_requested(fields: RequestFields) -> bool:
    """Whether it asked for token ids."""
    return bytes(fields.raw.get("return_token_ids", Raw(b"null"))) == b"true"


def build_native_body(
    fields: RequestFields,
    model: str,
    token_ids: list[list[int]] | None = None,
    *,
    force_stream: bool = False,
) -> bytes:
    """The request for a replica of ours, which goes on after `ids`: those of each choice."""
    changes: dict[str, Any] = {"model": model}
    if force_stream and not fields.stream:
        changes["stream"] = True
    if token_ids is not None:
        told = [
            first + then for first, then in zip(_resume_token_ids(fields), token_ids, strict=True)
        ]
        changes["resume"] = {"token_ids": told[0] if len(told) == 1 else told}
    return _encode_with(fields.raw, changes)


def resume_token_counts(fields: RequestFields) -> list[int]:
    """How many ids the client itself gave for each choice to go on after; empty: none, or what makes no sense."""
    if "resume" not in fields.raw:
        return []
    try:
        return list(map(len, _resume_token_ids(fields)))
    except (ApiError, LookupError, TypeError):
        return []


def count_resume_tokens(fields: RequestFields) -> int:
    """How many these are together."""
    return sum(resume_token_counts(fields))


def _resume_token_ids(fields: RequestFields) -> list[list[int]]:
    """The ids that the client itself wants each choice to go on after, which a replica has found good."""
    resume = _decode_field(fields, "resume")
    if resume is None:
        return [[]] * fields.choice_count
    given: list[Any] = resume["token_ids"]
    return given if given and isinstance(given[0], list) else [given]


def build_body(
    fields: RequestFields, path: bytes, adapter: BackendAdapter, model: str, *, resumable: bool
) -> bytes:
    """The request as this kind of server takes it; `carriable`: with what carrying it on needs."""
    return _encode(_build_raw_fields(fields, path, adapter, model, resumable=resumable))


def build_resume_from_text(
    request_fields: RequestFields,
    path: bytes,
    adapter: BackendAdapter,
    model: str,
    text: str,
    delivered_tokens: int,
) -> bytes | None:
    """The request for what comes after `text`, which has `tokens`. None: this prompt takes no more text."""
    fields = _build_raw_fields(request_fields, path, adapter, model, resumable=True)
    changes: dict[str, Any] = _remaining_limits(request_fields, path, adapter, delivered_tokens)
    if path == COMPLETION_PATH:
        prompt = _decode_field(request_fields, "prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            return None
        changes["prompt"] = prompt + text
        return _encode_with(fields, changes)
    messages = _decode_field(request_fields, "messages", list[dict[str, Any]])
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        messages.append({"role": "assistant", "content": text})
    elif isinstance(last.get("content"), str) and not last.get("tool_calls"):
        last["content"] += text
    else:
        return None
    return _encode_with(fields, changes | {"messages": messages} | adapter.prefill_flags)


def build_resume_from_ids(
    request_fields: RequestFields,
    path: bytes,
    adapter: BackendAdapter,
    model: str,
    token_ids: list[int],
    *,
    delivered_tokens: int,
    max_model_len: int,
) -> bytes | None:
    """The completion that goes on after `ids`, the last `told` of which are the answer's. None: how long is unknown.

    A chat goes on as a completion too: its prompt is known by its ids. `room` is the model's context, 0: unknown.
    """
    fields = _build_raw_fields(request_fields, COMPLETION_PATH, adapter, model, resumable=True)
    changes: dict[str, Any] = _remaining_limits(request_fields, path, adapter, delivered_tokens)
    if path == CHAT_PATH:
        fields = {name: value for name, value in fields.items() if name not in _CHAT_ONLY_FIELDS}
        limit = changes.pop("max_completion_tokens", None) or changes.get("max_tokens")
        if limit is None and max_model_len <= len(token_ids):
            return None
        changes["max_tokens"] = limit or max_model_len - len(token_ids)
    return _encode_with(fields, changes | {"prompt": token_ids})


def derive_cache_salt(fields: RequestFields, adapter: BackendAdapter) -> str:
    """What keeps cached prompts of different tenants apart, with what the client wants apart itself; empty: nothing."""
    if "cache_salt" in adapter.unsupported_fields:
        return ""
    own = fields.raw.get("cache_salt", Raw(b"null"))
    if fields.cache_domain:
        return hashlib.sha256(fields.cache_domain.encode() + b"\0" + bytes(own)).hexdigest()
    salt = _decode_field(fields, "cache_salt")
    return salt if isinstance(salt, str) else ""


def max_output_tokens(fields: RequestFields, path: bytes, adapter: BackendAdapter) -> int | None:
    """Most tokens that the answer may have; None: as many as the model's context has."""
    if fields.max_output_tokens is not None:
        return fields.max_output_tokens
    return adapter.default_completion_tokens if path == COMPLETION_PATH else None


def _build_raw_fields(
    request_fields: RequestFields,
    path: bytes,
    adapter: BackendAdapter,
    model: str,
    *,
    resumable: bool,
) -> dict[str, Raw]:
    left_out = adapter.unsupported_fields | PRIVILEGED_FIELDS
    fields = {
        name: value
        for name, value in request_fields.raw.items()
        # Servers in Go take "Model" for "model", and whichever comes last.
        if name not in left_out and name.lower() != "model"
    }
    if "vllm_xargs" in fields:  # vLLM takes `kv_transfer_params` from there, too
        extra = _decode_field(request_fields, "vllm_xargs", dict[str, Raw] | None) or {}
        told = {name: value for name, value in extra.items() if name not in PRIVILEGED_FIELDS}
        fields["vllm_xargs"] = Raw(_encode(told))
    if request_fields.has_generated_seed:
        del fields["seed"]  # it is for our own replicas; others are slower with one
    fields["model"] = Raw(_encode(model))
    salt = derive_cache_salt(request_fields, adapter)
    if salt:
        fields["cache_salt"] = Raw(_encode(salt))
    if resumable and path in adapter.token_id_paths:
        fields["return_token_ids"] = Raw(b"true")
    if resumable and gateway_stop_strings(request_fields, adapter):
        fields[adapter.include_stop_field] = Raw(b"true")
    if resumable and adapter.has_token_timings:
        fields["timings_per_token"] = Raw(b"true")
    if request_fields.stream and adapter.has_stream_usage:
        options = _stream_options(request_fields) | {"include_usage": True}
        if resumable and adapter.has_continuous_usage and path not in adapter.token_id_paths:
            options["continuous_usage_stats"] = True
        fields["stream_options"] = Raw(_encode(options))
    return fields


def _remaining_limits(
    fields: RequestFields, path: bytes, adapter: BackendAdapter, delivered_tokens: int
) -> dict[str, int]:
    """What is left of the limits on the answer's length."""
    left = {}
    for name, least in (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0)):
        value = _decode_field(fields, name)
        if isinstance(value, int) and value >= 0:
            left[name] = max(least, value - delivered_tokens)
    limit = max_output_tokens(fields, path, adapter)
    if fields.max_output_tokens is None and limit is not None:
        left["max_tokens"] = max(1, limit - delivered_tokens)
    return left


def _decode_field(fields: RequestFields, name: str, type_: Any = Any) -> Any:  # noqa: ANN401 - whatever it is
    """What a field says; None where it is not there.

    Raises ApiError 400 for what can be no value here: engines may take it, numbers beyond any, say.
    """
    try:
        return msgspec.json.decode(fields.raw.get(name, Raw(b"null")), type=type_)
    except msgspec.DecodeError as error:
        message = f"Invalid value for '{name}': {error}. Correct it."
        raise invalid_request(message, name, "invalid_type") from error


def _stream_options(fields: RequestFields) -> dict[str, Any]:
    options = _decode_field(fields, "stream_options")
    return options if isinstance(options, dict) else {}


def _is_set(raw: dict[str, Raw], name: str) -> bool:
    value = raw.get(name)
    return value is not None and bytes(value) not in _UNSET_VALUES


def _encode_with(raw: dict[str, Raw], changes: dict[str, Any]) -> bytes:
    return _encode(raw | changes)
