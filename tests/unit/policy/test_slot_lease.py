"""What runs at a time, over gateways that speak when they have to: what runs is kept, what has ended comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from tests.authority import Authority

from argosy.policy import Ask, Concurrency, Grant, SlotLease

ALIVE_S = 5.0
LIMIT = 12
TICK_S = 0.05


@dataclass
class Gateway:
    """It asks when somebody wants a place or when the lease is due, and forgets a lease that is idle."""

    name: str
    lease: SlotLease = field(
        default_factory=lambda: SlotLease("places", Concurrency(LIMIT), ALIVE_S)
    )
    running: int = 0
    active: bool = False
    messages: int = 0


@dataclass
class World:
    """Gateways, and an authority that forgets a limit that it has not heard of for long."""

    gateways: list[Gateway]
    authority: Authority = field(default_factory=Authority)
    now: float = 1000.0
    kept_until: float = 0.0

    def exchange(self, gateway: Gateway, *asked: SlotLease) -> None:
        if self.now >= self.kept_until:
            self.authority.limits.clear()
        gateway.messages += 1
        asks = [(lease.name, lease.ask(self.now)) for lease in asked]
        told = self.authority.exchange(gateway.name, gateway.messages, ALIVE_S, asks, self.now)
        for lease, (_, ask), grant in zip(asked, asks, told, strict=True):
            assert (
                gateway.running + max(0, lease.room(self.now)) <= ask.kept
            )  # until it is answered
            self.kept_until = self.now + ask.keep_s
            lease.answer(ask, grant, self.now, self.now)
            gateway.active = not lease.idle

    def begin(self, gateway: Gateway) -> bool:
        if gateway.lease.room(self.now) < 1:
            gateway.lease.want(1)
            gateway.active = True
            self.exchange(gateway, gateway.lease)
        if gateway.lease.room(self.now) < 1:
            return False
        gateway.lease.add(1, self.now)
        gateway.active = True
        gateway.running += 1
        return True

    def end(self, gateway: Gateway) -> None:
        if gateway.running:
            gateway.lease.correct(0, -1, self.now)
            gateway.running -= 1

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S
            for gateway in self.gateways:
                if gateway.active and gateway.lease.due(self.now):
                    self.exchange(gateway, gateway.lease)
            self.check()

    def kept(self, gateway: Gateway) -> int:
        limit = self.authority.limits.get("places")
        return 0 if limit is None else limit.places.get(gateway.name, 0)

    def check(self) -> None:
        for gateway in self.gateways:
            assert self.kept(gateway) >= gateway.running
            assert gateway.lease.used >= gateway.running
        assert sum(map(self.kept, self.gateways)) <= LIMIT


def world(count: int) -> World:
    return World([Gateway(f"g{number}") for number in range(count)])


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["begin", "begin", "end", "wait"])),
        max_size=40,
    ),
)
def test_what_runs_is_kept_nobody_waits_for_what_is_free_and_in_the_end_all_comes_back(
    count: int, steps: list[tuple[int, str]]
) -> None:
    fleet = world(count)
    for who, what in steps:
        gateway = fleet.gateways[who % count]
        if what == "wait":
            fleet.wait(3.0)
        elif what == "end":
            fleet.end(gateway)
        elif not fleet.begin(gateway):
            assert sum(map(fleet.kept, fleet.gateways)) == LIMIT
        fleet.check()
    fleet.wait(3.0)
    for gateway in fleet.gateways:  # a few are at hand for those that come next, and no more
        assert fleet.kept(gateway) <= gateway.running + gateway.running // 4 + 1
    for gateway in fleet.gateways:
        while gateway.running:
            fleet.end(gateway)
    fleet.wait(3.0)
    assert not any(gateway.active for gateway in fleet.gateways)
    assert not any(map(fleet.kept, fleet.gateways))
    messages = [gateway.messages for gateway in fleet.gateways]
    fleet.wait(3.0)
    assert messages == [gateway.messages for gateway in fleet.gateways]


def test_who_runs_many_asks_seldom_and_what_others_run_is_known() -> None:
    fleet = world(2)
    first, second = fleet.gateways
    assert all(fleet.begin(first) for _ in range(8))
    assert first.messages <= 5
    fleet.begin(second)
    assert second.lease.used == fleet.kept(first) + 1
    assert second.lease.reset_s(fleet.now) == second.lease.wait_s(1, fleet.now) == 0.0
    before = first.messages
    fleet.wait(10.0)
    assert 5 <= first.messages - before <= 15
    before = first.messages
    fleet.begin(first)
    assert first.messages == before


def test_who_comes_soon_after_another_need_not_ask() -> None:
    fleet = world(1)
    (one,) = fleet.gateways
    fleet.begin(one)
    for _ in range(3):
        fleet.end(one)
        fleet.wait(1.1)
        before = one.messages
        fleet.begin(one)
        assert one.messages == before


def test_an_authority_that_is_silent_keeps_nothing_for_ever() -> None:
    fleet = world(1)
    (one,) = fleet.gateways
    fleet.begin(one)
    assert one.lease.room(fleet.now + ALIVE_S - 0.1) > 0
    assert one.lease.room(fleet.now + ALIVE_S) == 0
    assert one.lease.ask(fleet.now + ALIVE_S).kept == 1


def test_what_is_lent_is_one_at_that_moment_and_counts() -> None:
    lease = SlotLease("places", Concurrency(7), ALIVE_S)
    assert lease.idle
    assert [lease.affords(units, 3, 10.0) for units in (3, 4)] == [True, False]
    lease.lend(1, 10.0)
    assert [lease.room(now) for now in (10.0, 10.1)] == [1, 0]
    lease.lend(1, 11.0)
    lease.add(1, 11.0)
    assert lease.room(11.0) == 0
    assert lease.used == 1
    assert lease.due(11.0)
    assert [lease.affords(units, 3, 12.0) for units in (2, 3)] == [True, False]
    assert lease.ask(12.0).kept == 1


def test_where_there_was_too_little_more_is_not_worth_asking_for_a_moment_later() -> None:
    lease = SlotLease("places", Concurrency(9), ALIVE_S)
    lease.want(5)
    assert not lease.dry(5, 10.0)
    ask = lease.ask(10.0)
    assert (ask.need, ask.kept) == (5, 0)
    lease.answer(ask, told(2), 10.0, 10.0)
    assert [lease.lends(units, 10.01) for units in (2, 3)] == [True, False]
    assert lease.lends(3, 10.06)
    lease.want(1)
    lease.answer(lease.ask(11.0), told(1), 11.0, 11.0)
    assert lease.lends(9, 11.0)


def told(granted: int) -> Grant:
    return Grant(granted, 0, granted, 0.0, 0.0, known=True)


def test_of_what_all_have_beyond_a_lowered_limit_each_gives_back_what_it_can() -> None:
    lease = SlotLease("places", Concurrency(4), ALIVE_S)
    lease.add(2, 10.0)
    ask = Ask(kind="slots", limit=4, keep_s=10.0, need=0, ahead=0, kept=5)
    for all_have, room in ((6, 1), (60, -2)):
        lease.answer(ask, Grant(0, 0, all_have, 0.0, 0.0, known=True), 10.0, 10.0)
        assert lease.room(10.0) == room
    lease.answer(lease.ask(11.0), Grant(0, 0, 60, 0.0, 0.0, known=True), 11.0, 11.0)
    assert not lease.idle
