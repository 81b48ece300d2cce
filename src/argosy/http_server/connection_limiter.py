"""Which client connections are open, and which of them has to close for a new one.

Only connections without a running request are closed, the one that became idle first before the others. A client that
keeps thousands of idle connections loses some of them, and a new client always gets in. A connection that has just been
opened is not closed, because its request is on the way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Literal

IpAddress = IPv4Address | IPv6Address
EvictionReason = Literal["address_limit", "connection_limit"]
"""Limit for which an idle connection was closed: that of its client's address, or that of all connections."""

DEFAULT_ADDRESS_SHARE = 0.75
"""Share of all connections that one address may have if no number is set. One client may be a busy application server,
and its idle connections close for others anyway."""
MIN_IDLE_S = 1.0
"""Time without a request before a connection may be closed for another one."""
_IPV6_CLIENT_PREFIX_BITS = 64
"""A client with IPv6 usually has a whole network of this size."""


class ConnectionSlot:
    """Entry of an accepted connection in the limiter, until the connection is closed."""

    __slots__ = ("_limiter", "close_connection", "source")

    def __init__(self, limiter: ConnectionLimiter, source: str | None) -> None:
        self._limiter = limiter
        self.source = source
        """Client whose connections are counted together. None if they are not limited."""
        self.close_connection: Callable[[], object] = _do_nothing
        """Closes the connection at once. The owner sets it, and replaces it after the TLS handshake."""

    def mark_busy(self) -> None:
        """Record that a request runs, so that the connection is not closed for another one."""
        self._limiter.mark_busy(self)

    def mark_idle(self) -> None:
        """Record that no request runs any more."""
        self._limiter.mark_idle(self)

    def release(self) -> None:
        """Record that the connection is closed. Further calls have no effect."""
        self._limiter.release(self)


class _Source:
    """Connections of one client address."""

    __slots__ = ("count", "idle")

    def __init__(self) -> None:
        self.count = 0
        self.idle = OrderedDict[ConnectionSlot, float]()
        """Connections without a request and since when, the idlest first."""


class ConnectionLimiter:
    """Limits the connections of all clients together, and those of each client address.

    Args:
        max_connections: Maximum number of connections.
        max_per_address: Maximum number of connections of one IPv4 address or IPv6 /64 network. None means a share of
            `max_connections`, and no maximum for addresses of this machine.
        is_exempt: Returns whether an address has no maximum of its own, such as that of a trusted proxy.
        on_evicted: Called after an idle connection was closed for a new one.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        max_connections: int,
        max_per_address: int | None,
        is_exempt: Callable[[IpAddress], bool],
        on_evicted: Callable[[EvictionReason], object],
        clock: Callable[[], float],
    ) -> None:
        self._max_connections = max_connections
        self._limits_loopback = max_per_address is not None
        self._max_per_address = max_per_address or max(
            1, int(max_connections * DEFAULT_ADDRESS_SHARE)
        )
        self._is_exempt = is_exempt
        self._on_evicted = on_evicted
        self._clock = clock
        self._slots: set[ConnectionSlot] = set()
        self._idle = OrderedDict[ConnectionSlot, float]()
        """Connections without a request and since when, the idlest first."""
        self._sources: dict[str, _Source] = {}

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._slots)

    @property
    def can_admit(self) -> bool:
        """Whether a new connection fits, possibly after an idle one is closed."""
        return len(self._slots) < self._max_connections or self._find_idlest(self._idle) is not None

    def admit(self, peer: str | None) -> ConnectionSlot | None:
        """Register a new connection as idle, and close another idle one if a limit is reached. Needs `can_admit`.

        Args:
            peer: Address of the client. None over a Unix socket.

        Returns:
            The slot of the connection, or None if its address has too many connections that are in use.
        """
        source_name = None if peer is None else self._source_name(peer)
        if source_name is not None:
            source = self._sources.get(source_name)
            if source is not None and source.count >= self._max_per_address:
                idlest = self._find_idlest(source.idle)
                if idlest is None:
                    return None
                self._evict(idlest, "address_limit")
        if len(self._slots) >= self._max_connections:
            self.evict_idlest()
        slot = ConnectionSlot(self, source_name)
        self._slots.add(slot)
        if source_name is not None:
            self._sources.setdefault(source_name, _Source()).count += 1
        self.mark_idle(slot)
        return slot

    def evict_idlest(self) -> bool:
        """Close the connection that has been without a request for the longest time. Returns whether there was one."""
        idlest = self._find_idlest(self._idle)
        if idlest is None:
            return False
        self._evict(idlest, "connection_limit")
        return True

    def mark_busy(self, slot: ConnectionSlot) -> None:
        """Record that a connection runs a request."""
        self._idle.pop(slot, None)
        if slot.source is not None and slot in self._slots:
            self._sources[slot.source].idle.pop(slot, None)

    def mark_idle(self, slot: ConnectionSlot) -> None:
        """Record that a connection runs no request any more."""
        if slot not in self._slots:
            return
        now = self._clock()
        self._idle[slot] = now
        if slot.source is not None:
            self._sources[slot.source].idle[slot] = now

    def release(self, slot: ConnectionSlot) -> None:
        """Record that a connection is closed."""
        if slot not in self._slots:
            return
        self.mark_busy(slot)
        self._slots.remove(slot)
        slot.close_connection = _do_nothing
        if slot.source is not None:
            source = self._sources[slot.source]
            source.count -= 1
            if not source.count:
                del self._sources[slot.source]

    def _find_idlest(self, idle: OrderedDict[ConnectionSlot, float]) -> ConnectionSlot | None:
        """Return the connection that has been idle for the longest time, if it may be closed."""
        for slot, since in idle.items():
            return slot if self._clock() - since >= MIN_IDLE_S else None
        return None

    def _evict(self, slot: ConnectionSlot, reason: EvictionReason) -> None:
        close_connection = slot.close_connection
        self.release(slot)
        close_connection()
        self._on_evicted(reason)

    def _source_name(self, peer: str) -> str | None:
        """Return the client that an address belongs to, or None if its connections are not limited."""
        address = ip_address(peer.partition("%")[0])
        if isinstance(address, IPv6Address):
            address = address.ipv4_mapped or address
        if self._is_exempt(address) or (address.is_loopback and not self._limits_loopback):
            return None
        if isinstance(address, IPv4Address):
            return str(address)
        return str(IPv6Network((address, _IPV6_CLIENT_PREFIX_BITS), strict=False))


def _do_nothing() -> None:
    """Close nothing, since the connection is not open."""
