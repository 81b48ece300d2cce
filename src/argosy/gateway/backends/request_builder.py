"""Request bodies for each kind of backend: the client's request, and the request that resumes its stream."""

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
from argosy.gateway.backends.constraint_fields import CONSTRAINT_FIELDS, read_constraint_fields
from argosy.gateway.backends.constraint_spellings import CONSTRAINT_SUPPORT
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
"""Fields of a chat request that a completion ignores or reads differently."""

_NON_TEXT_FIELDS = frozenset(
    {
        *CONSTRAINT_FIELDS - {"response_format"},
        "tools",
        "functions",
        "thinking_token_budget",
        "prompt_logprobs",
        "prompt_embeds",
        "echo",
        "suffix",
        "audio",
        "use_beam_search",
        "truncate_prompt_tokens",
    }
)
"""Fields whose response is more than plain text, or depends on more than the text so far."""
_TOKEN_LIMIT_FIELDS = frozenset({"max_tokens", "max_completion_tokens"})
_UNSET_VALUES = frozenset({b"null", b"false", b"[]", b"{}", b'""'})


class UpstreamTarget(msgspec.Struct, frozen=True, gc=False):
    """A server, as far as the bodies of its requests depend on it."""

    adapter: BackendAdapter
    model: str
    """Name of the model at the server."""
    max_model_len: int = 0
    """Context length of the model in tokens; 0 if unknown."""
    lora: str = ""
    """Digest of the adapter (LoRA) that computes; empty for the model itself."""
    priority: int | None = None
    """The `priority` for the server's scheduler. None if it does not schedule by priority."""


def has_plain_text_output(fields: RequestFields, path: bytes) -> bool:
    """Whether the response is one plain text, which any server can resume where another stopped.

    A server that resumes would start a grammar, a schema or the list of log-probabilities anew.
    """
    raw = fields.raw
    if fields.choice_count != 1 or any(is_set(fields, name) for name in _NON_TEXT_FIELDS):
        return False
    if is_set(fields, "logprobs") or bytes(raw.get("best_of", Raw(b"1"))) not in {
        b"1",
        b"null",
    }:
        return False
    if not is_set(fields, "response_format"):
        return True
    response_format = _decode_field(fields, "response_format")
    return (
        path == CHAT_PATH
        and isinstance(response_format, dict)
        and response_format.get("type") == "text"
    )


def has_text_only_prompt(fields: RequestFields, path: bytes) -> bool:
    """Whether the prompt's token ids describe all of it. The ids of an image or audio are only placeholders."""
    if path == COMPLETION_PATH:
        return True
    messages = _decode_field(fields, "messages", list[dict[str, Any]])
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(
        isinstance(part, str) or (isinstance(part, dict) and "text" in part) for part in parts
    )


def has_stop_strings(fields: RequestFields) -> bool:
    """Whether the request has stop strings.

    A server holds back text that may become one, so that the delivered text lags behind the token ids.
    """
    return is_set(fields, "stop") or is_set(fields, "stop_regex")


def gateway_stop_strings(fields: RequestFields, adapter: BackendAdapter) -> tuple[str, ...]:
    """Return the stop strings that the server leaves in its text and the gateway removes.

    The tuple is empty if the server would also leave the text of stop tokens, which the gateway cannot distinguish
    from the rest.
    """
    shows_tokens = bytes(fields.raw.get("skip_special_tokens", Raw(b"true"))) == b"false"
    if (
        not adapter.include_stop_field
        or shows_tokens
        or any(is_set(fields, name) for name in (adapter.include_stop_field, "stop_token_ids"))
    ):
        return ()
    value = _decode_field(fields, "stop")
    stop_strings = [value] if isinstance(value, str) else value
    if not isinstance(stop_strings, list) or not all(
        isinstance(stop, str) for stop in stop_strings
    ):
        return ()
    return tuple(stop for stop in stop_strings if stop)


def min_output_tokens(fields: RequestFields) -> int:
    """Return the number of tokens before which no stop string applies."""
    minimum = _decode_field(fields, "min_tokens")
    return minimum if isinstance(minimum, int) else 0


def is_token_ids_requested(fields: RequestFields) -> bool:
    """Whether the client requested token ids."""
    return bytes(fields.raw.get("return_token_ids", Raw(b"null"))) == b"true"


def build_native_body(
    fields: RequestFields,
    model: str,
    token_ids: list[list[int]] | None = None,
    *,
    force_stream: bool = False,
) -> bytes:
    """Build the body for a native replica.

    The replica resumes after `token_ids`, the delivered ids of each choice. `force_stream` requests a stream even if
    the client did not.
    """
    changes: dict[str, Any] = {"model": model}
    if force_stream and not fields.stream:
        changes["stream"] = True
    if token_ids is not None:
        resume_ids = [
            first + then for first, then in zip(_resume_token_ids(fields), token_ids, strict=True)
        ]
        changes["resume"] = {"token_ids": resume_ids[0] if len(resume_ids) == 1 else resume_ids}
    return _encode(fields.raw | changes)


def resume_token_counts(fields: RequestFields) -> list[int]:
    """Return the number of token ids in the client's own `resume` field, by choice.

    The list is empty if the field is missing or invalid.
    """
    if "resume" not in fields.raw:
        return []
    try:
        return list(map(len, _resume_token_ids(fields)))
    except (ApiError, LookupError, TypeError):
        return []


def count_resume_tokens(fields: RequestFields) -> int:
    """Return the total number of token ids in the client's own `resume` field."""
    return sum(resume_token_counts(fields))


def _resume_token_ids(fields: RequestFields) -> list[list[int]]:
    """Return the token ids of the client's own `resume` field by choice. A replica has validated them."""
    resume = _decode_field(fields, "resume")
    if resume is None:
        return [[]] * fields.choice_count
    given: list[Any] = resume["token_ids"]
    return given if given and isinstance(given[0], list) else [given]


def build_body(
    fields: RequestFields, path: bytes, target: UpstreamTarget, *, resumable: bool
) -> bytes:
    """Build the body for a server of another backend than Argosy.

    `resumable` requests the token ids and counts that a later resume needs.
    """
    return _encode(_build_raw_fields(fields, path, target, resumable=resumable))


def build_resume_from_text(
    fields: RequestFields,
    path: bytes,
    target: UpstreamTarget,
    text: str,
    delivered_tokens: int,
) -> bytes | None:
    """Build the body of the request that continues after `text`.

    `delivered_tokens` is the number of tokens in `text`, by which the token limits shrink.

    Returns:
        The body; None if text cannot be appended to this prompt.
    """
    raw = _build_raw_fields(fields, path, target, resumable=True)
    changes: dict[str, Any] = _remaining_limits(fields, path, target, delivered_tokens)
    if path == COMPLETION_PATH:
        prompt = _decode_field(fields, "prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            return None
        changes["prompt"] = prompt + text
        return _encode(raw | changes)
    messages = _decode_field(fields, "messages", list[dict[str, Any]])
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        messages.append({"role": "assistant", "content": text})
    elif isinstance(last.get("content"), str) and not last.get("tool_calls"):
        last["content"] += text
    else:
        return None
    return _encode(raw | changes | {"messages": messages} | target.adapter.prefill_flags)


def build_resume_from_ids(
    fields: RequestFields,
    path: bytes,
    target: UpstreamTarget,
    token_ids: list[int],
    delivered_tokens: int,
) -> bytes | None:
    """Build the body of the completion that continues after `token_ids`.

    A chat continues as a completion too, because the ids cover its rendered prompt. The last `delivered_tokens` ids
    are output, the others are the prompt.

    Returns:
        The body; None if the chat has no token limit and the context length does not give one.
    """
    raw = _build_raw_fields(fields, COMPLETION_PATH, target, resumable=True)
    changes: dict[str, Any] = _remaining_limits(fields, path, target, delivered_tokens)
    if path == CHAT_PATH:
        raw = {name: value for name, value in raw.items() if name not in _CHAT_ONLY_FIELDS}
        limit = changes.pop("max_completion_tokens", None) or changes.get("max_tokens")
        if limit is None and target.max_model_len <= len(token_ids):
            return None
        changes["max_tokens"] = limit or target.max_model_len - len(token_ids)
    return _encode(raw | changes | {"prompt": token_ids})


def derive_cache_salt(fields: RequestFields, adapter: BackendAdapter) -> str:
    """Return the `cache_salt` that separates cached prompts of different tenants; empty if none is needed.

    The client's own salt is part of it.
    """
    if "cache_salt" in adapter.unsupported_fields:
        return ""
    client_salt = fields.raw.get("cache_salt", Raw(b"null"))
    if fields.cache_domain:
        return hashlib.sha256(fields.cache_domain.encode() + b"\0" + bytes(client_salt)).hexdigest()
    salt = _decode_field(fields, "cache_salt")
    return salt if isinstance(salt, str) else ""


def max_output_tokens(fields: RequestFields, path: bytes, adapter: BackendAdapter) -> int | None:
    """Return the limit on output tokens; None if only the model's context length limits them."""
    if fields.max_output_tokens is not None:
        return fields.max_output_tokens
    return adapter.default_completion_tokens if path == COMPLETION_PATH else None


def _build_raw_fields(
    fields: RequestFields, path: bytes, target: UpstreamTarget, *, resumable: bool
) -> dict[str, Raw]:
    """Build the encoded fields of a request body, as `build_body` documents it."""
    adapter = target.adapter
    dropped = adapter.unsupported_fields | PRIVILEGED_FIELDS
    if _is_limited_by_context(fields, path, target):
        dropped |= _TOKEN_LIMIT_FIELDS
    raw = {
        name: value
        for name, value in fields.raw.items()
        # Go servers match field names without case, and the last of "Model" and "model" would win.
        if name not in dropped and name.lower() != "model"
    }
    if "vllm_xargs" in raw:  # vLLM reads `kv_transfer_params` from this field too
        xargs = _decode_field(fields, "vllm_xargs", dict[str, Raw] | None) or {}
        allowed = {name: value for name, value in xargs.items() if name not in PRIVILEGED_FIELDS}
        raw["vllm_xargs"] = Raw(_encode(allowed))
    raw = translate_constraint(raw, path, adapter)
    if fields.has_generated_seed:
        del raw["seed"]  # only native replicas need it, and others are slower with a seed
    raw["model"] = Raw(_encode(target.model))
    if target.lora:
        raw[adapter.adapter_field] = Raw(_encode(target.lora))
    if target.priority is not None:
        raw["priority"] = Raw(b"%d" % target.priority)
    salt = derive_cache_salt(fields, adapter)
    if salt:
        raw["cache_salt"] = Raw(_encode(salt))
    if resumable and path in adapter.token_id_paths:
        raw["return_token_ids"] = Raw(b"true")
    if resumable and gateway_stop_strings(fields, adapter):
        raw[adapter.include_stop_field] = Raw(b"true")
    if resumable and adapter.has_token_timings:
        raw["timings_per_token"] = Raw(b"true")
    if fields.stream and adapter.has_stream_usage:
        options = stream_options(fields) | {"include_usage": True}
        if resumable and adapter.has_continuous_usage and path not in adapter.token_id_paths:
            options["continuous_usage_stats"] = True
        elif not adapter.has_continuous_usage:
            options.pop("continuous_usage_stats", None)
        raw["stream_options"] = Raw(_encode(options))
    return raw


def list_dropped_fields(fields: RequestFields) -> tuple[str, ...]:
    """Return the client's fields without effect at servers of other backends than Argosy.

    The gateway applies some of the fields that it drops itself: they are not listed.
    """
    return tuple(sorted((PRIVILEGED_FIELDS - {"request_id"}).intersection(fields.raw)))


def translate_constraint(
    raw: dict[str, Raw], path: bytes, adapter: BackendAdapter
) -> dict[str, Raw]:
    """Return the fields with the output's constraint in the spelling of the server.

    Raises:
        ApiError(400): A constraint is malformed, or the server does not enforce it.
    """
    support = CONSTRAINT_SUPPORT.get(adapter.kind)
    if support is None or raw.keys().isdisjoint(CONSTRAINT_FIELDS):
        return raw
    constraint = read_constraint_fields(raw)
    if constraint is None:
        return raw
    built = support.build_fields(constraint, path, adapter.kind)
    if built is None:
        return raw
    others = {name: value for name, value in raw.items() if name not in CONSTRAINT_FIELDS}
    return others | {name: Raw(_encode(value)) for name, value in built.items()}


def _is_limited_by_context(fields: RequestFields, path: bytes, target: UpstreamTarget) -> bool:
    """Return whether a chat is sent without its token limit, because the model's context is a lower one.

    The client must allow it with `clamp_max_tokens`. Other servers than Argosy would refuse such a limit.
    """
    limit, context = fields.max_output_tokens or 0, target.max_model_len
    return path == CHAT_PATH and 0 < context <= limit and is_set(fields, "clamp_max_tokens")


def _remaining_limits(
    fields: RequestFields, path: bytes, target: UpstreamTarget, delivered_tokens: int
) -> dict[str, int]:
    """Return the token limits of the request, reduced by the delivered tokens."""
    limits = {}
    for name, minimum in (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0)):
        value = _decode_field(fields, name)
        if isinstance(value, int) and value >= 0:
            limits[name] = max(minimum, value - delivered_tokens)
    limit = max_output_tokens(fields, path, target.adapter)
    if fields.max_output_tokens is None and limit is not None:
        limits["max_tokens"] = max(1, limit - delivered_tokens)
    if _is_limited_by_context(fields, path, target):
        return {name: value for name, value in limits.items() if name not in _TOKEN_LIMIT_FIELDS}
    return limits


def _decode_field(fields: RequestFields, name: str, type_: Any = Any) -> Any:  # noqa: ANN401 - depends on `type_`
    """Return the value of a field; None if the field is missing.

    Raises:
        ApiError(400): The value is invalid, for example a number out of range that an engine might accept.
    """
    try:
        return msgspec.json.decode(fields.raw.get(name, Raw(b"null")), type=type_)
    except msgspec.DecodeError as error:
        message = f"Invalid value for '{name}': {error}. Correct it."
        raise invalid_request(message, name, "invalid_type") from error


def stream_options(fields: RequestFields) -> dict[str, Any]:
    """Return the `stream_options` of a request."""
    options = _decode_field(fields, "stream_options")
    return options if isinstance(options, dict) else {}


def is_set(fields: RequestFields, name: str) -> bool:
    """Whether the request has the field with another value than null, false or an empty one."""
    value = fields.raw.get(name)
    return value is not None and bytes(value) not in _UNSET_VALUES
