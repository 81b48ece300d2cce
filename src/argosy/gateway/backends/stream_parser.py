"""What reads the stream of a replica: the journal of ours, and what the dialects of others take."""

from __future__ import annotations

from abc import ABC, abstractmethod


class StreamParser(ABC):
    """Reads one attempt's stream and says what the client gets of it."""

    is_done = False
    """`[DONE]` came: the answer is whole."""
    stopped_early = False
    """The answer is whole before its server knows, which need not go on."""
    failure = ""
    """Why it will not become whole, if the server said so."""
    failure_status = 0
    """The HTTP status that this would have been before the stream began, if the server said that too."""

    @property
    def can_use_fast_path(self) -> bool:
        """It has nothing half read, and journaled pieces that come next need no reader: see `fast_path`."""
        return False

    @abstractmethod
    def feed(self, body: bytes) -> bytes:
        """What may be passed on now; nothing more once there was a `failure`."""

    @abstractmethod
    def flush(self) -> bytes:
        """What was held back until the attempt had ended well."""
