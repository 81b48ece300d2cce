"""Interface of the parsers that turn a replica's stream into what the client receives."""

from __future__ import annotations

from abc import ABC, abstractmethod


class StreamParser(ABC):
    """Parser for the stream of one attempt. One subclass exists for each way to resume a stream."""

    is_done = False
    """Whether `[DONE]` arrived, so that the response is complete."""
    stopped_early = False
    """Whether the gateway found the end of the response before the server did. The server need not continue."""
    failure = ""
    """Reason why the response stays incomplete, if the server reported an error or sent a malformed event."""
    failure_status = 0
    """HTTP status that the error would have had before the stream started; 0 if unknown."""

    @property
    def can_use_fast_path(self) -> bool:
        """Whether native code may forward the next events without this parser (see `fast_path`)."""
        return False

    @abstractmethod
    def feed(self, body: bytes) -> bytes:
        """Parse the next bytes of the stream and return the bytes to forward; nothing after a `failure`."""

    @abstractmethod
    def flush(self) -> bytes:
        """Return the bytes held back until the attempt succeeded. Call it once, at the end."""
