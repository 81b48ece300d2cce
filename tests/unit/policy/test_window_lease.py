"""Many gateways, one limit: in virtual time, with messages lost on the way, gateways dying, the authority gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.support.quota_authority import Authority

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
ALIVE_S = 5.0
GATEWAYS = 3
WHO = st.integers(0, GATEWAYS - 1)
PAUSE = st.sampled_from([0.2, 1.0, 1.9, 56.0, 58.0, 59.0, 59.5, 60.0, 61.0]) | st.floats(0.01, 40.0)
FATE = st.sampled_from(["arrives", "arrives", "arrives", "lost", "answer lost"])


@dataclass
class Gateway:
    """One gateway's lease, and what it said and has not been answered."""

    name: str
    lease: LeasedQuota
    number: int = 0
    asked: tuple[str, LeaseRequest, float] | None = None
    held: list[tuple[int, int, int]] = field(default_factory=list)
    """Own slot, units and the number of the use, for what may be given back."""


class Fleet(RuleBasedStateMachine):
    """Gateways that share a limit, and everything that may happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0
        self.limit = 50
        self.authority = Authority()
        self.born = 0
        self.gateways = [self._gateway() for _ in range(GATEWAYS)]
        self.uses: list[list[Any]] = []
        """When, and how many units."""

    def lease(self) -> LeasedQuota:
        raise NotImplementedError

    def _gateway(self) -> Gateway:
        self.born += 1
        return Gateway(f"g{self.born}", self.lease())

    def _use(self, gateway: Gateway, units: int) -> None:
        slot = gateway.lease.add(units, self.now)
        gateway.held.append((slot, units, len(self.uses)))
        self.uses.append([self.now, units])

    @rule(who=WHO, units=st.integers(1, 30))
    def use(self, who: int, units: int) -> None:
        gateway = self.gateways[who]
        if units <= gateway.lease.remaining(self.now):
            self._use(gateway, units)
        else:
            gateway.lease.request_units(units)

    @rule(who=WHO, units=st.integers(1, 60))
    def get(self, who: int, units: int) -> None:
        """As much of it as there is."""
        gateway = self.gateways[who]
        for _ in range(2):
            if gateway.lease.remaining(self.now) < units:
                gateway.lease.request_units(units)
                self.talk(who, "arrives")
        room = min(units, gateway.lease.remaining(self.now))
        if room > 0:
            self._use(gateway, room)

    @rule(who=WHO, part=st.floats(0, 1))
    def give_back(self, who: int, part: float) -> None:
        gateway = self.gateways[who]
        if gateway.held:
            slot, units, number = gateway.held.pop()
            back = int(units * part)
            gateway.lease.adjust(slot, -back, self.now)
            self.uses[number][1] -= back

    @rule(who=WHO, fate=FATE)
    def talk(self, who: int, fate: str) -> None:
        gateway = self.gateways[who]
        if gateway.asked is None:
            ask = gateway.lease.build_request(self.now)
            gateway.asked = gateway.lease.name, ask, self.now
            gateway.number += 1
        name, ask, asked_at = gateway.asked
        if fate == "lost":
            return
        [grant] = self.authority.exchange(
            gateway.name, gateway.number, ALIVE_S, [(name, ask)], self.now
        )
        if fate == "arrives":
            gateway.lease.apply_grant(ask, grant, asked_at, self.now)
            gateway.asked = None

    @rule(seconds=PAUSE)
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(who=WHO)
    def die(self, who: int) -> None:
        self.gateways[who] = self._gateway()

    def within(self, seconds: float) -> int:
        return sum(units for at, units in self.uses if at > self.now - seconds)


class Sliding(Fleet):
    """A window, the authority always there: exact, whatever is lost."""

    def lease(self) -> LeasedQuota:
        return WindowLease("limit", SlidingWindow(self.limit, WINDOW_S))

    @invariant()
    def never_more_than_the_limit(self) -> None:
        assert self.within(WINDOW_S) <= self.limit


Step = tuple[float, int, str, int]
"""How long before, who, what, and how many units."""


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.9, 1.9, 57.2, 58.9, 59.3, 60.0]),
            st.integers(0, 1),
            st.sampled_from(["ask", "use", "get", "give back"]),
            st.sampled_from([10, 30, 60]),
        ),
        max_size=14,
    )
)
@example([(0.0, 0, "ask", 30), (1.9, 0, "use", 40), (59.3, 1, "get", 60)])
def test_grants_that_are_used_late_or_given_back_late_free_nothing_too_soon(
    steps: list[Step],
) -> None:
    fleet = Sliding()
    for pause, who, what, units in steps:
        fleet.wait(pause)
        if what == "ask":
            fleet.gateways[who].lease.request_units(units)
            fleet.talk(who, "arrives")
        elif what == "use":
            fleet.use(who, units)
        elif what == "get":
            fleet.get(who, units)
        else:
            fleet.give_back(who, 0.9)
        fleet.never_more_than_the_limit()


class Unsure(Fleet):
    """Gateways that go on without the authority."""

    @rule(who=WHO, units=st.integers(1, 30))
    def go_on(self, who: int, units: int) -> None:
        gateway = self.gateways[who]
        if units > gateway.lease.remaining(self.now) and gateway.lease.is_within_even_share(
            units, GATEWAYS, self.now
        ):
            gateway.lease.overdraw(units, self.now)
            assert gateway.lease.remaining(self.now) >= units
            self._use(gateway, units)


class Trusting(Unsure, Sliding):
    """A window, and gateways that go on without the authority: at most twice the limit, whatever happens."""

    def die(self, who: int) -> None:
        """Not here: it would come back knowing nothing of what it used."""

    @invariant()
    def never_more_than_the_limit(self) -> None:
        share = -(-self.limit // GATEWAYS)
        assert self.within(WINDOW_S) <= self.limit + GATEWAYS * share


class Daily(Fleet):
    """A day's budget, and the next day's: never passed, and nothing leaks while nobody dies."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 12 * 86400 - 100.0  # a little before midnight
        self.died = False

    def lease(self) -> WindowLease:
        return WindowLease("budget", CalendarPeriod(self.limit, "day"))

    @rule(who=WHO)
    def die(self, who: int) -> None:
        super().die(who)
        self.died = True

    @invariant()
    def never_more_than_the_budget(self) -> None:
        assert self.today() <= self.limit

    def today(self) -> int:
        midnight = self.now // 86400 * 86400
        return sum(units for at, units in self.uses if at >= midnight)

    def teardown(self) -> None:
        if self.died:
            return
        for who in (*range(GATEWAYS),) * 3:  # what is owed, what is left, and nothing
            self.talk(who, "arrives")
        kept = self.authority.limits.get(self.gateways[0].lease.name)
        counted = 0 if kept is None else sum(kept.slots.values())
        assert counted == self.today()


class TrustingDaily(Unsure, Daily):
    """A day's budget, and gateways that go on without the authority: nothing leaks once that is there again."""

    def die(self, who: int) -> None:
        """Not here."""

    @invariant()
    def never_more_than_the_budget(self) -> None:
        share = -(-self.limit // GATEWAYS)
        assert self.today() <= self.limit + GATEWAYS * share


@given(idle_s=st.floats(60.0, 50_000.0))
def test_an_authority_that_forgot_learns_what_was_used_since_a_gateway_looked_long_ago(
    idle_s: float,
) -> None:
    """That gateway has had nothing to ask since it read the ledger; another one has used the budget meanwhile."""
    fleet = Daily()
    fleet.now = 12 * 86400 + 10.0
    busy, quiet = fleet.gateways[:2]
    for gateway in (busy, quiet):
        gateway.lease.seed_points(fleet.now)
        gateway.lease.seed([(fleet.now, 0)], fleet.now)
    fleet.get(0, fleet.limit)
    assert fleet.within(86400) == fleet.limit
    fleet.wait(idle_s)
    fleet.authority = Authority()
    news: list[int] = []
    assert isinstance(quiet.lease, WindowLease)
    quiet.lease.on_report_due = lambda: news.append(1)
    quiet.lease.request_units(1)
    fleet.talk(1, "arrives")
    assert quiet.lease.needs_seed
    looked_at = fleet.now
    fleet.wait(20.0)  # there is much to look for
    quiet.lease.seed([(looked_at, fleet.limit)], fleet.now)
    assert news
    assert quiet.lease.is_due(fleet.now)
    fleet.talk(1, "arrives")
    assert not quiet.lease.needs_seed
    kept = fleet.authority.limits[quiet.lease.name]
    assert kept.known
    assert sum(kept.slots.values()) >= fleet.limit


def test_however_much_is_used_it_can_be_told() -> None:
    """A replica may claim any number of tokens, and they have a price."""
    for own in (SlidingWindow(50, WINDOW_S), CalendarPeriod(50, "day")):
        lease = WindowLease("limit", own)
        slot = lease.add(10**30, 1e6)
        msgspec.msgpack.encode(lease.build_request(1e6))
        lease.apply_grant(
            lease.build_request(1e6), LeaseGrant(10, 7, 10, 0.0, 0.0, known=True), 1e6, 1e6
        )
        lease.add(10, 1e6)
        lease.adjust(slot, -(10**30), 1e6)
        told = msgspec.msgpack.decode(msgspec.msgpack.encode(lease.build_request(1e6)))
        assert told["back"][0][0] == 7


class Places(RuleBasedStateMachine):
    """What runs at a time: never more than the limit at gateways that live; the places of the dead come back."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0
        self.authority = Authority()
        self.born = 0
        self.running = [0] * GATEWAYS
        self.dead: list[tuple[float, int]] = []
        self.gateways = [self._gateway() for _ in range(GATEWAYS)]

    def _gateway(self) -> Gateway:
        self.born += 1
        return Gateway(f"g{self.born}", ConcurrencyLease("places", ConcurrencyMeter(5), ALIVE_S))

    @rule(who=WHO)
    def begin(self, who: int) -> None:
        lease = self.gateways[who].lease
        if lease.remaining(self.now) >= 1:
            lease.add(1, self.now)
            self.running[who] += 1
        else:
            lease.request_units(1)

    @rule(who=WHO)
    def end(self, who: int) -> None:
        if self.running[who]:
            self.gateways[who].lease.adjust(0, -1, self.now)
            self.running[who] -= 1

    talk = Fleet.talk

    @rule(seconds=st.floats(0.1, 1.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for who in range(GATEWAYS):
            self.talk(who, "arrives")
            self.talk(who, "arrives")

    @rule(who=WHO)
    def die(self, who: int) -> None:
        self.gateways[who], self.running[who] = self._gateway(), 0

    @invariant()
    def never_more_than_the_limit(self) -> None:
        assert sum(self.running) <= 5

    def teardown(self) -> None:
        """All that ran has ended or died: within a heartbeat's patience somebody can have everything."""
        for who in range(GATEWAYS):
            while self.running[who]:
                self.end(who)
        for _ in range(12):
            self.wait(1.0)
        lease = self.gateways[0].lease
        for _ in range(5):
            lease.request_units(1)
        self.talk(0, "arrives")
        assert lease.remaining(self.now) == 5


@given(lowered=st.integers(0, 4), running=st.integers(1, 5), each_s=st.floats(0.05, 0.9))
def test_a_limit_on_what_runs_that_is_lowered_holds_though_there_is_always_more_to_run(
    lowered: int, running: int, each_s: float
) -> None:
    places = Places()
    for gateway in places.gateways:
        gateway.lease.limit = running * GATEWAYS
    for _ in range(2 * running):
        for who in range(GATEWAYS):
            places.talk(who, "arrives")
            if places.running[who] < running:
                places.begin(who)
    assert sum(places.running) == running * GATEWAYS
    for gateway in places.gateways:
        gateway.lease.limit = lowered
    for _ in range(running * GATEWAYS):
        for who in range(GATEWAYS):
            places.end(who)
            places.begin(who)
            places.begin(who)
        places.wait(each_s)
    assert sum(places.running) <= lowered


TestSliding = Sliding.TestCase
TestTrusting = Trusting.TestCase
TestDaily = Daily.TestCase
TestTrustingDaily = TrustingDaily.TestCase
TestPlaces = Places.TestCase
