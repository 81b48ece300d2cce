"""Window leases of gateways in virtual time: prefetching, returned units, overdraft, calendar periods and seeding."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.virtual_fleet import TICK_S, VirtualFleet, VirtualGateway, make_fleet

from argosy.policy import CalendarPeriod, LeaseGrant, SlidingWindow, WindowLease

MIDNIGHT = 12 * 86400.0
MeterFactory = Callable[[int], SlidingWindow | CalendarPeriod]
METERS: list[MeterFactory] = [
    lambda limit: SlidingWindow(limit, 60.0),
    lambda limit: CalendarPeriod(limit, "day"),
]
BOTH_METERS = pytest.mark.parametrize("make_meter", METERS, ids=["window", "period"])


def make_window_fleet(num_gateways: int, make_meter: MeterFactory, limit: int = 50) -> VirtualFleet:
    return make_fleet(num_gateways, lambda: WindowLease("limit", make_meter(limit)))


def grant(granted: int, used: int, *, slot: int = 0, known: bool = True) -> LeaseGrant:
    return LeaseGrant(granted, slot, used, 0.0, 0.0, known=known)


def overdraw(fleet: VirtualFleet, gateway: VirtualGateway, units: int) -> bool:
    """Use units before they are granted, if the lease allows an overdraft. Returns whether it does."""
    allowed = gateway.lease.can_overdraw(units, fleet.now)
    if allowed:
        gateway.lease.overdraw(units, fleet.now)
        assert fleet.use(gateway, units)
    return allowed


@BOTH_METERS
@pytest.mark.parametrize("num_gateways", [1, 2])
def test_steady_use_needs_few_messages_and_prefetches_little(
    make_meter: MeterFactory, num_gateways: int
) -> None:
    fleet = make_window_fleet(num_gateways, make_meter, 10_000)
    for second in range(10):
        before = [gateway.num_messages for gateway in fleet.gateways]
        for _ in range(20):
            for gateway in fleet.gateways:
                num_messages = gateway.num_messages
                assert fleet.use(gateway, 7)
                assert second < 2 or gateway.num_messages == num_messages, "not prefetched"
            fleet.wait(TICK_S)
            assert fleet.counted_units() - fleet.used_units() <= 160 * num_gateways
        for gateway, num_messages in zip(fleet.gateways, before, strict=True):
            assert gateway.num_messages - num_messages <= (5 if second < 2 else 1)
    fleet.wait(2.0)
    assert fleet.counted_units() == fleet.used_units()
    assert not any(gateway.active for gateway in fleet.gateways)


@settings(max_examples=60)
@given(
    st.sampled_from(METERS),
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["use", "use", "overdraw", "return"]),
            st.integers(1, 20),
            st.sampled_from([0.0, TICK_S, 0.5]),
        ),
        max_size=30,
    ),
)
def test_free_units_are_granted_and_counted_units_converge_to_used_units(
    make_meter: MeterFactory, steps: list[tuple[int, str, int, float]]
) -> None:
    fleet, returnable = make_window_fleet(3, make_meter), dict[int, tuple[int, int]]()
    for number, action, units, pause_s in steps:
        gateway = fleet.gateways[number]
        fleet.wait(pause_s)
        if action == "return" and number in returnable:
            slot, used = returnable.pop(number)
            gateway.lease.adjust(slot, -used, fleet.now)
            fleet.uses.append((fleet.now, -used))
        elif action == "overdraw":
            overdraw(fleet, gateway, units)
        elif action == "use" and not fleet.use(gateway, units):
            assert fleet.counted_units() + units > 50
        elif action == "use" and gateway.lease.remaining(fleet.now) >= 3:
            returnable[number] = gateway.lease.add(3, fleet.now), 3
            fleet.uses.append((fleet.now, 3))
    fleet.wait(5.0)
    used = fleet.used_units()
    assert fleet.counted_units() == used
    assert not any(gateway.active for gateway in fleet.gateways)
    for gateway in fleet.gateways:
        assert not fleet.use(gateway, max(1, 51 - used))
        fleet.wait(TICK_S)
    if used < 50:
        assert fleet.use(fleet.gateways[0], 50 - used)


def test_overdraft_is_bounded_by_last_known_free_units() -> None:
    lease, now = WindowLease("limit", SlidingWindow(50, 60.0)), 1000.0

    def can_overdraw(*units: int) -> list[bool]:
        return [lease.can_overdraw(each, now) for each in units]

    assert can_overdraw(10**9) == [True]  # the usage is unknown
    lease.request_units(5)
    lease.apply_grant(lease.build_request(now), grant(5, 45), now, now)
    assert can_overdraw(10, 11) == [True, False]
    lease.add(5, now)
    assert can_overdraw(5, 6) == [True, False]
    lease.overdraw(4, now)
    assert [lease.remaining(at) for at in (now, now + 0.1)] == [4, 0]
    slot = lease.add(3, now)
    assert lease.remaining(now) == 1
    assert lease.is_due(now)
    assert can_overdraw(2, 3) == [True, False], "not reported yet"
    request = lease.build_request(now)
    assert [units for _, units in request.owed] == [3]
    assert can_overdraw(2, 3) == [True, False], "being reported"
    lease.apply_grant(request, grant(0, 48), now, now)
    assert can_overdraw(2, 3) == [True, False], "reported"
    lease.adjust(slot, -1, now)
    assert can_overdraw(3, 4) == [True, False]
    assert lease.can_overdraw(10**9, now + 2.0)


def test_overdraft_during_outage_is_reported_with_its_age() -> None:
    fleet = make_window_fleet(1, METERS[0])
    (gateway,) = fleet.gateways
    fleet.is_authority_up = False
    for _ in range(150):
        assert overdraw(fleet, gateway, 2)
        fleet.wait(1.0)
    slot = gateway.lease.add(5, fleet.now)
    gateway.lease.adjust(slot, -3, fleet.now)
    request = gateway.lease.build_request(fleet.now)
    assert len(request.owed) <= 121
    assert request.back == ()
    assert (request.owed[-1][1], request.need) == (2, 0)
    for number, (age, units) in enumerate(reversed(request.owed[:-1]), 1):
        assert units == 2
        assert number - 1.01 <= age <= number + 0.01
    gateway.lease.apply_grant(request, grant(0, 122), fleet.now, fleet.now)
    assert gateway.lease.build_request(fleet.now).owed == ()


def test_wait_and_reset_times_decrease_with_age_of_grant() -> None:
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
    lease.apply_grant(lease.build_request(500.0), grant(0, 4), 500.0, 500.0)
    assert (lease.remaining(500.0), lease.used) == (0, 4)


def test_day_budget_and_its_grants_end_at_midnight() -> None:
    fleet = make_window_fleet(2, METERS[1])
    active, idle = fleet.gateways
    fleet.now = MIDNIGHT - 1.0
    assert fleet.use(active, 10)
    assert fleet.use(idle, 1)
    assert (idle.lease.wait_s(50, fleet.now), idle.lease.wait_s(51, fleet.now)) == (1.0, math.inf)
    assert idle.lease.reset_s(fleet.now) == 1.0
    active.lease.request_units(5)
    request = active.lease.build_request(fleet.now)
    assert request.keep_s >= 3.0
    first_name = active.lease.name
    for now in (MIDNIGHT, MIDNIGHT + 1.0):
        assert active.lease.remaining(now) == active.lease.reset_s(now) == active.lease.used == 0
    active.lease.apply_grant(request, grant(5, 16), fleet.now, MIDNIGHT + 1.0)
    assert active.lease.remaining(MIDNIGHT + 1.0) == 0
    assert active.lease.is_idle
    assert active.lease.name != first_name
    # A gateway that was active at midnight knows that the new day has no usage. Another one needs a seed.
    assert not active.lease.needs_seed
    assert idle.lease.remaining(MIDNIGHT + 2.0) == 0
    assert idle.lease.needs_seed
    seeds = [gateway.lease.build_request(MIDNIGHT + 2.0).seeds for gateway in (active, idle)]
    assert seeds == [(), None]


@BOTH_METERS
def test_seed_is_sent_until_authority_knows_usage_or_seed_is_stale(
    make_meter: MeterFactory,
) -> None:
    lease, reports = WindowLease("limit", make_meter(50)), list[int]()
    lease.on_report_due = lambda: reports.append(1)
    lease.remaining(MIDNIGHT + 3600.0)
    assert lease.needs_seed
    now = MIDNIGHT + 3610.0
    lease.seed([(now - 10.0, 5), (now, 7)], now)
    assert not lease.needs_seed
    assert not reports, "a seed alone needs no message"
    assert not lease.is_due(now)
    assert lease.is_idle
    assert lease.build_request(now + 9.0).seeds == ((19.0, 5), (9.0, 7))
    unknown = grant(0, 0, known=False)
    lease.apply_grant(lease.build_request(now + 9.0), unknown, now + 9.0, now + 9.0)
    assert lease.needs_seed
    lease.seed([(now + 9.5, 8)], now + 9.5)
    assert reports
    assert lease.is_due(now + 9.5)
    assert not lease.is_idle
    assert lease.build_request(now + 20.0).seeds is None, "other gateways have used more since"
    assert not WindowLease("limit", SlidingWindow(50, 1.0)).needs_seed
