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


EVENT_END = b"\n\n"
"""End of an event, after line breaks were normalized."""
MAX_EVENT_BYTES = 64 * 1024 * 1024


def event_data(event: bytes) -> bytes | None:
    """Return the data of an event; None for a comment or an event without data."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
    data = [line[5:].removeprefix(b" ") for line in lines]
    return b"\n".join(data) if data else None


class EventSplitter:
    """Splits a byte stream into events. It scans each byte once, however many chunks an event has.

    The length is the number of bytes of the incomplete event. It has no limit: the caller checks it.
    """

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        """Chunks of the incomplete event, none of them empty."""
        self._size = 0
        self._carriage_return = b""
        """A carriage return at the end of the last chunk, which may be half of a line break."""

    def __len__(self) -> int:
        return self._size + len(self._carriage_return)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the events that `chunk` completes, in order, without their ends. Comments are events too."""
        if self._carriage_return or b"\r" in chunk:
            chunk = self._carriage_return + chunk
            self._carriage_return = chunk[-1:] if chunk.endswith(b"\r") else b""
            chunk = chunk.removesuffix(b"\r").replace(b"\r\n", b"\n")
        if self._chunks:
            ends_event = chunk.startswith(b"\n") and self._chunks[-1].endswith(b"\n")
            if chunk and not ends_event and EVENT_END not in chunk:
                self._chunks.append(chunk)
                self._size += len(chunk)
                return []
            chunk = b"".join([*self._chunks, chunk])
        *events, incomplete = chunk.split(EVENT_END)
        self._chunks, self._size = [incomplete] if incomplete else [], len(incomplete)
        return events


class EventParser:
    """Incremental parser that collects the `data` of events from a byte stream."""

    def __init__(self) -> None:
        self._splitter = EventSplitter()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that `chunk` completes, in order. Comments and other fields are dropped.

        Raises:
            ValueError: An event is longer than `MAX_EVENT_BYTES`.
        """
        events = self._splitter.feed(chunk)
        if len(self._splitter) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return [data for event in events if (data := event_data(event)) is not None]
