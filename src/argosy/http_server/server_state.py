"""State that all connections of one HTTP server share."""

from __future__ import annotations

import asyncio

MAX_UNREAD_BODY_BYTES = 1 << 30
"""Limit on the buffered request bodies of all connections together. Bodies beyond it are rejected."""


class HttpServerState:
    """State that the requests of all connections share: default headers, tasks, and the memory of their bodies."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        """Running requests."""
        self.default_headers: list[tuple[bytes, bytes]] = []
        """Headers of all responses, such as Date."""
        self.unread_body_bytes = 0
        """Bytes of request bodies that are buffered and not yet read by handlers, over all connections."""

    def add_unread_bytes(self, byte_count: int) -> bool:
        """Add `byte_count`, which may be negative, to the buffered bytes.

        Returns:
            Whether the total is within its limit.
        """
        self.unread_body_bytes += byte_count
        return self.unread_body_bytes <= MAX_UNREAD_BODY_BYTES
