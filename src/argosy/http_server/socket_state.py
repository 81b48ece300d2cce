"""Poll a connection's socket for state that the event loop has not reported yet."""

from __future__ import annotations

import asyncio
import select
import socket


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
