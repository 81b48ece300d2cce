"""The bodies that servers of each kind are sent: the request as it came, and what carries its answer on."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Raw

from argosy.gateway.backends.backend_adapter import CHAT_PATH, COMPLETION_PATH, OPERATORS, Dialect
from argosy.gateway.request_fields import Ask
from argosy.protocol import ApiError, invalid

_encode = msgspec.json.Encoder().encode

_ONLY_CHAT = frozenset(
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

_MORE_THAN_TEXT = frozenset(
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
_UNSET = frozenset({b"null", b"false", b"[]", b"{}", b'""'})


def is_plain_text(ask: Ask, path: bytes) -> bool:
    """Whether the answer is one text and nothing else, so that any server can go on where another stopped.

    A grammar, a schema and the log-probabilities of what was told would begin anew.
    """
    fields = ask.fields
    if ask.choices != 1 or any(_is_set(fields, name) for name in _MORE_THAN_TEXT):
        return False
    if _is_set(fields, "logprobs") or bytes(fields.get("best_of", Raw(b"1"))) not in {
        b"1",
        b"null",
    }:
        return False
    if not _is_set(fields, "response_format"):
        return True
    wanted = _said(ask, "response_format")
    return path == CHAT_PATH and isinstance(wanted, dict) and wanted.get("type") == "text"


def is_known_by_ids(ask: Ask, path: bytes) -> bool:
    """Whether the token ids of its prompt say all of it: those of a picture or a sound only say where it stands."""
    if path == COMPLETION_PATH:
        return True
    messages = _said(ask, "messages", list[dict[str, Any]])
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(
        isinstance(part, str) or (isinstance(part, dict) and "text" in part) for part in parts
    )


def has_stop_strings(ask: Ask) -> bool:
    """Servers hold back what could become one: then the text that was told lags behind the tokens."""
    return _is_set(ask.fields, "stop") or _is_set(ask.fields, "stop_regex")


def kept_stops(ask: Ask, dialect: Dialect) -> tuple[str, ...]:
    """The stop strings that this kind of server is asked to leave in its text, for the gateway to take out.

    None where it would leave the text of stop tokens there, too: nobody here could tell that from the answer's.
    """
    shows_tokens = bytes(ask.fields.get("skip_special_tokens", Raw(b"true"))) == b"false"
    if (
        not dialect.keeps_stops
        or shows_tokens
        or any(_is_set(ask.fields, name) for name in (dialect.keeps_stops, "stop_token_ids"))
    ):
        return ()
    stops = _said(ask, "stop")
    listed = [stops] if isinstance(stops, str) else stops
    if not isinstance(listed, list) or not all(isinstance(stop, str) for stop in listed):
        return ()
    return tuple(stop for stop in listed if stop)


def least_tokens(ask: Ask) -> int:
    """Tokens before which no stop string counts."""
    least = _said(ask, "min_tokens")
    return least if isinstance(least, int) else 0


def echoes(ask: Ask) -> bool:
    """Whether its answers begin with their prompts."""
    return _is_set(ask.fields, "echo")


def shows_usage(ask: Ask) -> bool:
    """Whether the client asked for the usage of its stream."""
    return bool(_options(ask).get("include_usage"))


def shows_usage_with_each(ask: Ask) -> bool:
    """Whether it asked for it with each event."""
    return bool(_options(ask).get("continuous_usage_stats"))


def shows_timings(ask: Ask) -> bool:
    """Whether it asked for what llama.cpp has to tell of its time with each event."""
    return _is_set(ask.fields, "timings_per_token")


def shows_ids(ask: Ask) -> bool:
    """Whether it asked for token ids."""
    return bytes(ask.fields.get("return_token_ids", Raw(b"null"))) == b"true"


def journaled(
    ask: Ask, model: str, ids: list[list[int]] | None = None, *, streams: bool = False
) -> bytes:
    """The request for a replica of ours, which goes on after `ids`: those of each choice."""
    changes: dict[str, Any] = {"model": model}
    if streams and not ask.stream:
        changes["stream"] = True
    if ids is not None:
        told = [first + then for first, then in zip(_resumed(ask), ids, strict=True)]
        changes["resume"] = {"token_ids": told[0] if len(told) == 1 else told}
    return _changed(ask.fields, changes)


def resumed(ask: Ask) -> list[int]:
    """How many ids the client itself gave for each choice to go on after; empty: none, or what makes no sense."""
    if "resume" not in ask.fields:
        return []
    try:
        return list(map(len, _resumed(ask)))
    except (ApiError, LookupError, TypeError):
        return []


def resumed_tokens(ask: Ask) -> int:
    """How many these are together."""
    return sum(resumed(ask))


def _resumed(ask: Ask) -> list[list[int]]:
    """The ids that the client itself wants each choice to go on after, which a replica has found good."""
    resume = _said(ask, "resume")
    if resume is None:
        return [[]] * ask.choices
    given: list[Any] = resume["token_ids"]
    return given if given and isinstance(given[0], list) else [given]


def asked(ask: Ask, path: bytes, dialect: Dialect, model: str, *, carriable: bool) -> bytes:
    """The request as this kind of server takes it; `carriable`: with what carrying it on needs."""
    return _encode(_fields(ask, path, dialect, model, carriable=carriable))


def with_text(
    ask: Ask, path: bytes, dialect: Dialect, model: str, text: str, tokens: int
) -> bytes | None:
    """The request for what comes after `text`, which has `tokens`. None: this prompt takes no more text."""
    fields = _fields(ask, path, dialect, model, carriable=True)
    changes: dict[str, Any] = _limits(ask, path, dialect, tokens)
    if path == COMPLETION_PATH:
        prompt = _said(ask, "prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            return None
        changes["prompt"] = prompt + text
        return _changed(fields, changes)
    messages = _said(ask, "messages", list[dict[str, Any]])
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        messages.append({"role": "assistant", "content": text})
    elif isinstance(last.get("content"), str) and not last.get("tool_calls"):
        last["content"] += text
    else:
        return None
    return _changed(fields, changes | {"messages": messages} | dialect.prefill_flags)


def with_ids(
    ask: Ask, path: bytes, dialect: Dialect, model: str, ids: list[int], *, told: int, room: int
) -> bytes | None:
    """The completion that goes on after `ids`, the last `told` of which are the answer's. None: how long is unknown.

    A chat goes on as a completion too: its prompt is known by its ids. `room` is the model's context, 0: unknown.
    """
    fields = _fields(ask, COMPLETION_PATH, dialect, model, carriable=True)
    changes: dict[str, Any] = _limits(ask, path, dialect, told)
    if path == CHAT_PATH:
        fields = {name: value for name, value in fields.items() if name not in _ONLY_CHAT}
        limit = changes.pop("max_completion_tokens", None) or changes.get("max_tokens")
        if limit is None and room <= len(ids):
            return None
        changes["max_tokens"] = limit or room - len(ids)
    return _changed(fields, changes | {"prompt": ids})


def sent_salt(ask: Ask, dialect: Dialect) -> str:
    """What keeps cached prompts of different tenants apart, with what the client wants apart itself; empty: nothing."""
    if "cache_salt" in dialect.unknown:
        return ""
    own = ask.fields.get("cache_salt", Raw(b"null"))
    if ask.domain:
        return hashlib.sha256(ask.domain.encode() + b"\0" + bytes(own)).hexdigest()
    salt = _said(ask, "cache_salt")
    return salt if isinstance(salt, str) else ""


def output_limit(ask: Ask, path: bytes, dialect: Dialect) -> int | None:
    """Most tokens that the answer may have; None: as many as the model's context has."""
    if ask.max_output is not None:
        return ask.max_output
    return dialect.completion_tokens if path == COMPLETION_PATH else None


def _fields(
    ask: Ask, path: bytes, dialect: Dialect, model: str, *, carriable: bool
) -> dict[str, Raw]:
    left_out = dialect.unknown | OPERATORS
    fields = {
        name: value
        for name, value in ask.fields.items()
        # Servers in Go take "Model" for "model", and whichever comes last.
        if name not in left_out and name.lower() != "model"
    }
    if "vllm_xargs" in fields:  # vLLM takes `kv_transfer_params` from there, too
        extra = _said(ask, "vllm_xargs", dict[str, Raw] | None) or {}
        told = {name: value for name, value in extra.items() if name not in OPERATORS}
        fields["vllm_xargs"] = Raw(_encode(told))
    if ask.drew_seed:
        del fields["seed"]  # it is for our own replicas; others are slower with one
    fields["model"] = Raw(_encode(model))
    salt = sent_salt(ask, dialect)
    if salt:
        fields["cache_salt"] = Raw(_encode(salt))
    if carriable and path in dialect.ids:
        fields["return_token_ids"] = Raw(b"true")
    if carriable and kept_stops(ask, dialect):
        fields[dialect.keeps_stops] = Raw(b"true")
    if carriable and dialect.timings:
        fields["timings_per_token"] = Raw(b"true")
    if ask.stream and dialect.usage:
        options = _options(ask) | {"include_usage": True}
        if carriable and dialect.usage_with_each and path not in dialect.ids:
            options["continuous_usage_stats"] = True
        fields["stream_options"] = Raw(_encode(options))
    return fields


def _limits(ask: Ask, path: bytes, dialect: Dialect, told: int) -> dict[str, int]:
    """What is left of the limits on the answer's length."""
    left = {}
    for name, least in (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0)):
        value = _said(ask, name)
        if isinstance(value, int) and value >= 0:
            left[name] = max(least, value - told)
    limit = output_limit(ask, path, dialect)
    if ask.max_output is None and limit is not None:
        left["max_tokens"] = max(1, limit - told)
    return left


def _said(ask: Ask, name: str, kind: Any = Any) -> Any:  # noqa: ANN401 - whatever it is
    """What a field says; None where it is not there.

    Raises ApiError 400 for what can be no value here: engines may take it, numbers beyond any, say.
    """
    try:
        return msgspec.json.decode(ask.fields.get(name, Raw(b"null")), type=kind)
    except msgspec.DecodeError as error:
        message = f"Invalid value for '{name}': {error}. Correct it."
        raise invalid(message, name, "invalid_type") from error


def _options(ask: Ask) -> dict[str, Any]:
    options = _said(ask, "stream_options")
    return options if isinstance(options, dict) else {}


def _is_set(fields: dict[str, Raw], name: str) -> bool:
    value = fields.get(name)
    return value is not None and bytes(value) not in _UNSET


def _changed(fields: dict[str, Raw], changes: dict[str, Any]) -> bytes:
    return _encode(fields | changes)
