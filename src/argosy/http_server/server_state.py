"""State that all connections of one HTTP server share."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.server import ServerState

if TYPE_CHECKING:
    from argosy.http_server.connection import HttpConnection
    from argosy.http_server.deadlines import Deadlines


class HttpServerState(ServerState):
    """uvicorn's server state, extended by connection age, draining, and the memory used by request bodies."""

    def __init__(self, max_connection_age_s: float) -> None:
        super().__init__()
        self.max_connection_age_s = max_connection_age_s
        """Approximate age after which a connection closes with its next response."""
        self.drain_deadlines: Deadlines[HttpConnection] | None = None
        """Set while the server drains. Each connection then closes with its next response or at its deadline here."""
        self.unread_body_bytes = 0
        """Bytes of request bodies that are buffered and not yet read by handlers, over all connections."""
        self.all_closed = asyncio.Event()
        """Set while no connection is open."""
        self.all_closed.set()

    def add_connection(self, connection: HttpConnection) -> None:
        """Register an open connection."""
        self.connections.add(connection)  # type: ignore[arg-type] # uvicorn names its own classes
        self.all_closed.clear()

    def remove_connection(self, connection: HttpConnection) -> None:
        """Remove a closed connection."""
        self.connections.discard(connection)
        if not self.connections:
            self.all_closed.set()
