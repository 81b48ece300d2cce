"""What the connections of one server share."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.server import ServerState

if TYPE_CHECKING:
    from argosy.http_server.connection import HttpConnection
    from argosy.http_server.deadlines import Deadlines


class HttpServerState(ServerState):
    """What uvicorn's server keeps of its connections."""

    def __init__(self, max_connection_age_s: float) -> None:
        super().__init__()
        self.max_connection_age_s = max_connection_age_s
        """About so long a connection is kept for more requests; then its next answer is its last."""
        self.drain_deadlines: Deadlines[HttpConnection] | None = None
        """It is leaving: each connection's next answer is its last, and those without requests end here."""
        self.unread_body_bytes = 0
        """Bytes of bodies that are kept until somebody takes them."""
        self.all_closed = asyncio.Event()
        """There is no connection."""
        self.all_closed.set()

    def add_connection(self, connection: HttpConnection) -> None:
        """A client has connected."""
        self.connections.add(connection)  # type: ignore[arg-type] # uvicorn names its own classes
        self.all_closed.clear()

    def remove_connection(self, connection: HttpConnection) -> None:
        """It is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self.all_closed.set()
