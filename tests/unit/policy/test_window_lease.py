"""State machines of gateways that share a limit while messages are lost, gateways die and the authority is down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import given
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
