"""Which client connections are open, and which of them has to close for a new one.

Only connections without a running request are closed, the one that became idle first before the others. A client that
keeps thousands of idle connections loses some of them, and a new client always gets in. A connection that has just been
opened is not closed, because its request is on the way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Literal
from weakref import WeakValueDictionary

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


@dataclass(eq=False)
class _Group:
    """Connections that are limited together."""

    count: int = 0
    idle: OrderedDict[ConnectionSlot, float] = field(default_factory=OrderedDict)
    """Connections without a request and since when, the idlest first."""

    def find_idlest(self, now: float) -> ConnectionSlot | None:
        """Return the connection that has been idle for the longest time, if it may be closed."""
        for slot, since in self.idle.items():
            return slot if now - since >= MIN_IDLE_S else None
        return None


class ConnectionSlot:
    """Entry of an accepted connection in the limiter, until the connection is closed."""

    __slots__ = ("_clock", "_groups", "close_connection")

    def __init__(self, clock: Callable[[], float], *groups: _Group) -> None:
        self._clock = clock
        self._groups = groups
        self.close_connection: Callable[[], object] = _do_nothing
        """Closes the connection at once. The owner sets it, and replaces it after the TLS handshake."""
        for group in groups:
            group.count += 1
        self.mark_idle()

    def mark_busy(self) -> None:
        """Record that a request runs, so that the connection is not closed for another one."""
        for group in self._groups:
            group.idle.pop(self, None)

    def mark_idle(self) -> None:
        """Record that no request runs any more."""
        now = self._clock()
        for group in self._groups:
            group.idle[self] = now

    def release(self) -> None:
        """Record that the connection is closed. Further calls have no effect."""
        self.mark_busy()
        for group in self._groups:
            group.count -= 1
        self._groups = ()
        self.close_connection = _do_nothing


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
        self._all = _Group()
        self._sources = WeakValueDictionary[str, _Group]()
        """Connections of each client address that has some."""

    def __len__(self) -> int:
        """Return the number of open connections."""
        return self._all.count

    @property
    def can_admit(self) -> bool:
        """Whether a new connection fits, possibly after an idle one is closed."""
        return (
            self._all.count < self._max_connections
            or self._all.find_idlest(self._clock()) is not None
        )

    def admit(self, peer: str | None) -> ConnectionSlot | None:
        """Register a new connection as idle, and close another idle one if a limit is reached. Needs `can_admit`.

        Args:
            peer: Address of the client. None over a Unix socket.

        Returns:
            The slot of the connection, or None if its address has too many connections that are in use.
        """
        groups = [self._all]
        source_name = None if peer is None else self._source_name(peer)
        if source_name is not None:
            source = self._sources.setdefault(source_name, _Group())
            if source.count >= self._max_per_address:
                idlest = source.find_idlest(self._clock())
                if idlest is None:
                    return None
                self._evict(idlest, "address_limit")
            groups.append(source)
        if self._all.count >= self._max_connections:
            self.evict_idlest()
        return ConnectionSlot(self._clock, *groups)

    def evict_idlest(self) -> bool:
        """Close the connection that has been without a request for the longest time. Returns whether there was one."""
        idlest = self._all.find_idlest(self._clock())
        if idlest is None:
            return False
        self._evict(idlest, "connection_limit")
        return True

    def _evict(self, slot: ConnectionSlot, reason: EvictionReason) -> None:
        close_connection = slot.close_connection
        slot.release()
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
