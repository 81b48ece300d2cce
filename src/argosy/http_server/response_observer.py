"""What is sent of an answer, sent to somebody besides its client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class ResponseObserver(Protocol):
    """What an answer is sent to besides its client."""

    def on_start(self, content_type: bytes) -> None:
        """It begins, and is of this media type."""

    def on_body(self, data: bytes) -> None:
        """A part of its body."""


def tee_writes(
    first: Callable[[bytes], None], second: Callable[[bytes], None]
) -> Callable[[bytes], None]:
    """What gives them to both."""

    def push(data: bytes) -> None:
        first(data)
        second(data)

    return push
