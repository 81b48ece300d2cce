"""Limits on client connections: per address, over all, and which idle connection closes for a new one."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.http_server.connection_limiter import MIN_IDLE_S, ConnectionLimiter, ConnectionSlot

PROXY = ip_address("10.0.0.1")


class Connections:
    """Connections admitted by a limiter, by name."""

    def __init__(self, max_connections: int, max_per_address: int | None = None) -> None:
        self.evictions: list[str] = []
        self.limiter = ConnectionLimiter(
            max_connections,
            max_per_address,
            PROXY.__eq__,
            self.evictions.append,
            self._clock,
        )
        self.now = 0.0
        self.step_s = MIN_IDLE_S
        """Time that passes between two readings of the clock."""
        self.closed: list[str] = []

    def _clock(self) -> float:
        self.now += self.step_s
        return self.now

    def open(self, name: str, peer: str | None = "192.0.2.1") -> ConnectionSlot | None:
        assert self.limiter.can_admit
        slot = self.limiter.admit(peer)
        if slot is not None:
            slot.close_connection = lambda: self.closed.append(name)
        return slot

    def open_busy(self, name: str, peer: str | None = "192.0.2.1") -> ConnectionSlot:
        slot = self.open(name, peer)
        assert slot is not None
        slot.mark_busy()
        return slot


def test_new_connection_replaces_the_idlest_of_all() -> None:
    connections = Connections(3)
    first = connections.open("first", "192.0.2.1")
    connections.open_busy("busy", "192.0.2.2")
    connections.open("second", "192.0.2.3")
    assert first is not None
    first.mark_busy()
    first.mark_idle()  # idle again, later than "second"
    assert connections.open("new", "192.0.2.4") is not None
    assert connections.open("newer", "192.0.2.5") is not None
    assert connections.closed == ["second", "first"]
    assert connections.evictions == ["connection_limit"] * 2
    assert len(connections.limiter) == 3


def test_no_connection_is_admitted_while_all_run_requests() -> None:
    connections = Connections(2)
    busy = [connections.open_busy(f"busy {number}", f"192.0.2.{number}") for number in range(2)]
    assert not connections.limiter.can_admit
    assert not connections.limiter.evict_idlest()
    busy[0].release()
    busy[0].release()
    assert connections.open("new", "192.0.2.9") is not None
    assert not connections.closed


def test_connection_that_has_just_been_opened_is_kept() -> None:
    connections = Connections(2, 1)
    connections.step_s = 0.0
    connections.open("first")
    assert connections.open("refused") is None
    connections.open("second", "192.0.2.2")
    assert not connections.limiter.can_admit
    assert not connections.limiter.evict_idlest()
    connections.now += MIN_IDLE_S
    assert connections.open("third", "192.0.2.3") is not None
    assert connections.closed == ["first"]


def test_address_at_its_limit_replaces_only_its_own_connections() -> None:
    connections = Connections(100, 2)
    connections.open("other", "192.0.2.2")
    connections.open_busy("busy")
    idle = connections.open("idle")
    assert connections.open("third") is not None
    assert connections.closed == ["idle"]
    assert connections.evictions == ["address_limit"]
    assert idle is not None
    idle.mark_idle()  # a closed connection is not counted again
    assert len(connections.limiter) == 3


def test_address_is_refused_while_all_its_connections_run_requests() -> None:
    connections = Connections(100, 2)
    busy = [connections.open_busy("busy") for _ in range(2)]
    assert connections.open("refused") is None
    assert connections.open("other", "192.0.2.2") is not None
    busy[0].release()
    assert connections.open("accepted") is not None
    assert not connections.closed


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
    connections = Connections(4 if max_per_address is None else 100, max_per_address)
    count = (max_per_address or 3) + 1
    for number in range(count):
        connections.open(str(number), peers[number % len(peers)])
    assert connections.closed == (["0"] if is_limited else [])


@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "busy", "idle", "release", "evict"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_limits_hold_after_any_events(events: list[tuple[str, int]]) -> None:
    connections = Connections(6, 3)
    slots: list[ConnectionSlot] = []
    for event, number in events:
        if event == "open" and connections.limiter.can_admit:
            slot = connections.open(str(len(slots)), f"192.0.2.{number % 3}")
            slots += [] if slot is None else [slot]
        elif event == "evict":
            connections.limiter.evict_idlest()
        elif slots and event != "open":
            slot = slots[number % len(slots)]
            {"busy": slot.mark_busy, "idle": slot.mark_idle, "release": slot.release}[event]()
        assert len(connections.limiter) <= 6
    for slot in slots:
        slot.release()
    assert len(connections.limiter) == 0
    assert not connections.limiter.evict_idlest()
