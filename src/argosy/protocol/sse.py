"""Server-sent events: framing of data lines, and a parser for streams that arrive in any pieces.

WHATWG HTML standard, section 9.2 (https://html.spec.whatwg.org/multipage/server-sent-events.html).
"""

from __future__ import annotations

SSE_DONE = b"data: [DONE]\n\n"
"""The OpenAI API's end of a stream that went well."""

SSE_CONTENT_TYPE = b"text/event-stream; charset=utf-8"


def format_event(data: bytes) -> bytes:
    """One event carrying `data`, which must be a single line (JSON never has a raw line break)."""
    return b"data: " + data + b"\n\n"


def format_comment(text: bytes) -> bytes:
    """A line that every reader ignores; it keeps proxies from closing an idle stream."""
    return b": " + text + b"\n\n"


MAX_EVENT_BYTES = 64 * 1024 * 1024


class LineBuffer:
    """What has come of a stream and not to its end: pieces of a line that may be long are put together once."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def feed(self, piece: bytes) -> bytes:
        """All of it with `piece`, where that ends a line: then `keep` what is over. Nothing where it ends none."""
        self._pieces.append(piece)
        self._size += len(piece)
        return b"".join(self._pieces) if b"\n" in piece else b""

    def set_remainder(self, rest: bytes) -> None:
        """Only this has not come to its end."""
        self._pieces, self._size = [rest], len(rest)


class EventParser:
    """Collects the `data` of events from a byte stream, however it is cut."""

    def __init__(self) -> None:
        self._line_buffer = LineBuffer()
        self._data: list[bytes] = []
        self._size = 0
        """Bytes in `_data`."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes, in order. Comments and other fields are dropped.

        Raises ValueError when an event does not end.
        """
        *lines, rest = self._line_buffer.feed(chunk).split(b"\n")
        if lines:
            self._line_buffer.set_remainder(rest)
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
