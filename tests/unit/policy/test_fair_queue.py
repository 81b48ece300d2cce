"""Dispatch queue: no request is lost or starved, tiers keep their order, and tenants share tokens within a bound."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.policy import (
    PROMOTION_INTERVAL,
    QUANTUM_TOKENS,
    DispatchQueue,
    QueuedRequest,
    TenantBacklog,
    VirtualTokenCounters,
    lowest_admissible_tier,
    promote_after_s,
)


class NumberedRequest(QueuedRequest, eq=False, weakref=True):
    """A request that a test knows by its number."""

    item: int = 0


def queued(
    item: int = 0,
    *,
    tier: int = 1,
    tenant: str = "a",
    weight: float = 1.0,
    cost: float = 100.0,
    arrival: float = 0.0,
    deadline: float = math.inf,
) -> NumberedRequest:
    return NumberedRequest(
        item,
        tier=tier,
        tenant=tenant,
        weight=weight,
        cost_tokens=cost,
        arrived_at=arrival,
        deadline=deadline,
        size_bytes=item + 1,
    )


class DeficitRoundRobin:
    """Model of deficit round robin over one tier, which visits every tenant in each round."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[NumberedRequest]] = {}
        self.credit: dict[str, float] = {}
        """Credit of the waiting tenants, and of those that left in debt."""
        self.weight: dict[str, float] = {}
        self.heaviest = 0.0

    def push(self, request: NumberedRequest) -> None:
        self.waiting.setdefault(request.tenant, []).append(request)
        self.credit.setdefault(request.tenant, 0.0)
        self.weight[request.tenant] = request.weight
        self.heaviest = max(self.heaviest, request.weight)

    def pop(self) -> tuple[int, bool]:
        while not any(self.credit[name] > 0 for name in self.waiting):
            for name in self.credit:
                self.credit[name] += QUANTUM_TOKENS * self.weight[name] / self.heaviest
            self.forgive()
        name = next(name for name in self.waiting if self.credit[name] > 0)
        request, charged = self.waiting[name][0], len(self.credit) > 1
        self.credit[name] -= request.cost_tokens if charged else 0
        self.remove(request)
        if name in self.waiting and self.credit[name] <= 0:
            self.waiting[name] = self.waiting.pop(name)
        return request.item, charged

    def remove(self, request: NumberedRequest) -> None:
        self.waiting[request.tenant].remove(request)
        if not self.waiting[request.tenant]:
            del self.waiting[request.tenant]
            self.forgive()
        if not self.waiting:
            self.credit.clear()
            self.heaviest = 0.0

    def charge(self, name: str, weight: float, cost: float) -> None:
        if set(self.waiting) <= {name}:
            return
        self.weight.setdefault(name, weight)
        if name not in self.credit:
            self.credit[name], self.weight[name] = 0.0, weight
        self.credit[name] -= cost
        self.forgive()

    def forgive(self) -> None:
        for name in set(self.credit) - set(self.waiting):
            if self.credit[name] >= 0:
                del self.credit[name]


@settings(max_examples=80)
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
def test_dispatch_order_matches_deficit_round_robin_model(
    steps: list[tuple[str, str, float, int]],
) -> None:
    queue, model, waiting = (
        DispatchQueue[NumberedRequest](),
        DeficitRoundRobin(),
        list[NumberedRequest](),
    )
    for number, (operation, tenant, weight, cost) in enumerate(steps):
        if operation == "push":
            request = queued(number, tenant=tenant, weight=weight, cost=abs(cost))
            waiting.append(request)
            queue.push(request)
            model.push(request)
        elif operation == "charge":
            queue.charge_tenant(1, tenant, weight, cost)
            model.charge(tenant, weight, cost)
        elif operation == "remove" and waiting:
            removed = waiting.pop(cost % len(waiting))
            queue.remove(removed)
            model.remove(removed)
        elif operation == "pop" and waiting:
            dispatched, expected = queue.pop(0.0), model.pop()
            assert dispatched is not None
            assert (dispatched.item, dispatched.is_charged) == expected
            waiting.remove(dispatched)


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
def test_every_request_leaves_exactly_once(steps: list[tuple[str, int, str, int]]) -> None:
    queue, waiting, now = DispatchQueue[NumberedRequest](), list[NumberedRequest](), 0.0
    for number, (operation, tier, tenant, size) in enumerate(steps):
        now += 1.0
        if operation == "push":
            waiting.append(queued(number, tier=tier, tenant=tenant, cost=size, arrival=now))
            queue.push(waiting[-1])
        elif operation == "charge":
            queue.charge_tenant(tier, tenant, 1.0, size)
        elif operation == "remove" and waiting:
            removed = waiting.pop(size % len(waiting))
            assert queue.remove(removed)
            assert not queue.remove(removed)
        elif operation == "pop":
            dispatched = queue.pop(now)
            assert (dispatched is None) == (not waiting)
            if dispatched is not None:
                waiting.remove(dispatched)
        assert len(queue) == len(waiting)
        assert queue.size_bytes == sum(request.size_bytes for request in waiting)
    while (dispatched := queue.pop(now)) is not None:
        waiting.remove(dispatched)
    assert not waiting


def test_higher_tier_goes_first_and_deadlines_order_a_tenants_requests() -> None:
    queue = DispatchQueue[NumberedRequest]()
    for number, (tier, deadline) in enumerate(
        [(2, 1.0), (1, math.inf), (1, 9.0), (0, math.inf), (1, 5.0)]
    ):
        queue.push(queued(number, tier=tier, deadline=deadline))
    order = [queue.pop(0.0) for _ in range(5)]
    assert [request.item for request in order if request] == [3, 4, 2, 1, 0]


def test_old_low_tier_requests_are_promoted_at_a_bounded_rate() -> None:
    queue = DispatchQueue[NumberedRequest]()
    for _ in range(100):
        queue.push(queued(tier=2, arrival=0.0))
        queue.push(queued(tier=0, arrival=99.0))
    turns = []
    for _ in range(40):
        request = queue.pop(100.0)
        assert request is not None
        turns.append(request.tier)
    assert turns.count(2) == 40 // PROMOTION_INTERVAL
    fresh = DispatchQueue[NumberedRequest]()
    for _ in range(10):
        fresh.push(queued(tier=2, arrival=99.0))
        fresh.push(queued(tier=0, arrival=99.0))
    tiers = [request.tier for request in (fresh.pop(100.0) for _ in range(10)) if request]
    assert tiers == [0] * 10


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 3000), min_size=2, max_size=12),
    st.lists(st.integers(0, 2000), min_size=1, max_size=12),
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=4),
)
def test_service_per_weight_differs_within_the_bound(
    costs: list[int], outputs: list[int], weights: list[float]
) -> None:
    queue, served = DispatchQueue[NumberedRequest](), [0.0] * len(weights)

    def push(tenant: int, number: int) -> None:
        cost = costs[number % len(costs)]
        queue.push(queued(number, tenant=str(tenant), weight=weights[tenant], cost=cost))

    for tenant in range(len(weights)):
        push(tenant, tenant)
        push(tenant, tenant + 1)
    max_cost = max(costs) + max(outputs)
    for number in range(300):
        request = queue.pop(0.0)
        assert request is not None
        tenant = int(request.tenant)
        push(tenant, number)  # always backlogged
        output = outputs[number % len(outputs)]
        queue.charge_tenant(1, request.tenant, request.weight, output)
        served[tenant] += (request.cost_tokens + output) / weights[tenant]
        bound = 2 * QUANTUM_TOKENS + 2 * max_cost / min(weights)
        assert max(served) - min(served) <= bound


def test_promotion_respects_the_lowest_admissible_tier() -> None:
    for lowest_tier, tiers in ((1, [0] * 8), (2, [0, 0, 0, 2] * 2)):
        queue = DispatchQueue[NumberedRequest]()
        for _ in range(8):
            queue.push(queued(tier=2, arrival=0.0))
            queue.push(queued(tier=0, arrival=99.0))
        dispatched = [queue.pop(100.0, 1, lowest_tier) for _ in range(8)]
        assert [request.tier for request in dispatched if request] == tiers


def test_tenant_backlog_counts_requests_and_bytes() -> None:
    queue = DispatchQueue[NumberedRequest]()
    assert queue.tenant_backlog(1, "a") == TenantBacklog()
    first, second = queued(1, arrival=1.0), queued(2, arrival=2.0)
    queue.push(first)
    queue.push(second)
    queue.push(queued(3, tenant="b"))
    assert queue.tenant_backlog(1, "a") == TenantBacklog(2, 5, 1.0)
    queue.remove(first)
    assert queue.tenant_backlog(1, "a") == TenantBacklog(1, 3, 2.0)
    assert queue.tenant_backlog(0, "a") == TenantBacklog()


def test_count_ahead_ignores_lower_tiers() -> None:
    queue, mine = DispatchQueue[NumberedRequest](), queued(tier=1)
    queue.push(queued(tier=0))
    queue.push(mine)
    queue.push(queued(tier=2))
    assert queue.count_ahead(mine) == 1


@given(st.lists(st.sampled_from(["dispatched", "cancelled"]), min_size=1, max_size=10))
def test_departed_request_is_released_while_an_older_one_waits(exits: list[str]) -> None:
    """Otherwise clients that disconnect at once could fill the memory beyond the bound on bytes."""
    queue, released = DispatchQueue[NumberedRequest](), list[weakref.ref[NumberedRequest]]()
    queue.push(queued(tenant="slow", cost=1.0, deadline=0.5))
    for exit_ in exits:
        tenant = "slow" if exit_ == "cancelled" else "quick"
        request = queued(tenant=tenant, cost=1.0, arrival=1.0)
        released.append(weakref.ref(request))
        queue.push(request)
        if exit_ == "cancelled":
            assert queue.remove(request)
        else:
            queue.charge_tenant(1, "slow", 1.0, 1e6)
            assert queue.pop(2.0) is request
        del request
    assert len(queue) == 1
    assert [body for body in released if body() is not None] == []


# --- starvation -----------------------------------------------------------------------------------


RESPONSE_INTERVAL_S = 0.5
"""Time between two responses that end."""


def served_by_tier(
    slots: int, flooding_tiers: Sequence[int], rare_tier: int | None, ended_indexes: Sequence[int]
) -> list[int]:
    """Return how many requests of each tier are served within ten minutes.

    `flooding_tiers` always have waiting requests, `rare_tier` sometimes. `ended_indexes` picks the requests that end.
    """
    queue, running, last_arrival = DispatchQueue[NumberedRequest](), list[int](), [-math.inf] * 3
    served, now, waiting = [0, 0, 0], 0.0, [0, 0, 0]

    def push(tier: int) -> None:
        last_arrival[tier] = now
        waiting[tier] += 1
        queue.push(queued(tier=tier, arrival=now))

    for tick in range(1200):
        now = tick * RESPONSE_INTERVAL_S
        for tier in flooding_tiers:
            for _ in range(slots + 20 - waiting[tier]):
                push(tier)
        if rare_tier is not None and tick % 50 == 0:
            push(rare_tier)
        if running:
            running.pop(ended_indexes[tick % len(ended_indexes)] % len(running))
        while True:
            busy = [running.count(tier) for tier in range(3)]
            dispatched = queue.pop(
                now,
                lowest_admissible_tier([slots - len(running)] * 3, slots, busy, last_arrival, now),
            )
            if dispatched is None:
                break
            running.append(dispatched.tier)
            waiting[dispatched.tier] -= 1
            served[dispatched.tier] += 1
    return served


SLOTS = st.sampled_from([1, 2, 7, 8, 9, 16, 32, 64])
ENDED_INDEXES = st.lists(st.integers(0, 63), min_size=1, max_size=9)


@settings(max_examples=15)
@given(SLOTS, ENDED_INDEXES)
def test_every_tier_is_served_while_all_are_saturated(slots: int, ended_indexes: list[int]) -> None:
    assert min(served_by_tier(slots, (0, 1, 2), None, ended_indexes)) >= 40


@settings(max_examples=15)
@given(SLOTS, ENDED_INDEXES, st.permutations([0, 1, 2]))
def test_rare_tier_neither_starves_nor_blocks_saturated_tiers(
    slots: int, ended_indexes: list[int], tiers: list[int]
) -> None:
    *flooding_tiers, rare_tier = tiers
    served = served_by_tier(slots, flooding_tiers, rare_tier, ended_indexes)
    assert min(served[tier] for tier in flooding_tiers) >= 40
    assert served[rare_tier] >= 8


@given(
    st.floats(0.1, 86_400.0),
    st.integers(1, 5),
)
def test_urgent_deadlines_do_not_starve_a_tenants_other_requests(
    timeout_s: float, earlier_requests: int
) -> None:
    queue, now = DispatchQueue[NumberedRequest](), 0.0
    queue.push(queued(arrival=now))
    for _ in range(earlier_requests):
        queue.push(queued(1, arrival=now, deadline=now + timeout_s))
    while now <= 60.0:
        now += 1.0
        queue.push(queued(1, arrival=now, deadline=now + timeout_s))
        dispatched = queue.pop(now)
        assert dispatched is not None
        if dispatched.item == 0:
            break
    assert now <= 31.0 + earlier_requests  # behind the requests of half a minute, one per second


@given(
    st.sampled_from([1, 2]),
    st.floats(0.5, 3600.0),
    st.integers(4, 200),
    st.integers(0, 7),
)
def test_request_of_a_lower_tier_is_served_before_its_wait_ends(
    tier: int, max_wait_s: float, turns: int, earlier_turns: int
) -> None:
    """Requests of the highest tier always wait, and `turns` slots become free within the longest wait."""
    assert promote_after_s(tier, max_wait_s) <= max_wait_s / 2
    queue = DispatchQueue[NumberedRequest](max_wait_s)
    for turn in range(-earlier_turns, turns + 1):
        now = max_wait_s * turn / turns
        queue.push(queued(tier=0, tenant="flood", arrival=now))
        if turn == 0:
            queue.push(queued(1, tier=tier, tenant="patient", arrival=now))
        dispatched = queue.pop(now)
        assert dispatched is not None
        if dispatched.item == 1:
            break
    assert now < max_wait_s


@given(st.floats(1.0, 59.0))
def test_urgent_deadlines_do_not_outlast_a_short_wait(max_wait_s: float) -> None:
    queue = DispatchQueue[NumberedRequest](max_wait_s)
    queue.push(queued())
    for turn in range(1, 9):
        now = max_wait_s * turn / 8
        queue.push(queued(1, arrival=now, deadline=now + max_wait_s / 8))
        dispatched = queue.pop(now)
        assert dispatched is not None
        if dispatched.item == 0:
            break
    assert now < max_wait_s


# --- virtual token counters -----------------------------------------------------------------------


def test_debts_of_idle_tenants_survive_many_busy_tenants() -> None:
    counters = VirtualTokenCounters(max_idle_tenants=10)
    for number in range(4):
        counter = counters.add_request(f"idle {number}", 1.0)
        counter.served_tokens += 1000.0
        counters.remove_request(counter)
    busy = [counters.add_request(f"busy {number}", 1.0) for number in range(7)]
    for counter in busy:
        counter.served_tokens = 0.0
    second_request = counters.add_request("busy 0", 1.0)
    counters.remove_request(second_request)
    assert [counters.add_request(f"idle {number}", 1.0).served_tokens for number in range(4)] == [
        1000.0,
        2000.0,
        3000.0,
        4000.0,
    ]
