"""Whole server-sent events out of a byte stream, as they came, so that half an event is never passed on."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from argosy.protocol import Unended

LONGEST_EVENT_BYTES = 16 * 1024 * 1024
MOST_OBJECTS = 1 << 19
"""And lists, in what comes at once: log-probabilities of what an event may hold are fewer."""
END = b"\n\n"
DONE = b"[DONE]"
UNREADABLE = (
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    msgspec.DecodeError,
)
"""What comes of events whose fields are not what they should be."""

_TGI = {
    "Input validation error": 422,
    "Template error": 422,
    "Missing template": 422,
    "Tool error": 422,
    "Model is overloaded": 429,
}
"""Beginnings of TGI's errors that are not its own (`router/src/infer/mod.rs`), with their status before a stream."""
_BY_TYPE = {"invalid_request_error": 400, "rate_limit_error": 429, "overloaded_error": 503}
"""What hosted APIs, and gateways of ours, call errors whose status they do not say."""
_NO_MODEL = ("model_not_found", "model_not_allowed")
"""Codes of those who have not the model that they are asked for, or not for this key."""
_NO_MODEL_SAID = re.compile(r"\bmodels?\b.*\b(not found|not exist)\b", re.IGNORECASE | re.DOTALL)
"""What those say that have no such code: vLLM, Ollama, Gemini."""


def cut(rest: Unended, body: bytes) -> bytes:
    """The events that are whole with `body`; `rest` keeps what is not.

    Raises ValueError when an event does not end, or would take long to read.
    """
    stream = rest.join(body)
    if b"\r" in stream:
        stream = stream.replace(b"\r\n", b"\n")
    whole, mark, begun = stream.rpartition(END)
    if stream:
        rest.keep(begun)
    if len(rest) > LONGEST_EVENT_BYTES:
        raise ValueError(f"an event is longer than {LONGEST_EVENT_BYTES} bytes")
    check_objects(whole)
    return whole + mark


def check_objects(events: bytes) -> None:
    """Raise ValueError where they would take long to read."""
    if len(events) > MOST_OBJECTS and events.count(b"{") + events.count(b"[") > MOST_OBJECTS:
        raise ValueError(f"an event has more than {MOST_OBJECTS} objects and lists")


def data_of(event: bytes) -> bytes | None:
    """What an event carries; None for comments and for events without data."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
    data = [line[5:].removeprefix(b" ") for line in lines]
    return b"\n".join(data) if data else None


def is_error(chunk: dict[str, Any]) -> bool:
    """Whether this is no chunk but an error: `{"error": ...}`, or one with `"object": "error"`."""
    return chunk.get("error") is not None or chunk.get("object") == "error"


def error_of(chunk: dict[str, Any]) -> str:
    """What such an error says."""
    return f"it reported an error in its stream: {_message_of(chunk)}"


def message_of(content: bytes) -> str:
    """What an error says that came instead of an answer; empty where it cannot be read."""
    try:
        return _message_of(msgspec.json.decode(content))
    except UNREADABLE:
        return ""


def _message_of(chunk: dict[str, Any]) -> str:
    error = chunk.get("error")
    said = error if isinstance(error, dict) else chunk
    told = said.get("message", error)
    return "" if told is None else str(told)[:200]


def status_of(chunk: dict[str, Any]) -> int:
    """The HTTP status that such an error would have been, had the stream not begun; 0: it does not say."""
    error = chunk.get("error")
    said = error if isinstance(error, dict) else chunk
    if "http_status_code" in said:  # TGI's, and 422 whatever happened
        message = str(said.get("message"))
        return next((status for begin, status in _TGI.items() if message.startswith(begin)), 500)
    code = said.get("code")
    if isinstance(code, str) and code.isdecimal():  # LiteLLM's
        code = int(code[:4])
    if isinstance(code, int) and 400 <= code < 600:
        return code
    return _BY_TYPE.get(str(said.get("type")), 0)


def status_meant(status: int, content: bytes, misread: tuple[str, ...]) -> int:
    """The status of an answer, as its error means it.

    400 where it is 500 and the request is at fault: see `Dialect`. 502 where it is 403 or 404 and the server has no
    such model, or not for us: the fleet names it, and no client.
    """
    if status not in {403, 404} and not (status == 500 and misread):
        return status
    try:
        told = msgspec.json.decode(content)
        said = _message_of(told)
        code = (told["error"] if isinstance(told.get("error"), dict) else told).get("code")
    except UNREADABLE:
        return status
    if status == 500:
        return 400 if any(words in said for words in misread) else status
    missing = code in _NO_MODEL or (status == 404 and _NO_MODEL_SAID.search(said))
    return 502 if missing else status
