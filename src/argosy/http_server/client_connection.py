"""Connection of one client: its flow control, its socket, and the state that it shares with other connections."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections import defaultdict

from argosy.http_server.connection_limiter import ConnectionSlot
from argosy.http_server.paced_protocol import PacedProtocol

MAX_UNREAD_BODY_BYTES = 1 << 30
"""Limit on the buffered request bodies of all connections together. Bodies beyond it are rejected."""
MAX_TENANT_SHARE = 0.5
"""Part of that limit that the large bodies of one tenant may take."""


class HttpServerState:
    """State that the requests of all connections share: default headers, tasks, and the memory of their bodies."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        """Running requests."""
        self.default_headers: list[tuple[bytes, bytes]] = []
        """Headers of all responses, such as Date."""
        self.unread_body_bytes = 0
        """Bytes of request bodies that are buffered and not yet read and parsed by handlers, over all connections."""

        self._tenant_bytes = defaultdict[str, int](int)
        """Bytes of large bodies by tenant, without zeros."""

    def add_unread_bytes(self, byte_count: int, tenant: str | None = None) -> bool:
        """Add `byte_count`, which may be negative, to the buffered bytes.

        Args:
            byte_count: Number of bytes.
            tenant: Tenant whose large body they belong to. None for small bodies, and for those of an unknown sender.

        Returns:
            Whether the bytes of the tenant and of all are within their limits.
        """
        self.unread_body_bytes += byte_count
        if tenant is None:
            return self.unread_body_bytes <= MAX_UNREAD_BODY_BYTES
        self._tenant_bytes[tenant] += byte_count
        tenant_bytes = self._tenant_bytes[tenant]
        if not tenant_bytes:
            del self._tenant_bytes[tenant]
        return (
            self.unread_body_bytes <= MAX_UNREAD_BODY_BYTES
            and tenant_bytes <= MAX_UNREAD_BODY_BYTES * MAX_TENANT_SHARE
        )


class ClientConnection(PacedProtocol):
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
            self.update_reading()

    def resume_reading(self) -> None:
        """Start reading from the client again, unless a request waits."""
        if self._is_reading_paused and not self._holds_input and not self.transport.is_closing():
            self._is_reading_paused = False
            self.update_reading()

    def update_reading(self) -> None:
        """Read from the client, unless reading is paused or received input waits for its turn."""
        if self.transport.is_closing():
            return
        if self._is_reading_paused or self.waits_for_turn:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def abort(self) -> None:
        """Close the connection with a reset, so that the kernel drops its buffers too.

        `transport.close()` would wait for a client that reads nothing.
        """
        peer = self.transport.get_extra_info("socket")
        if peer is not None and not self.transport.is_closing():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


def is_peer_closed(transport: asyncio.Transport) -> bool:
    """Return whether the kernel knows that the peer has closed the connection.

    Over TCP the kernel learns this only after data was sent to the peer.
    """
    return _poll_event(transport, 0)  # poll() reports POLLHUP and POLLERR without a request


def has_unread_data(transport: asyncio.Transport) -> bool:
    """Return whether the socket has data to read."""
    return _poll_event(transport, select.POLLIN)


def _poll_event(transport: asyncio.Transport, event: int) -> bool:
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), event)
    return bool(poll.poll(0))


def get_peer_address(transport: asyncio.Transport) -> str:
    """Return the address of the peer: "unix" for a Unix socket, and an empty string if it has disconnected."""
    client = transport.get_extra_info("socket")
    if client.family == socket.AF_UNIX:
        return "unix"
    try:
        return str(client.getpeername()[0])
    except OSError:
        return ""
