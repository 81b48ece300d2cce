"""Server-sent events, with framing of data lines and an incremental parser for byte streams.

WHATWG HTML standard, section 9.2 (https://html.spec.whatwg.org/multipage/server-sent-events.html).
"""

from __future__ import annotations

SSE_DONE = b"data: [DONE]\n\n"
"""Last event of a successful stream in the OpenAI API."""

SSE_CONTENT_TYPE = b"text/event-stream; charset=utf-8"


def format_event(data: bytes) -> bytes:
    """Return an event with `data`, which must be a single line (JSON never has a raw line break)."""
    return b"data: " + data + b"\n\n"


def format_comment(text: bytes) -> bytes:
    """Return a comment, which clients ignore and which keeps proxies from closing an idle stream."""
    return b": " + text + b"\n\n"


MAX_EVENT_BYTES = 64 * 1024 * 1024


class LineBuffer:
    """Buffer for the incomplete last line of a stream, which joins the chunks of a long line only once."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def feed(self, chunk: bytes) -> bytes:
        """Add a chunk and return the buffered bytes if the chunk ends a line, else `b""`.

        After a non-empty result the caller passes the bytes after the last line to `set_remainder`.
        """
        self._chunks.append(chunk)
        self._size += len(chunk)
        return b"".join(self._chunks) if b"\n" in chunk else b""

    def set_remainder(self, remainder: bytes) -> None:
        """Set the bytes of the incomplete last line."""
        self._chunks, self._size = [remainder], len(remainder)


class EventParser:
    """Incremental parser that collects the `data` of events from a byte stream."""

    def __init__(self) -> None:
        self._line_buffer = LineBuffer()
        self._data: list[bytes] = []
        self._size = 0
        """Size of `_data` in bytes."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that `chunk` completes, in order. Comments and other fields are dropped.

        Raises:
            ValueError: An event is longer than `MAX_EVENT_BYTES`.
        """
        *lines, remainder = self._line_buffer.feed(chunk).split(b"\n")
        if lines:
            self._line_buffer.set_remainder(remainder)
        events = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" "))
                self._size += len(line) + 1
            elif not text and self._data:
                events.append(b"\n".join(self._data))
                self._data, self._size = [], 0
        if len(self._line_buffer) + self._size > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events
