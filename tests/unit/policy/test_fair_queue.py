"""Dispatch queue: no request is lost or starved, tiers keep their order, and tenants share tokens within a bound."""

from __future__ import annotations

import math
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.queued_requests import NumberedRequest, queued

from argosy.policy import PROMOTION_INTERVAL, QUANTUM_TOKENS, DispatchQueue, TenantBacklog


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


def test_idle_tenant_accumulates_no_credit() -> None:
    queue = DispatchQueue[NumberedRequest]()
    queue.push(queued(tenant="away", cost=1000.0))
    for _ in range(300):
        queue.push(queued(tenant="stays", cost=1000.0))
    for _ in range(200):
        queue.pop(0.0)
    for _ in range(100):
        queue.push(queued(tenant="away", cost=1000.0))
    tenants = [request.tenant for request in (queue.pop(0.0) for _ in range(20)) if request]
    assert 8 <= tenants.count("stays") <= 12


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
