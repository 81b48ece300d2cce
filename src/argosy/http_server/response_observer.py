"""What is sent of an answer, sent to somebody besides its client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Copy(Protocol):
    """What an answer is sent to besides its client."""

    def begin(self, kind: bytes) -> None:
        """It begins, and is of this media type."""

    def add(self, data: bytes) -> None:
        """A part of its body."""


def to_both(
    one: Callable[[bytes], None], other: Callable[[bytes], None]
) -> Callable[[bytes], None]:
    """What gives them to both."""

    def push(data: bytes) -> None:
        one(data)
        other(data)

    return push
