"""Flow control of one client's connection: reading and writing pause when a side is behind."""

from __future__ import annotations

import asyncio
import socket
import struct

from argosy.http_server.connection_limiter import ConnectionSlot
from argosy.http_server.server_state import HttpServerState


class ClientConnection(asyncio.Protocol):
    """Connection as its requests and its WebSocket use it. `HttpConnection` adds what is read from it.

    Args:
        server_state: State of the server.
        slot: Entry in the limiter, which closes the connection for a new one while it is idle.
    """

    transport: asyncio.Transport

    def __init__(self, server_state: HttpServerState, slot: ConnectionSlot) -> None:
        self.server_state = server_state
        self.slot = slot
        self.is_backpressured = False
        """Whether the client reads more slowly than data is written."""
        self._holds_input = False
        """Whether a request waits for an earlier response, so that no more input is read."""
        self._is_reading_paused = False

    def pause_reading(self) -> None:
        """Stop reading from the client."""
        if not self._is_reading_paused and not self.transport.is_closing():
            self._is_reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Start reading from the client again, unless a request waits."""
        if self._is_reading_paused and not self._holds_input and not self.transport.is_closing():
            self._is_reading_paused = False
            self.transport.resume_reading()

    def abort(self) -> None:
        """Close the connection with a reset, so that the kernel drops its buffers too.

        `transport.close()` would wait for a client that reads nothing.
        """
        peer = self.transport.get_extra_info("socket")
        if peer is not None and not self.transport.is_closing():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
