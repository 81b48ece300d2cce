"""Limits over gateways that speak when they have to: more is there before it is needed, what is left comes back."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.virtual_fleet import TICK_S, Gateway, World, world

from argosy.policy import CalendarPeriod, LeaseGrant, SlidingWindow, WindowLease

MIDNIGHT = 12 * 86400.0
OWN: list[Callable[[int], SlidingWindow | CalendarPeriod]] = [
    lambda limit: SlidingWindow(limit, 60.0),
    lambda limit: CalendarPeriod(limit, "day"),
]
BOTH = pytest.mark.parametrize("own", OWN, ids=["window", "period"])


def leases(
    count: int, own: Callable[[int], SlidingWindow | CalendarPeriod], limit: int = 50
) -> World:
    return world(count, lambda: WindowLease("limit", own(limit)))


def lend(fleet: World, gateway: Gateway, units: int) -> bool:
    """Whether something that runs may have so much before anybody has been asked; then it does."""
    lends = gateway.lease.can_overdraw(units, fleet.now)
    if lends:
        gateway.lease.overdraw(units, fleet.now)
        assert fleet.use(gateway, units)
    return lends


@BOTH
@pytest.mark.parametrize("count", [1, 2])
def test_who_uses_some_all_the_time_hardly_asks_and_has_little_more_than_that(
    own: Callable[[int], SlidingWindow | CalendarPeriod], count: int
) -> None:
    fleet = leases(count, own, 10_000)
    for second in range(10):
        before = [gateway.messages for gateway in fleet.gateways]
        for _ in range(20):
            for gateway in fleet.gateways:
                asked = gateway.messages
                assert fleet.use(gateway, 7)
                assert second < 2 or gateway.messages == asked  # it was there
            fleet.wait(TICK_S)
            assert fleet.counted() - fleet.used(0.0) <= 160 * count
        for gateway, messages in zip(fleet.gateways, before, strict=True):
            assert gateway.messages - messages <= (5 if second < 2 else 1)
    fleet.wait(2.0)
    assert fleet.counted() == fleet.used(0.0)
    assert not any(gateway.active for gateway in fleet.gateways)


@settings(max_examples=60)
@given(
    st.sampled_from(OWN),
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["use", "use", "lend", "give back"]),
            st.integers(1, 20),
            st.sampled_from([0.0, TICK_S, 0.5]),
        ),
        max_size=30,
    ),
)
def test_nobody_waits_for_what_is_free_and_in_the_end_what_counts_is_what_was_used(
    own: Callable[[int], SlidingWindow | CalendarPeriod], steps: list[tuple[int, str, int, float]]
) -> None:
    fleet, slots = leases(3, own), dict[int, tuple[int, int]]()
    for who, what, units, pause in steps:
        gateway = fleet.gateways[who]
        fleet.wait(pause)
        if what == "give back" and who in slots:
            slot, had = slots.pop(who)
            gateway.lease.adjust(slot, -had, fleet.now)
            fleet.uses.append((fleet.now, -had))
        elif what == "lend":
            lend(fleet, gateway, units)
        elif what == "use" and not fleet.use(gateway, units):
            assert fleet.counted() + units > 50
        elif what == "use" and gateway.lease.remaining(fleet.now) >= 3:
            slots[who] = gateway.lease.add(3, fleet.now), 3
            fleet.uses.append((fleet.now, 3))
    fleet.wait(5.0)
    used = fleet.used(0.0)
    assert fleet.counted() == used
    assert not any(gateway.active for gateway in fleet.gateways)
    for gateway in fleet.gateways:
        assert not fleet.use(gateway, max(1, 51 - used))
        fleet.wait(TICK_S)
    if used < 50:
        assert fleet.use(fleet.gateways[0], 50 - used)


@BOTH
def test_what_one_gives_back_is_there_for_all_in_a_moment(
    own: Callable[[int], SlidingWindow | CalendarPeriod],
) -> None:
    fleet = leases(2, own)
    first, second = fleet.gateways
    assert fleet.use(first, 50)
    slot = first.lease.add(0, fleet.now)
    assert not fleet.use(second, 1)
    assert not fleet.use(first, 1)
    assert first.lease.adjust(slot, -20, fleet.now)
    assert fleet.use(first, 8)
    assert first.lease.adjust(slot, -8, fleet.now)
    fleet.wait(2 * TICK_S)
    assert fleet.use(second, 10)


def test_what_is_lent_is_there_at_that_moment_as_far_as_there_was_room_lately() -> None:
    lease, now = WindowLease("limit", SlidingWindow(50, 60.0)), 1000.0

    def lends(*units: int) -> list[bool]:
        return [lease.can_overdraw(one, now) for one in units]

    assert lends(10**9) == [True]  # nobody knows
    lease.request_units(5)
    lease.apply_grant(
        lease.build_request(now), LeaseGrant(5, 0, 45, 0.0, 0.0, known=True), now, now
    )
    assert lends(10, 11) == [True, False]
    lease.add(5, now)
    assert lends(5, 6) == [True, False]
    lease.overdraw(4, now)
    assert [lease.remaining(at) for at in (now, now + 0.1)] == [4, 0]
    slot = lease.add(3, now)
    assert lease.remaining(now) == 1
    assert lease.is_due(now)
    assert lends(2, 3) == [True, False]  # though nobody has been told,
    ask = lease.build_request(now)
    assert [units for _, units in ask.owed] == [3]
    assert lends(2, 3) == [True, False]  # or is being told,
    lease.apply_grant(ask, LeaseGrant(0, 0, 48, 0.0, 0.0, known=True), now, now)
    assert lends(2, 3) == [True, False]  # or was
    lease.adjust(slot, -1, now)
    assert lends(3, 4) == [True, False]
    assert lease.can_overdraw(10**9, now + 2.0)


def test_while_nobody_answers_what_is_lent_is_remembered_by_when_it_was() -> None:
    fleet = leases(1, OWN[0])
    (one,) = fleet.gateways
    fleet.up = False
    for _ in range(150):
        assert lend(fleet, one, 2)
        fleet.wait(1.0)
    slot = one.lease.add(5, fleet.now)
    one.lease.adjust(slot, -3, fleet.now)
    ask = one.lease.build_request(fleet.now)
    assert len(ask.owed) <= 121
    assert ask.back == ()
    assert (ask.owed[-1][1], ask.need) == (2, 0)
    for number, (age, units) in enumerate(reversed(ask.owed[:-1]), 1):
        assert units == 2
        assert number - 1.01 <= age <= number + 0.01
    one.lease.apply_grant(ask, LeaseGrant(0, 0, 122, 0.0, 0.0, known=True), fleet.now, fleet.now)
    assert one.lease.build_request(fleet.now).owed == ()


def test_what_was_lent_counts_for_a_window_from_when_it_was() -> None:
    fleet = leases(1, OWN[0])
    (one,) = fleet.gateways
    fleet.up = False
    assert lend(fleet, one, 3)
    fleet.wait(30.0)
    fleet.up = True
    fleet.wait(29.5)
    assert fleet.counted() == 3
    fleet.wait(5.0)
    assert fleet.use(one, 50)


def test_what_is_told_of_waits_grows_old_and_what_is_used_is_known() -> None:
    lease = WindowLease("limit", SlidingWindow(50, 60.0))
    lease.request_units(30)
    lease.apply_grant(
        lease.build_request(10.0), LeaseGrant(5, 0, 45, 7.0, 20.0, known=True), 10.0, 10.0
    )
    assert (lease.remaining(10.0), lease.used) == (5, 40)
    lease.add(3, 10.0)
    assert (lease.remaining(10.0), lease.used) == (2, 43)
    waits = [(2, 11.0), (3, 11.0), (50, 11.0), (51, 11.0), (3, 30.0)]
    assert [lease.wait_s(units, now) for units, now in waits] == [0.0, 6.0, 6.0, math.inf, 0.0]
    assert lease.reset_s(11.0) == pytest.approx(60.0)
    lease.adjust(10, -3, 11.0)
    assert [lease.reset_s(now) for now in (11.0, 40.0)] == [19.0, 0.0]
    lease.add(49, 11.0)
    assert lease.used == 49
    lease.apply_grant(
        lease.build_request(500.0), LeaseGrant(0, 0, 4, 0.0, 0.0, known=True), 500.0, 500.0
    )
    assert (lease.remaining(500.0), lease.used) == (0, 4)


def test_a_days_budget_ends_at_midnight_and_so_does_what_was_granted_of_it() -> None:
    fleet = leases(2, OWN[1])
    one, late = fleet.gateways
    fleet.now = MIDNIGHT - 1.0
    assert fleet.use(one, 10)
    assert fleet.use(late, 1)
    assert (late.lease.wait_s(50, fleet.now), late.lease.wait_s(51, fleet.now)) == (1.0, math.inf)
    assert late.lease.reset_s(fleet.now) == 1.0
    one.lease.request_units(5)
    ask = one.lease.build_request(fleet.now)
    assert ask.keep_s >= 3.0
    names = [one.lease.name]
    for now in (MIDNIGHT, MIDNIGHT + 1.0):
        assert one.lease.remaining(now) == one.lease.reset_s(now) == one.lease.used == 0
    one.lease.apply_grant(
        ask, LeaseGrant(5, 0, 16, 0.0, 0.0, known=True), fleet.now, MIDNIGHT + 1.0
    )
    assert one.lease.remaining(MIDNIGHT + 1.0) == 0
    assert one.lease.is_idle
    names.append(one.lease.name)
    assert len(set(names)) == 2
    # Who saw it begin knows that nothing was used before; who did not has to be told.
    assert not one.lease.needs_seed
    assert late.lease.remaining(MIDNIGHT + 2.0) == 0
    assert late.lease.needs_seed
    assert [gateway.lease.build_request(MIDNIGHT + 2.0).seeds for gateway in (one, late)] == [
        (),
        None,
    ]


@BOTH
def test_of_an_authority_that_knows_nothing_the_ledger_is_asked_and_it_is_told_in_time(
    own: Callable[[int], SlidingWindow | CalendarPeriod],
) -> None:
    """It takes what it is told first: it is told again as long as it asks, but not what is old by then."""
    lease, news = WindowLease("limit", own(50)), list[int]()
    lease.on_report_due = lambda: news.append(1)
    lease.remaining(MIDNIGHT + 3600.0)
    assert lease.needs_seed
    now = MIDNIGHT + 3610.0
    lease.seed([(now - 10.0, 5), (now, 7)], now)
    assert not lease.needs_seed
    assert not news  # until somebody needs it
    assert not lease.is_due(now)
    assert lease.is_idle
    assert lease.build_request(now + 9.0).seeds == ((19.0, 5), (9.0, 7))
    nothing = LeaseGrant(0, 0, 0, 0.0, 0.0, known=False)
    lease.apply_grant(lease.build_request(now + 9.0), nothing, now + 9.0, now + 9.0)
    assert lease.needs_seed
    lease.seed([(now + 9.5, 8)], now + 9.5)
    assert news
    assert lease.is_due(now + 9.5)
    assert not lease.is_idle
    assert lease.build_request(now + 20.0).seeds is None  # others have used more since
    assert not WindowLease("limit", SlidingWindow(50, 1.0)).needs_seed
