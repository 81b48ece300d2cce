"""Splitting of a byte stream into whole server-sent events, and interpretation of the errors and the content in them.

Half an event is never forwarded to a client.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from argosy.protocol import EventParser, EventSplitter

MAX_EVENT_BYTES = 16 * 1024 * 1024
MAX_JSON_CONTAINERS = 1 << 19
"""Maximum number of JSON objects and arrays parsed at once. The log-probabilities of a full event have fewer."""
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
"""Exceptions raised by code that reads an event whose fields have unexpected types or values."""

_TGI_ERROR_STATUSES = {
    "Input validation error": 422,
    "Template error": 422,
    "Missing template": 422,
    "Tool error": 422,
    "Model is overloaded": 429,
}
"""Prefixes of TGI error messages that are not TGI's own fault (`router/src/infer/mod.rs`).

The values are the HTTP statuses that TGI uses before a stream starts.
"""
_STATUS_BY_ERROR_TYPE = {
    "invalid_request_error": 400,
    "rate_limit_error": 429,
    "overloaded_error": 503,
}
"""Statuses for the error types of hosted APIs and Argosy gateways whose errors carry no status."""
_MODEL_MISSING_CODES = ("model_not_found", "model_not_allowed")
"""Error codes of servers that do not have the requested model, or do not allow it for this key."""
_MODEL_MISSING_PATTERN = re.compile(
    r"\bmodels?\b.*\b(not found|not exist)\b", re.IGNORECASE | re.DOTALL
)
"""Error messages of servers without such a code: vLLM, Ollama, Gemini."""

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def split_events(splitter: EventSplitter, body: bytes) -> list[bytes]:
    """Return the events that `body` completes, without their ends. `splitter` keeps the incomplete rest.

    Raises:
        ValueError: An event is longer than `MAX_EVENT_BYTES` or too expensive to parse.
    """
    events = splitter.feed(body)
    if len(splitter) > MAX_EVENT_BYTES:
        raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
    for event in events:
        check_container_count(event)
    return events


def check_container_count(events: bytes) -> None:
    """Raise ValueError if the JSON in `events` is too expensive to parse."""
    if (
        len(events) > MAX_JSON_CONTAINERS
        and events.count(b"{") + events.count(b"[") > MAX_JSON_CONTAINERS
    ):
        raise ValueError(f"an event has more than {MAX_JSON_CONTAINERS} JSON objects and arrays")


def is_error_chunk(chunk: dict[str, Any]) -> bool:
    """Whether a chunk is an error: `{"error": ...}` or `"object": "error"`."""
    return chunk.get("error") is not None or chunk.get("object") == "error"


def describe_error_chunk(chunk: dict[str, Any]) -> str:
    """Return a failure message for an error chunk."""
    return f"the replica reported an error in its stream: {_error_message(chunk)}"


def parse_error_message(content: bytes) -> str:
    """Return the message of an error response; empty if its body cannot be parsed."""
    try:
        return _error_message(msgspec.json.decode(content))
    except MALFORMED_EVENT_ERRORS:
        return ""


def _error_message(chunk: dict[str, Any]) -> str:
    error = chunk.get("error")
    fields = error if isinstance(error, dict) else chunk
    message = fields.get("message", error)
    return "" if message is None else str(message)[:200]


def error_chunk_status(chunk: dict[str, Any]) -> int:
    """Return the HTTP status that an error chunk would have had before the stream started; 0 if unknown."""
    error = chunk.get("error")
    fields = error if isinstance(error, dict) else chunk
    if "http_status_code" in fields:  # TGI's field, which is 422 for every error
        message = str(fields.get("message"))
        return next(
            (status for begin, status in _TGI_ERROR_STATUSES.items() if message.startswith(begin)),
            500,
        )
    code = fields.get("code")
    if isinstance(code, str) and code.isdecimal():  # LiteLLM sends the status as a string
        code = int(code[:4])
    if isinstance(code, int) and 400 <= code < 600:
        return code
    return _STATUS_BY_ERROR_TYPE.get(str(fields.get("type")), 0)


def infer_status(status: int, content: bytes, client_error_markers: tuple[str, ...]) -> int:
    """Return the status that an error response stands for.

    Args:
        status: HTTP status of the response.
        content: Body of the response.
        client_error_markers: `BackendAdapter.client_error_markers` of the server.

    Returns:
        400 for a 500 that the request caused. 502 for a 403 or 404 because the server lacks the model or does not
        allow it, since the fleet chose that model name and not the client. Otherwise `status`.
    """
    if status not in {403, 404} and not (status == 500 and client_error_markers):
        return status
    try:
        body = msgspec.json.decode(content)
        message = _error_message(body)
        code = (body["error"] if isinstance(body.get("error"), dict) else body).get("code")
    except MALFORMED_EVENT_ERRORS:
        return status
    if status == 500:
        return 400 if any(marker in message for marker in client_error_markers) else status
    is_model_missing = code in _MODEL_MISSING_CODES or (
        status == 404 and _MODEL_MISSING_PATTERN.search(message)
    )
    return 502 if is_model_missing else status


class FirstContentDetector:
    """Detector of the first content of a stream, which ends a replica's time to first token. Fed from the first byte.

    Response head, comments, a lone role and empty deltas are not content.
    """

    def __init__(self) -> None:
        self._event_parser = EventParser()

    def feed(self, body: bytes) -> bool:
        """Whether `body` completes an event with content, or an event that is no chunk (an error or the end)."""
        return any(_has_content(data) for data in self._event_parser.feed(body))


def _has_content(data: bytes) -> bool:
    try:
        choices = _decode(data).get("choices")
        return choices is None or any(_choice_has_content(choice) for choice in choices)
    except MALFORMED_EVENT_ERRORS:
        return bool(data.strip())


def _choice_has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    has_delta = any(value for name, value in delta.items() if name != "role")
    return bool(has_delta or choice.get("text") or choice.get("finish_reason"))
