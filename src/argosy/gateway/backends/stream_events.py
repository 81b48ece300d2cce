"""Whole server-sent events out of a byte stream, as they came, so that half an event is never passed on."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from argosy.protocol import LineBuffer

MAX_EVENT_BYTES = 16 * 1024 * 1024
MAX_JSON_CONTAINERS = 1 << 19
"""And lists, in what comes at once: log-probabilities of what an event may hold are fewer."""
EVENT_END = b"\n\n"
DONE_DATA = b"[DONE]"
MALFORMED_EVENT_ERRORS = (
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    msgspec.DecodeError,
)
"""What comes of events whose fields are not what they should be."""

_TGI_ERROR_STATUSES = {
    "Input validation error": 422,
    "Template error": 422,
    "Missing template": 422,
    "Tool error": 422,
    "Model is overloaded": 429,
}
"""Beginnings of TGI's errors that are not its own (`router/src/infer/mod.rs`), with their status before a stream."""
_STATUS_BY_ERROR_TYPE = {
    "invalid_request_error": 400,
    "rate_limit_error": 429,
    "overloaded_error": 503,
}
"""What hosted APIs, and gateways of ours, call errors whose status they do not say."""
_MODEL_MISSING_CODES = ("model_not_found", "model_not_allowed")
"""Codes of those who have not the model that they are asked for, or not for this key."""
_MODEL_MISSING_PATTERN = re.compile(
    r"\bmodels?\b.*\b(not found|not exist)\b", re.IGNORECASE | re.DOTALL
)
"""What those say that have no such code: vLLM, Ollama, Gemini."""


def split_events(buffer: LineBuffer, body: bytes) -> bytes:
    """The events that are whole with `body`; `rest` keeps what is not.

    Raises ValueError when an event does not end, or would take long to read.
    """
    stream = buffer.feed(body)
    if b"\r" in stream:
        stream = stream.replace(b"\r\n", b"\n")
    whole, mark, begun = stream.rpartition(EVENT_END)
    if stream:
        buffer.set_remainder(begun)
    if len(buffer) > MAX_EVENT_BYTES:
        raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
    check_container_count(whole)
    return whole + mark


def check_container_count(events: bytes) -> None:
    """Raise ValueError where they would take long to read."""
    if (
        len(events) > MAX_JSON_CONTAINERS
        and events.count(b"{") + events.count(b"[") > MAX_JSON_CONTAINERS
    ):
        raise ValueError(f"an event has more than {MAX_JSON_CONTAINERS} objects and lists")


def event_data(event: bytes) -> bytes | None:
    """What an event carries; None for comments and for events without data."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
    data = [line[5:].removeprefix(b" ") for line in lines]
    return b"\n".join(data) if data else None


def is_error_chunk(chunk: dict[str, Any]) -> bool:
    """Whether this is no chunk but an error: `{"error": ...}`, or one with `"object": "error"`."""
    return chunk.get("error") is not None or chunk.get("object") == "error"


def describe_error_chunk(chunk: dict[str, Any]) -> str:
    """What such an error says."""
    return f"it reported an error in its stream: {_error_message(chunk)}"


def parse_error_message(content: bytes) -> str:
    """What an error says that came instead of an answer; empty where it cannot be read."""
    try:
        return _error_message(msgspec.json.decode(content))
    except MALFORMED_EVENT_ERRORS:
        return ""


def _error_message(chunk: dict[str, Any]) -> str:
    error = chunk.get("error")
    said = error if isinstance(error, dict) else chunk
    told = said.get("message", error)
    return "" if told is None else str(told)[:200]


def error_chunk_status(chunk: dict[str, Any]) -> int:
    """The HTTP status that such an error would have been, had the stream not begun; 0: it does not say."""
    error = chunk.get("error")
    said = error if isinstance(error, dict) else chunk
    if "http_status_code" in said:  # TGI's, and 422 whatever happened
        message = str(said.get("message"))
        return next(
            (status for begin, status in _TGI_ERROR_STATUSES.items() if message.startswith(begin)),
            500,
        )
    code = said.get("code")
    if isinstance(code, str) and code.isdecimal():  # LiteLLM's
        code = int(code[:4])
    if isinstance(code, int) and 400 <= code < 600:
        return code
    return _STATUS_BY_ERROR_TYPE.get(str(said.get("type")), 0)


def infer_status(status: int, content: bytes, client_error_markers: tuple[str, ...]) -> int:
    """The status of an answer, as its error means it.

    400 where it is 500 and the request is at fault: see `Dialect`. 502 where it is 403 or 404 and the server has no
    such model, or not for us: the fleet names it, and no client.
    """
    if status not in {403, 404} and not (status == 500 and client_error_markers):
        return status
    try:
        told = msgspec.json.decode(content)
        said = _error_message(told)
        code = (told["error"] if isinstance(told.get("error"), dict) else told).get("code")
    except MALFORMED_EVENT_ERRORS:
        return status
    if status == 500:
        return 400 if any(words in said for words in client_error_markers) else status
    missing = code in _MODEL_MISSING_CODES or (
        status == 404 and _MODEL_MISSING_PATTERN.search(said)
    )
    return 502 if missing else status
