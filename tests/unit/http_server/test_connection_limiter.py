"""Limits on client connections: per address, over all, and which idle connection closes for a new one."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.http_server.connection_limiter import MIN_IDLE_S, ConnectionLimiter, ConnectionSlot


@dataclass(eq=False)
class Client:
    """An open connection."""

    address: str
    slot: ConnectionSlot
    idle_since: float | None
    """None while it runs a request."""


class Clients:
    """Connections at a limiter of 4, of which one address may have 2, and what the limiter has to do with each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.open: list[Client] = []
        """Open connections. Idle ones are in the order in which they became idle."""
        self.closed: list[tuple[Client, str]] = []
        self._closing: list[Client] = []
        self.limiter = ConnectionLimiter(
            4,
            2,
            lambda _: False,
            lambda reason: self.closed.append((self._closing.pop(), reason)),
            lambda: self.now,
        )

    def find_idlest(self, address: str | None = None) -> Client | None:
        for client in self.open:
            if client.idle_since is not None and address in (None, client.address):
                return client if self.now - client.idle_since >= MIN_IDLE_S else None
        return None

    def connect(self, address: str) -> None:
        """Connect, and check which connection closes for the new one."""
        assert self.limiter.can_admit == (len(self.open) < 4 or self.find_idlest() is not None)
        if not self.limiter.can_admit:
            return
        replaced, is_admitted = list[tuple[Client, str]](), True
        if sum(client.address == address for client in self.open) == 2:
            idlest = self.find_idlest(address)
            is_admitted = idlest is not None
            replaced += [(idlest, "address_limit")] if idlest else []
        elif len(self.open) == 4 and (idlest := self.find_idlest()):
            replaced.append((idlest, "connection_limit"))
        slot = self.limiter.admit(address)
        self.check_closed(replaced)
        assert (slot is not None) == is_admitted
        if slot is not None:
            client = Client(address, slot, self.now)
            slot.close_connection = lambda: self._closing.append(client)
            self.open.append(client)

    def check_closed(self, expected: list[tuple[Client, str]]) -> None:
        """Check which connections closed, and that they are not counted again."""
        assert self.closed == expected
        self.closed.clear()
        for client, _ in expected:
            self.open.remove(client)
            client.slot.mark_idle()
            client.slot.release()

    def toggle_request(self, client: Client) -> None:
        self.open.remove(client)
        self.open.append(client)
        if client.idle_since is None:
            client.idle_since = self.now
            client.slot.mark_idle()
        else:
            client.idle_since = None
            client.slot.mark_busy()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "open", "open", "toggle", "wait", "wait", "release", "evict"]),
            st.integers(0, 9),
        ),
        min_size=20,
        max_size=60,
    )
)
def test_idlest_connection_closes_for_a_new_one(events: list[tuple[str, int]]) -> None:
    """The new one is refused if its address has too many connections that are all in use or new."""
    clients = Clients()
    for event, number in events:
        if event == "open":
            clients.connect(f"192.0.2.{number % 3}")
        elif event == "wait":
            clients.now += MIN_IDLE_S
        elif event == "evict":
            idlest = clients.find_idlest()
            assert clients.limiter.evict_idlest() == (idlest is not None)
            clients.check_closed([(idlest, "connection_limit")] if idlest else [])
        elif clients.open:
            client = clients.open[number % len(clients.open)]
            if event == "toggle":
                clients.toggle_request(client)
            else:
                clients.open.remove(client)
                client.slot.release()
        assert len(clients.limiter) == len(clients.open)
    for client in clients.open:
        client.slot.release()
    assert len(clients.limiter) == 0
    assert not clients.limiter.evict_idlest()


@pytest.mark.parametrize(
    ("max_per_address", "peers", "is_limited"),
    [
        (2, ("192.0.2.1",), True),
        (2, ("::ffff:192.0.2.1", "192.0.2.1"), True),
        (2, ("2001:db8::1", "2001:db8::2:1", "2001:db8::ffff"), True),
        (2, ("2001:db8::1", "2001:db8:0:1::1", "2001:db8:0:2::1"), False),
        (2, ("fe80::1%eth0",), True),
        (2, ("127.0.0.1",), True),
        (2, ("10.0.0.1",), False),
        (2, (None,), False),
        (None, ("192.0.2.1",), True),
        (None, ("127.0.0.1", "127.0.0.2"), False),
        (None, ("::1",), False),
        (None, (None,), False),
    ],
)
def test_limit_counts_addresses_and_networks(
    max_per_address: int | None, peers: tuple[str | None, ...], is_limited: bool
) -> None:
    """Without a number, an address may have three quarters of 4 connections, and this machine all of them."""
    max_connections, proxy = 4 if max_per_address is None else 100, ip_address("10.0.0.1")
    limiter = ConnectionLimiter(
        max_connections, max_per_address, proxy.__eq__, lambda _: None, lambda: 0.0
    )
    limit = max_per_address or 3
    admitted = [limiter.admit(peers[number % len(peers)]) for number in range(limit + 1)]
    assert (admitted[limit] is None) == is_limited
    assert None not in admitted[:limit]
