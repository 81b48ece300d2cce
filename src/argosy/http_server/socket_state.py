"""What the kernel knows of a connection, and its event loop was not told yet."""

from __future__ import annotations

import asyncio
import select


def is_peer_closed(transport: asyncio.Transport) -> bool:
    """Whether the other end is known to be closed; over TCP only once it was sent something since."""
    return _poll_event(transport, 0)  # an end is told unasked


def has_unread_data(transport: asyncio.Transport) -> bool:
    """Whether there is something to read."""
    return _poll_event(transport, select.POLLIN)


def _poll_event(transport: asyncio.Transport, event: int) -> bool:
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), event)
    return bool(poll.poll(0))
