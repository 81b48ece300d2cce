"""Leases of gateways that share a limit: messages, overdraft, calendar periods, and limits that hold whatever fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.support.quota_authority import FakeQuotaAuthority

from argosy.policy import (
    CalendarPeriod,
    ConcurrencyLease,
    ConcurrencyMeter,
    LeasedQuota,
    LeaseGrant,
    LeaseRequest,
    SlidingWindow,
    WindowLease,
)

GATEWAY_TTL_S = 5.0
TICK_S = 0.05


@dataclass
class VirtualGateway:
    """Sends a request when units are missing or the lease is due, and drops an idle lease."""

    name: str
    lease: LeasedQuota
    active: bool = False
    """Whether the lease is renewed when it is due."""
    num_messages: int = 0
    num_running: int = 0
    """Running requests, for a concurrency limit."""


@dataclass
class VirtualFleet:
    """Gateways and an authority that drops a limit after a time without messages."""

    gateways: list[VirtualGateway]
    authority: FakeQuotaAuthority = field(default_factory=FakeQuotaAuthority)
    now: float = 1_000_000.0
    is_authority_up: bool = True
    kept_until: dict[str, float] = field(default_factory=dict)
    """Time at which the authority drops each limit."""
    uses: list[tuple[float, int]] = field(default_factory=list)
    """Time and units of each use."""
    check: Callable[[], None] = lambda: None
    """Called at each tick."""

    def exchange(self, gateway: VirtualGateway) -> None:
        """Send a gateway's lease request and apply the grant."""
        lease, name = gateway.lease, gateway.lease.name
        request = lease.build_request(self.now)
        if request.kind == "slots":
            assert lease.remaining(self.now) <= max(0, request.kept - gateway.num_running)
        if self.now >= self.kept_until.get(name, 0.0):
            self.authority.limits.pop(name, None)
        self.kept_until[name] = self.now + request.keep_s
        gateway.num_messages += 1
        [grant] = self.authority.exchange(
            gateway.name, gateway.num_messages, GATEWAY_TTL_S, [(name, request)], self.now
        )
        lease.apply_grant(request, grant, self.now, self.now)
        gateway.active = not lease.is_idle

    def use(self, gateway: VirtualGateway, units: int) -> bool:
        """Use units, requesting more if necessary. Returns whether there were enough."""
        lease = gateway.lease
        if lease.remaining(self.now) < units and not lease.is_exhausted(units, self.now):
            lease.request_units(units)
            self.exchange(gateway)
        if lease.remaining(self.now) < units:
            return False
        gateway.active = True
        lease.add(units, self.now)
        self.uses.append((self.now, units))
        return True

    def wait(self, seconds: float) -> None:
        """Advance the time tick by tick. Gateways send the messages that become due."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for gateway in self.gateways:
                if self.is_authority_up and gateway.active and gateway.lease.is_due(self.now):
                    self.exchange(gateway)
            self.check()

    def counted_units(self) -> int:
        """Return the units that the authority counts, including unused grants."""
        lease = self.gateways[0].lease
        lease.remaining(self.now)  # a calendar period that is over changes the lease's name
        return self.authority.counted_units(lease.name)

    def used_units(self) -> int:
        """Return the units that all gateways have used."""
        return sum(units for _, units in self.uses)


def make_fleet(num_gateways: int, make_lease: Callable[[], LeasedQuota]) -> VirtualFleet:
    """Return gateways with new leases of the same limit."""
    gateways = [VirtualGateway(f"g{number}", make_lease()) for number in range(num_gateways)]
    for gateway in gateways:
        if isinstance(gateway.lease, WindowLease):
            gateway.lease.on_report_due = partial(setattr, gateway, "active", True)
    return VirtualFleet(gateways)


# --- windows and calendar periods -----------------------------------------------------------------


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


# --- concurrency ----------------------------------------------------------------------------------


LIMIT = 12


def make_lease(limit: int = LIMIT) -> ConcurrencyLease:
    return ConcurrencyLease("concurrency", ConcurrencyMeter(limit), GATEWAY_TTL_S)


def make_concurrency_fleet(num_gateways: int) -> VirtualFleet:
    """Return a fleet that checks at each tick that running requests have slots within the limit."""
    fleet = make_fleet(num_gateways, make_lease)

    def check() -> None:
        for gateway in fleet.gateways:
            assert leased_slots(fleet, gateway) >= gateway.num_running
            assert gateway.lease.used >= gateway.num_running
        assert leased_slots(fleet, *fleet.gateways) <= LIMIT

    fleet.check = check
    return fleet


def leased_slots(fleet: VirtualFleet, *gateways: VirtualGateway) -> int:
    """Return the slots that the authority has leased to these gateways."""
    limit = fleet.authority.limits.get("concurrency")
    return 0 if limit is None else sum(limit.concurrency.get(each.name, 0) for each in gateways)


def begin(fleet: VirtualFleet, gateway: VirtualGateway) -> bool:
    admitted = fleet.use(gateway, 1)
    gateway.num_running += admitted
    return admitted


def end(fleet: VirtualFleet, gateway: VirtualGateway) -> None:
    if gateway.num_running:
        gateway.lease.adjust(0, -1, fleet.now)
        gateway.num_running -= 1


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["begin", "begin", "end", "wait"])),
        max_size=40,
    ),
)
def test_free_slots_are_granted_and_unused_slots_are_returned(
    num_gateways: int, steps: list[tuple[int, str]]
) -> None:
    fleet = make_concurrency_fleet(num_gateways)
    for number, action in steps:
        gateway = fleet.gateways[number % num_gateways]
        if action == "wait":
            fleet.wait(3.0)
        elif action == "end":
            end(fleet, gateway)
        elif not begin(fleet, gateway):
            assert leased_slots(fleet, *fleet.gateways) == LIMIT
        fleet.check()
    fleet.wait(3.0)
    for gateway in fleet.gateways:  # a few slots are kept for the next requests
        spare = gateway.num_running // 4 + 1
        assert leased_slots(fleet, gateway) <= gateway.num_running + spare
    for gateway in fleet.gateways:
        while gateway.num_running:
            end(fleet, gateway)
    fleet.wait(3.0)
    assert not any(gateway.active for gateway in fleet.gateways)
    assert leased_slots(fleet, *fleet.gateways) == 0
    messages = [gateway.num_messages for gateway in fleet.gateways]
    fleet.wait(3.0)
    assert messages == [gateway.num_messages for gateway in fleet.gateways]


def test_busy_gateway_sends_few_messages_and_knows_usage_of_others() -> None:
    fleet = make_concurrency_fleet(2)
    first, second = fleet.gateways
    assert all(begin(fleet, first) for _ in range(8))
    assert first.num_messages <= 5
    begin(fleet, second)
    assert second.lease.used == leased_slots(fleet, first) + 1
    assert second.lease.reset_s(fleet.now) == second.lease.wait_s(1, fleet.now) == 0.0
    before = first.num_messages
    fleet.wait(10.0)
    assert 5 <= first.num_messages - before <= 15
    before = first.num_messages
    begin(fleet, first)
    assert first.num_messages == before


def test_spare_slots_expire_while_authority_is_silent() -> None:
    fleet = make_concurrency_fleet(1)
    (gateway,) = fleet.gateways
    begin(fleet, gateway)
    assert gateway.lease.remaining(fleet.now + GATEWAY_TTL_S - 0.1) > 0
    assert gateway.lease.remaining(fleet.now + GATEWAY_TTL_S) == 0
    assert gateway.lease.build_request(fleet.now + GATEWAY_TTL_S).kept == 1


def test_overdrawn_slot_counts_and_is_usable_only_at_that_moment() -> None:
    lease = make_lease(7)
    assert lease.is_idle
    assert [lease.is_within_even_share(units, 3, 10.0) for units in (3, 4)] == [True, False]
    lease.overdraw(1, 10.0)
    assert [lease.remaining(now) for now in (10.0, 10.1)] == [1, 0]
    lease.overdraw(1, 11.0)
    lease.add(1, 11.0)
    assert lease.remaining(11.0) == 0
    assert lease.used == 1
    assert lease.is_due(11.0)
    assert [lease.is_within_even_share(units, 3, 12.0) for units in (2, 3)] == [True, False]
    assert lease.build_request(12.0).kept == 1


def test_overdraft_is_refused_for_a_moment_after_short_grant() -> None:
    lease = make_lease(9)
    lease.request_units(5)
    assert not lease.is_exhausted(5, 10.0)
    request = lease.build_request(10.0)
    assert (request.need, request.kept) == (5, 0)
    lease.apply_grant(request, grant(2, 2), 10.0, 10.0)
    assert [lease.can_overdraw(units, 10.01) for units in (2, 3)] == [True, False]
    assert lease.can_overdraw(3, 10.06)
    lease.request_units(1)
    lease.apply_grant(lease.build_request(11.0), grant(1, 1), 11.0, 11.0)
    assert lease.can_overdraw(9, 11.0)


# --- messages are lost, gateways die and the authority is down ------------------------------------


WINDOW_S = 60.0
GATEWAY_TTL_S = 5.0
GATEWAYS = 3
GATEWAY = st.integers(0, GATEWAYS - 1)
PAUSE_S = st.sampled_from([0.2, 1.0, 1.9, 56.0, 58.0, 59.0, 59.5, 60.0, 61.0]) | st.floats(
    0.01, 40.0
)
DELIVERY = st.sampled_from(["delivered", "delivered", "delivered", "lost", "reply lost"])


@dataclass
class GatewayState:
    """Lease of one gateway, and its message that has no reply yet."""

    name: str
    lease: LeasedQuota
    message_number: int = 0
    pending: tuple[str, LeaseRequest, float] | None = None
    """Lease name, request and time of the message without a reply."""
    returnable: list[tuple[int, int, int]] = field(default_factory=list)
    """Slot, units and index in `uses` of each use whose units can be returned."""


class LeasedWindows(RuleBasedStateMachine):
    """Gateways that share a window limit, with all events that can affect them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0
        self.limit = 50
        self.authority = FakeQuotaAuthority()
        self.num_started = 0
        self.gateways = [self._start_gateway() for _ in range(GATEWAYS)]
        self.uses: list[list[Any]] = []
        """Time and units of each use."""

    def make_lease(self) -> LeasedQuota:
        raise NotImplementedError

    def _start_gateway(self) -> GatewayState:
        self.num_started += 1
        return GatewayState(f"g{self.num_started}", self.make_lease())

    def _use(self, gateway: GatewayState, units: int) -> None:
        slot = gateway.lease.add(units, self.now)
        gateway.returnable.append((slot, units, len(self.uses)))
        self.uses.append([self.now, units])

    @rule(number=GATEWAY, units=st.integers(1, 30))
    def use(self, number: int, units: int) -> None:
        gateway = self.gateways[number]
        if units <= gateway.lease.remaining(self.now):
            self._use(gateway, units)
        else:
            gateway.lease.request_units(units)

    @rule(number=GATEWAY, units=st.integers(1, 60))
    def use_available(self, number: int, units: int) -> None:
        """Request units and use as many of them as are available."""
        gateway = self.gateways[number]
        for _ in range(2):
            if gateway.lease.remaining(self.now) < units:
                gateway.lease.request_units(units)
                self.exchange(number, "delivered")
        available = min(units, gateway.lease.remaining(self.now))
        if available > 0:
            self._use(gateway, available)

    @rule(number=GATEWAY, part=st.floats(0, 1))
    def return_units(self, number: int, part: float) -> None:
        gateway = self.gateways[number]
        if gateway.returnable:
            slot, units, use = gateway.returnable.pop()
            returned = int(units * part)
            gateway.lease.adjust(slot, -returned, self.now)
            self.uses[use][1] -= returned

    @rule(number=GATEWAY, delivery=DELIVERY)
    def exchange(self, number: int, delivery: str) -> None:
        gateway = self.gateways[number]
        if gateway.pending is None:
            request = gateway.lease.build_request(self.now)
            gateway.pending = gateway.lease.name, request, self.now
            gateway.message_number += 1
        name, request, sent_at = gateway.pending
        if delivery == "lost":
            return
        [grant] = self.authority.exchange(
            gateway.name, gateway.message_number, GATEWAY_TTL_S, [(name, request)], self.now
        )
        if delivery == "delivered":
            gateway.lease.apply_grant(request, grant, sent_at, self.now)
            gateway.pending = None

    @rule(seconds=PAUSE_S)
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=GATEWAY)
    def die(self, number: int) -> None:
        self.gateways[number] = self._start_gateway()

    def used_within(self, seconds: float) -> int:
        return sum(units for at, units in self.uses if at > self.now - seconds)


class SlidingWindows(LeasedWindows):
    """Sliding window with the authority always up. The limit is exact whatever is lost."""

    def make_lease(self) -> LeasedQuota:
        return WindowLease("limit", SlidingWindow(self.limit, WINDOW_S))

    @invariant()
    def limit_is_kept(self) -> None:
        assert self.used_within(WINDOW_S) <= self.limit


def test_late_use_of_a_grant_frees_no_units_early() -> None:
    fleet = SlidingWindows()
    fleet.gateways[0].lease.request_units(30)
    fleet.exchange(0, "delivered")
    fleet.wait(1.9)
    fleet.use(0, 40)
    fleet.wait(59.3)
    fleet.use_available(1, 60)
    fleet.limit_is_kept()


class DegradedWindows(LeasedWindows):
    """Gateways that admit requests within an even share while the authority is down."""

    @rule(number=GATEWAY, units=st.integers(1, 30))
    def use_even_share(self, number: int, units: int) -> None:
        gateway = self.gateways[number]
        if units > gateway.lease.remaining(self.now) and gateway.lease.is_within_even_share(
            units, GATEWAYS, self.now
        ):
            gateway.lease.overdraw(units, self.now)
            assert gateway.lease.remaining(self.now) >= units
            self._use(gateway, units)


class DegradedSlidingWindows(DegradedWindows, SlidingWindows):
    """Sliding window without the authority. The gateways use at most twice the limit."""

    def die(self, number: int) -> None:
        """Do nothing, because a restarted gateway does not know what it used."""

    @invariant()
    def limit_is_kept(self) -> None:
        share = -(-self.limit // GATEWAYS)
        assert self.used_within(WINDOW_S) <= self.limit + GATEWAYS * share


class DayBudgets(LeasedWindows):
    """Budget of two days. Budgets are never exceeded, and no units leak unless a gateway dies."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 12 * 86400 - 100.0  # a little before midnight
        self.died = False

    def make_lease(self) -> WindowLease:
        return WindowLease("budget", CalendarPeriod(self.limit, "day"))

    @rule(number=GATEWAY)
    def die(self, number: int) -> None:
        super().die(number)
        self.died = True

    @invariant()
    def budget_is_kept(self) -> None:
        assert self.used_today() <= self.limit

    def used_today(self) -> int:
        midnight = self.now // 86400 * 86400
        return sum(units for at, units in self.uses if at >= midnight)

    def teardown(self) -> None:
        if self.died:
            return
        for number in (*range(GATEWAYS),) * 3:  # report overdraft, return units, and settle
            self.exchange(number, "delivered")
        counted = self.authority.counted_units(self.gateways[0].lease.name)
        assert counted == self.used_today()


class DegradedDayBudgets(DegradedWindows, DayBudgets):
    """Budget of two days without the authority. No units leak once the authority is up again."""

    def die(self, number: int) -> None:
        """Do nothing, because a restarted gateway does not know what it used."""

    @invariant()
    def budget_is_kept(self) -> None:
        share = -(-self.limit // GATEWAYS)
        assert self.used_today() <= self.limit + GATEWAYS * share


@given(idle_s=st.floats(60.0, 50_000.0))
def test_restarted_authority_gets_usage_since_old_seed_of_idle_gateway(
    idle_s: float,
) -> None:
    """The idle gateway read the usage before another gateway used up the budget."""
    fleet = DayBudgets()
    fleet.now = 12 * 86400 + 10.0
    busy, idle = fleet.gateways[:2]
    for gateway in (busy, idle):
        gateway.lease.seed_points(fleet.now)
        gateway.lease.seed([(fleet.now, 0)], fleet.now)
    fleet.use_available(0, fleet.limit)
    assert fleet.used_within(86400) == fleet.limit
    fleet.wait(idle_s)
    fleet.authority = FakeQuotaAuthority()
    reports: list[int] = []
    assert isinstance(idle.lease, WindowLease)
    idle.lease.on_report_due = lambda: reports.append(1)
    idle.lease.request_units(1)
    fleet.exchange(1, "delivered")
    assert idle.lease.needs_seed
    read_at = fleet.now
    fleet.wait(20.0)  # reading the usage takes long
    idle.lease.seed([(read_at, fleet.limit)], fleet.now)
    assert reports
    assert idle.lease.is_due(fleet.now)
    fleet.exchange(1, "delivered")
    assert not idle.lease.needs_seed
    assert fleet.authority.limits[idle.lease.name].known
    assert fleet.authority.counted_units(idle.lease.name) >= fleet.limit


def test_huge_usage_can_be_encoded() -> None:
    """A replica may report any number of tokens, and each has a price."""
    for meter in (SlidingWindow(50, WINDOW_S), CalendarPeriod(50, "day")):
        lease = WindowLease("limit", meter)
        slot = lease.add(10**30, 1e6)
        msgspec.msgpack.encode(lease.build_request(1e6))
        lease.apply_grant(
            lease.build_request(1e6), LeaseGrant(10, 7, 10, 0.0, 0.0, known=True), 1e6, 1e6
        )
        lease.add(10, 1e6)
        lease.adjust(slot, -(10**30), 1e6)
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(lease.build_request(1e6)))
        assert decoded["back"][0][0] == 7


class ConcurrencyLimits(RuleBasedStateMachine):
    """Concurrency limit: live gateways never exceed it, and slots of dead gateways become free again."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0
        self.authority = FakeQuotaAuthority()
        self.num_started = 0
        self.running = [0] * GATEWAYS
        self.gateways = [self._start_gateway() for _ in range(GATEWAYS)]

    def _start_gateway(self) -> GatewayState:
        self.num_started += 1
        return GatewayState(
            f"g{self.num_started}",
            ConcurrencyLease("concurrency", ConcurrencyMeter(5), GATEWAY_TTL_S),
        )

    @rule(number=GATEWAY)
    def begin(self, number: int) -> None:
        lease = self.gateways[number].lease
        if lease.remaining(self.now) >= 1:
            lease.add(1, self.now)
            self.running[number] += 1
        else:
            lease.request_units(1)

    @rule(number=GATEWAY)
    def end(self, number: int) -> None:
        if self.running[number]:
            self.gateways[number].lease.adjust(0, -1, self.now)
            self.running[number] -= 1

    exchange = LeasedWindows.exchange

    @rule(seconds=st.floats(0.1, 1.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for number in range(GATEWAYS):
            self.exchange(number, "delivered")
            self.exchange(number, "delivered")

    @rule(number=GATEWAY)
    def die(self, number: int) -> None:
        self.gateways[number], self.running[number] = self._start_gateway(), 0

    @invariant()
    def limit_is_kept(self) -> None:
        assert sum(self.running) <= 5

    def teardown(self) -> None:
        """Check that one gateway can use the whole limit soon after all requests have ended."""
        for number in range(GATEWAYS):
            while self.running[number]:
                self.end(number)
        for _ in range(12):
            self.wait(1.0)
        lease = self.gateways[0].lease
        for _ in range(5):
            lease.request_units(1)
        self.exchange(0, "delivered")
        assert lease.remaining(self.now) == 5


@given(lowered=st.integers(0, 4), running=st.integers(1, 5), pause_s=st.floats(0.05, 0.9))
def test_lowered_concurrency_limit_holds_under_constant_load(
    lowered: int, running: int, pause_s: float
) -> None:
    fleet = ConcurrencyLimits()
    for gateway in fleet.gateways:
        gateway.lease.limit = running * GATEWAYS
    for _ in range(2 * running):
        for number in range(GATEWAYS):
            fleet.exchange(number, "delivered")
            if fleet.running[number] < running:
                fleet.begin(number)
    assert sum(fleet.running) == running * GATEWAYS
    for gateway in fleet.gateways:
        gateway.lease.limit = lowered
    for _ in range(running * GATEWAYS):
        for number in range(GATEWAYS):
            fleet.end(number)
            fleet.begin(number)
            fleet.begin(number)
        fleet.wait(pause_s)
    assert sum(fleet.running) <= lowered


TestSlidingWindows = SlidingWindows.TestCase
TestDegradedSlidingWindows = DegradedSlidingWindows.TestCase
TestDayBudgets = DayBudgets.TestCase
TestDegradedDayBudgets = DegradedDayBudgets.TestCase
TestConcurrencyLimits = ConcurrencyLimits.TestCase
