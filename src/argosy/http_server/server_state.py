"""State that all connections of one HTTP server share."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Protocol

from argosy.http_server.deadlines import Deadlines


class ServerConnection(Hashable, Protocol):
    """Client connection, as its server sees it."""

    def close_gracefully(self) -> None:
        """Close with the next response, or when the drain deadline passes."""

    def shutdown(self) -> None:
        """Close once the current response is complete."""


class HttpServerState:
    """Open connections and running requests of a server."""

    def __init__(self, max_connection_age_s: float) -> None:
        self.max_connection_age_s = max_connection_age_s
        """Approximate age after which a connection closes with its next response."""
        self.connections: set[ServerConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        """Running requests."""
        self.default_headers: list[tuple[bytes, bytes]] = []
        """Headers of all responses."""
        self.drain_deadlines: Deadlines[ServerConnection] | None = None
        """Set while the server drains. Each connection then closes with its next response or at its deadline here."""
        self.unread_body_bytes = 0
        """Bytes of request bodies that are buffered and not yet read by handlers, over all connections."""
        self.all_closed = asyncio.Event()
        """Set while no connection is open."""
        self.all_closed.set()

    def add_connection(self, connection: ServerConnection) -> None:
        """Register an open connection."""
        self.connections.add(connection)
        self.all_closed.clear()

    def remove_connection(self, connection: ServerConnection) -> None:
        """Remove a closed connection."""
        self.connections.discard(connection)
        if not self.connections:
            self.all_closed.set()
