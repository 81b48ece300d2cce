"""Observer that receives a copy of a response while the server sends the response to the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class ResponseObserver(Protocol):
    """Second receiver of a response, besides the client."""

    def on_start(self, content_type: bytes) -> None:
        """Handle the start of the response, which has this content type."""

    def on_body(self, data: bytes) -> None:
        """Handle a part of the response body."""


def tee_writes(
    first: Callable[[bytes], None], second: Callable[[bytes], None]
) -> Callable[[bytes], None]:
    """Return a function that passes its data to both functions, in this order."""

    def write_both(data: bytes) -> None:
        first(data)
        second(data)

    return write_both
