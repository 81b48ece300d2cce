"""What the connections of one server share."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.server import ServerState

if TYPE_CHECKING:
    from argosy.http_server.connection import Connection
    from argosy.http_server.deadlines import Deadlines


class State(ServerState):
    """What uvicorn's server keeps of its connections."""

    def __init__(self, age_s: float) -> None:
        super().__init__()
        self.age_s = age_s
        """About so long a connection is kept for more requests; then its next answer is its last."""
        self.leaving: Deadlines[Connection] | None = None
        """It is leaving: each connection's next answer is its last, and those without requests end here."""
        self.unread = 0
        """Bytes of bodies that are kept until somebody takes them."""
        self.deserted = asyncio.Event()
        """There is no connection."""
        self.deserted.set()

    def add(self, connection: Connection) -> None:
        """A client has connected."""
        self.connections.add(connection)  # type: ignore[arg-type] # uvicorn names its own classes
        self.deserted.clear()

    def remove(self, connection: Connection) -> None:
        """It is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self.deserted.set()
