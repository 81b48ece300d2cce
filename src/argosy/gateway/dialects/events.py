"""Whole server-sent events out of a byte stream, as they came, so that half an event is never passed on."""

from __future__ import annotations

from typing import Any

LONGEST_EVENT_BYTES = 16 * 1024 * 1024
END = b"\n\n"
DONE = b"[DONE]"


def cut(stream: bytes) -> tuple[bytes, bytes]:
    """The whole events at the beginning, and the rest. Raises ValueError when an event does not end."""
    if b"\r\n" in stream:
        stream = stream.replace(b"\r\n", b"\n")
    whole, end, rest = stream.rpartition(END)
    if len(rest) > LONGEST_EVENT_BYTES:
        raise ValueError(f"an event is longer than {LONGEST_EVENT_BYTES} bytes")
    return whole + end, rest


def data_of(event: bytes) -> bytes | None:
    """What an event carries; None for comments and for events without data."""
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].removeprefix(b" ")
    lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
    data = [line[5:].removeprefix(b" ") for line in lines]
    return b"\n".join(data) if data else None


def is_error(chunk: dict[str, Any]) -> bool:
    """Whether this is no chunk but an error: `{"error": ...}`, or one with `"object": "error"`."""
    return chunk.get("error") is not None or chunk.get("object") == "error"


def error_of(chunk: dict[str, Any]) -> str:
    """What such an error says."""
    error = chunk.get("error")
    said = error if isinstance(error, dict) else chunk
    return f"it reported an error in its stream: {str(said.get('message', error))[:200]}"
