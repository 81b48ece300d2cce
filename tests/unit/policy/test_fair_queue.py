"""The dispatch queue: nobody lost, tiers kept, nobody starved, fair shares in tokens within the bound."""

from __future__ import annotations

import math
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.policy import (
    PROMOTION_INTERVAL,
    QUANTUM_TOKENS,
    DispatchQueue,
    QueuedRequest,
    TenantBacklog,
)


def waiting(
    item: int = 0,
    *,
    tier: int = 1,
    tenant: str = "a",
    weight: float = 1.0,
    cost: float = 100.0,
    arrival: float = 0.0,
    deadline: float = math.inf,
) -> QueuedRequest[int]:
    return QueuedRequest(item, tier, tenant, weight, cost, arrival, deadline, size_bytes=item + 1)


class Rounds:
    """Deficit round robin over one tier as it is described, looking at everybody each time."""

    def __init__(self) -> None:
        self.ring: dict[str, list[QueuedRequest[int]]] = {}
        self.credit: dict[str, float] = {}
        """Of those of the ring, and those who have left it in debt."""
        self.weight: dict[str, float] = {}
        self.heaviest = 0.0

    def push(self, one: QueuedRequest[int]) -> None:
        self.ring.setdefault(one.tenant, []).append(one)
        self.credit.setdefault(one.tenant, 0.0)
        self.weight[one.tenant] = one.weight
        self.heaviest = max(self.heaviest, one.weight)

    def pop(self) -> tuple[int, bool]:
        while not any(self.credit[name] > 0 for name in self.ring):
            for name in self.credit:
                self.credit[name] += QUANTUM_TOKENS * self.weight[name] / self.heaviest
            self.forgive()
        name = next(name for name in self.ring if self.credit[name] > 0)
        one, charged = self.ring[name][0], len(self.credit) > 1
        self.credit[name] -= one.cost_tokens if charged else 0
        self.remove(one)
        if name in self.ring and self.credit[name] <= 0:
            self.ring[name] = self.ring.pop(name)
        return one.item, charged

    def remove(self, one: QueuedRequest[int]) -> None:
        self.ring[one.tenant].remove(one)
        if not self.ring[one.tenant]:
            del self.ring[one.tenant]
            self.forgive()
        if not self.ring:
            self.credit.clear()
            self.heaviest = 0.0

    def charge(self, name: str, weight: float, cost: float) -> None:
        if set(self.ring) <= {name}:
            return
        self.weight.setdefault(name, weight)
        if name not in self.credit:
            self.credit[name], self.weight[name] = 0.0, weight
        self.credit[name] -= cost
        self.forgive()

    def forgive(self) -> None:
        for name in set(self.credit) - set(self.ring):
            if self.credit[name] >= 0:
                del self.credit[name]


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "push", "pop", "pop", "remove", "charge"]),
            st.sampled_from("abcdefgh"),
            st.sampled_from([0.25, 1.0, 2.0, 8.0]),
            st.integers(-2000, 4000),
        ),
        max_size=200,
    )
)
def test_who_goes_next_is_who_the_rounds_say(steps: list[tuple[str, str, float, int]]) -> None:
    queue, rounds, inside = DispatchQueue[int](), Rounds(), list[QueuedRequest[int]]()
    for number, (what, tenant, weight, cost) in enumerate(steps):
        if what == "push":
            one = waiting(number, tenant=tenant, weight=weight, cost=abs(cost))
            inside.append(one)
            queue.push(one)
            rounds.push(one)
        elif what == "charge":
            queue.charge_tenant(1, tenant, weight, cost)
            rounds.charge(tenant, weight, cost)
        elif what == "remove" and inside:
            gone = inside.pop(cost % len(inside))
            queue.remove(gone)
            rounds.remove(gone)
        elif what == "pop" and inside:
            one_, expected = queue.pop(0.0), rounds.pop()
            assert one_ is not None
            assert (one_.item, one_.is_charged) == expected
            inside.remove(one_)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "pop", "remove", "charge"]),
        st.integers(0, 2),
        st.sampled_from("abc"),
        st.integers(1, 5000),
    ),
    max_size=120,
)


@given(STEPS)
def test_everyone_leaves_exactly_once(steps: list[tuple[str, int, str, int]]) -> None:
    queue, inside, now = DispatchQueue[int](), list[QueuedRequest[int]](), 0.0
    for number, (what, tier, tenant, size) in enumerate(steps):
        now += 1.0
        if what == "push":
            inside.append(waiting(number, tier=tier, tenant=tenant, cost=size, arrival=now))
            queue.push(inside[-1])
        elif what == "charge":
            queue.charge_tenant(tier, tenant, 1.0, size)
        elif what == "remove" and inside:
            gone = inside.pop(size % len(inside))
            assert queue.remove(gone)
            assert not queue.remove(gone)
        elif what == "pop":
            next_one = queue.pop(now)
            assert (next_one is None) == (not inside)
            if next_one is not None:
                inside.remove(next_one)
        assert len(queue) == len(inside)
        assert queue.size_bytes == sum(one.size_bytes for one in inside)
    while (next_one := queue.pop(now)) is not None:
        inside.remove(next_one)
    assert not inside


def test_the_higher_tier_goes_first_and_deadlines_order_one_tenants_own() -> None:
    queue = DispatchQueue[int]()
    for number, (tier, deadline) in enumerate(
        [(2, 1.0), (1, math.inf), (1, 9.0), (0, math.inf), (1, 5.0)]
    ):
        queue.push(waiting(number, tier=tier, deadline=deadline))
    order = [queue.pop(0.0) for _ in range(5)]
    assert [one.item for one in order if one] == [3, 4, 2, 1, 0]


def test_an_old_request_of_a_low_tier_gets_a_turn_but_its_backlog_does_not_drown_the_high_one() -> (
    None
):
    queue = DispatchQueue[int]()
    for _ in range(100):
        queue.push(waiting(tier=2, arrival=0.0))
        queue.push(waiting(tier=0, arrival=99.0))
    turns = []
    for _ in range(40):
        one = queue.pop(100.0)
        assert one is not None
        turns.append(one.tier)
    assert turns.count(2) == 40 // PROMOTION_INTERVAL
    fresh = DispatchQueue[int]()
    for _ in range(10):
        fresh.push(waiting(tier=2, arrival=99.0))
        fresh.push(waiting(tier=0, arrival=99.0))
    tiers = [one.tier for one in (fresh.pop(100.0) for _ in range(10)) if one]
    assert tiers == [0] * 10


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 3000), min_size=2, max_size=12),
    st.lists(st.integers(0, 2000), min_size=1, max_size=12),
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=4),
)
def test_service_per_weight_of_backlogged_tenants_stays_within_the_bound(
    costs: list[int], outputs: list[int], weights: list[float]
) -> None:
    queue, served = DispatchQueue[int](), [0.0] * len(weights)

    def push(tenant: int, number: int) -> None:
        cost = costs[number % len(costs)]
        queue.push(waiting(number, tenant=str(tenant), weight=weights[tenant], cost=cost))

    for tenant in range(len(weights)):
        push(tenant, tenant)
        push(tenant, tenant + 1)
    most = max(costs) + max(outputs)
    for number in range(300):
        one = queue.pop(0.0)
        assert one is not None
        tenant = int(one.tenant)
        push(tenant, number)  # always backlogged
        output = outputs[number % len(outputs)]
        queue.charge_tenant(1, one.tenant, one.weight, output)
        served[tenant] += (one.cost_tokens + output) / weights[tenant]
        bound = 2 * QUANTUM_TOKENS + 2 * most / min(weights)
        assert max(served) - min(served) <= bound


@given(
    st.lists(st.sampled_from([1e-6, 0.001, 0.5, 1.0, 3.0, 1000.0]), min_size=2, max_size=4),
    st.integers(0, 20),
    st.lists(st.integers(1, 100_000), min_size=1, max_size=8),
)
def test_only_how_weights_compare_counts_and_the_heaviest_gets_a_quantum_a_round(
    weights: list[float], power: int, costs: list[int]
) -> None:
    orders = []
    for factor in (1.0, 2.0**-power):
        queue = DispatchQueue[int]()
        for number in range(20):
            for tenant, weight in enumerate(weights):
                cost = costs[(number + tenant) % len(costs)]
                queue.push(waiting(tenant=str(tenant), weight=weight * factor, cost=cost))
        orders.append([one.tenant for one in (queue.pop(0.0) for _ in range(60)) if one])
    assert orders[0] == orders[1]
    queue = DispatchQueue[int]()
    for _ in range(20):
        for name in "ab":
            queue.push(waiting(tenant=name, weight=1000.0, cost=1000.0))
    order = [one.tenant for one in (queue.pop(0.0) for _ in range(20)) if one]
    assert order == ["a", "b"] * 10


def test_a_tenant_that_was_alone_owes_nothing_to_one_that_comes_later() -> None:
    queue = DispatchQueue[int]()
    for _ in range(50):
        queue.push(waiting(tenant="early", cost=100.0))
        assert queue.pop(0.0) is not None
        queue.charge_tenant(1, "early", 1.0, 10_000.0)
    for number in range(20):
        queue.push(waiting(number, tenant="early"))
        queue.push(waiting(number, tenant="late"))
    tenants = [one.tenant for one in (queue.pop(0.0) for _ in range(40)) if one]
    assert "early" in tenants[:12]
    assert "late" in tenants[:12]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 256)), min_size=2, max_size=12),
    st.integers(2, 4),
    st.integers(1, 40),
)
def test_what_runs_and_has_told_nothing_yet_is_charged_as_expected(
    outputs: list[tuple[int, int]], tenants: int, seats: int
) -> None:
    expected, queue = 256, DispatchQueue[int]()
    charged, running = [0.0] * tenants, list[tuple[str, int]]()
    for tenant in range(tenants):
        queue.push(waiting(tenant=str(tenant), cost=10 + expected))
        queue.push(waiting(tenant=str(tenant), cost=10 + expected))
    for number in range(300):
        one = queue.pop(0.0)
        assert one is not None
        queue.push(waiting(tenant=one.tenant, cost=10 + expected))  # always backlogged
        longer, shorter = outputs[number % len(outputs)]
        output = expected + longer if number % 2 else expected - shorter
        running.append((one.tenant, output))
        charged[int(one.tenant)] += 10 + expected
        if len(running) == seats:
            tenant_, output = running.pop(0)
            queue.charge_tenant(1, tenant_, 1.0, output - expected)
            charged[int(tenant_)] += output - expected
        # What all that run may cost beyond what was expected is known only as they end.
        assert max(charged) - min(charged) <= 2 * (QUANTUM_TOKENS + 10 + expected) + 300 * seats


def test_what_was_too_much_is_given_back_and_what_nobody_waited_for_is_not_charged() -> None:
    queue = DispatchQueue[int]()
    for number in range(40):
        queue.push(waiting(number, tenant="early", cost=1000.0))
    alone = [queue.pop(0.0) for _ in range(10)]
    assert not any(one.is_charged for one in alone if one)
    for number in range(40):
        queue.push(waiting(number, tenant="late", cost=1000.0))
    both = [one for one in (queue.pop(0.0) for _ in range(20)) if one]
    assert all(one.is_charged for one in both)
    for one in both:
        if one.tenant == "late":
            queue.charge_tenant(1, "late", 1.0, -900.0)
    tenants = [one.tenant for one in (queue.pop(0.0) for _ in range(20)) if one]
    assert tenants.count("late") >= 14


def test_debts_are_paid_off_by_weight_also_of_who_does_not_wait() -> None:
    queue = DispatchQueue[int]()
    for tenant, weight in (("heavy", 10.0), ("light", 1.0)):
        queue.push(waiting(tenant=tenant, weight=weight))
    first = queue.pop(0.0)
    assert first is not None
    assert first.tenant == "heavy"
    queue.charge_tenant(1, "heavy", 10.0, 10_000.0)
    for _ in range(20):  # a fifth of that, and twice as much by weight
        queue.push(waiting(tenant="light"))
        queue.pop(0.0)
    queue.push(waiting(tenant="heavy", weight=10.0))
    for _ in range(20):
        queue.push(waiting(tenant="light"))
    assert "heavy" in [one.tenant for one in (queue.pop(0.0) for _ in range(4)) if one]


def one_at_a_time(queue: DispatchQueue[int], cost: float, turns: int, beyond: float) -> list[str]:
    """Who goes, where many wait for "many" and one for "one", which costs so much beyond what was thought."""
    for _ in range(turns + 50):
        queue.push(waiting(tenant="many", cost=cost))
    tenants = []
    for _ in range(turns):
        if not queue.tenant_backlog(1, "one").count:
            queue.push(waiting(tenant="one", cost=cost))
        one = queue.pop(0.0)
        assert one is not None
        tenants.append(one.tenant)
        if one.tenant == "one":
            queue.charge_tenant(1, "one", 1.0, beyond)
    return tenants


def test_who_sends_one_at_a_time_pays_debts_too() -> None:
    tenants = one_at_a_time(DispatchQueue(), cost=1000.0, turns=40, beyond=0.0)
    assert 15 <= tenants.count("many") <= 25


def test_who_sends_one_at_a_time_pays_for_what_it_cost_beyond_what_was_thought() -> None:
    tenants = one_at_a_time(DispatchQueue(), cost=10.0, turns=150, beyond=5000.0)
    assert tenants.count("one") == 1


def test_who_is_away_saves_nothing_up() -> None:
    queue = DispatchQueue[int]()
    queue.push(waiting(tenant="away", cost=1000.0))
    for _ in range(300):
        queue.push(waiting(tenant="stays", cost=1000.0))
    for _ in range(200):
        queue.pop(0.0)
    for _ in range(100):
        queue.push(waiting(tenant="away", cost=1000.0))
    tenants = [one.tenant for one in (queue.pop(0.0) for _ in range(20)) if one]
    assert 8 <= tenants.count("stays") <= 12


def test_only_tiers_that_there_is_room_for_leave() -> None:
    queue = DispatchQueue[int]()
    for tier in range(3):
        queue.push(waiting(tier, tier=tier))
    assert [one.item for one in (queue.pop(0.0, 1) for _ in range(3)) if one] == [0, 1]
    assert queue.pop(0.0, -1) is None
    last = queue.pop(0.0)
    assert last is not None
    assert last.item == 2


def test_an_old_request_gets_no_turn_at_a_seat_that_is_not_its_tiers() -> None:
    for reach, tiers in ((1, [0] * 8), (2, [0, 0, 0, 2] * 2)):
        queue = DispatchQueue[int]()
        for _ in range(8):
            queue.push(waiting(tier=2, arrival=0.0))
            queue.push(waiting(tier=0, arrival=99.0))
        left = [queue.pop(100.0, 1, reach) for _ in range(8)]
        assert [one.tier for one in left if one] == tiers


def test_what_a_tenant_has_waiting_is_known() -> None:
    queue = DispatchQueue[int]()
    assert queue.tenant_backlog(1, "a") == TenantBacklog()
    first, second = waiting(1, arrival=1.0), waiting(2, arrival=2.0)
    queue.push(first)
    queue.push(second)
    queue.push(waiting(3, tenant="b"))
    assert queue.tenant_backlog(1, "a") == TenantBacklog(2, 5, 1.0)
    queue.remove(first)
    assert queue.tenant_backlog(1, "a") == TenantBacklog(1, 3, 2.0)
    assert queue.tenant_backlog(0, "a") == TenantBacklog()


def test_how_many_wait_beside_it_that_do_not_stand_back() -> None:
    queue, mine = DispatchQueue[int](), waiting(tier=1)
    queue.push(waiting(tier=0))
    queue.push(mine)
    queue.push(waiting(tier=2))
    assert queue.count_ahead(mine) == 1


class Body:
    """What a request holds while it waits."""


@given(st.lists(st.sampled_from(["dispatched", "cancelled"]), min_size=1, max_size=10))
def test_who_has_left_is_kept_no_longer_though_an_older_one_waits(ways: list[str]) -> None:
    """Else who sends much and leaves at once would fill the memory, past the bound on bytes."""
    queue, gone = DispatchQueue[Body](), list[weakref.ref[Body]]()
    queue.push(QueuedRequest(Body(), 1, "slow", 1.0, 1.0, arrived_at=0.0, deadline=0.5))
    for way in ways:
        tenant = "slow" if way == "cancelled" else "quick"
        one = QueuedRequest(Body(), 1, tenant, 1.0, 1.0, arrived_at=1.0)
        gone.append(weakref.ref(one.item))
        queue.push(one)
        if way == "cancelled":
            assert queue.remove(one)
        else:
            queue.charge_tenant(1, "slow", 1.0, 1e6)
            assert queue.pop(2.0) is one
        del one
    assert len(queue) == 1
    assert [body for body in gone if body() is not None] == []
