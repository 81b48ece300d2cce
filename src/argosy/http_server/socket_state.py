"""Poll a connection's socket for state that the event loop has not reported yet."""

from __future__ import annotations

import asyncio
import select


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


def get_peer_address(transport: asyncio.Transport) -> tuple[str, int] | None:
    """Return the host and port of the peer; None for a Unix socket or if the peer has disconnected."""
    try:
        address = transport.get_extra_info("socket").getpeername()
    except OSError:
        return None
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None


def get_local_address(transport: asyncio.Transport) -> tuple[str, int | None]:
    """Return the host and port at which the peer connected, or the path of a Unix socket."""
    address = transport.get_extra_info("socket").getsockname()
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else (address, None)
