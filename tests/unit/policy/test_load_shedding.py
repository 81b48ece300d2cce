"""Load shedding: lower tiers are rejected first, all tiers at full saturation, none while slots are free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import ReplicaLoad, is_tenant_within_share, is_tier_admitted, saturation

SHARE = st.floats(0, 2)


def load(waiting: int = 0, capacity: int = 8, kv_used: float = 0.0) -> ReplicaLoad:
    known = ReplicaLoad("r")
    known.waiting, known.max_seqs, known.kv_usage_ratio = waiting, capacity, kv_used
    return known


@given(SHARE)
def test_admission_never_prefers_a_lower_tier(oldest_wait: float) -> None:
    current = saturation(oldest_wait, [])
    allowed = [is_tier_admitted(tier, current) for tier in range(3)]
    assert allowed == sorted(allowed, reverse=True)
    assert any(allowed) == (oldest_wait < 1)


def test_idle_queue_admits_all_tiers() -> None:
    assert all(is_tier_admitted(tier, saturation(0.0, [load()])) for tier in range(3))
    assert all(is_tenant_within_share(tier, 0, 0, 1) for tier in range(3))


def test_free_tier_is_shed_first_then_standard() -> None:
    assert [is_tier_admitted(tier, 0.6) for tier in range(3)] == [True, True, False]
    assert [is_tier_admitted(tier, 0.8) for tier in range(3)] == [True, False, False]
    assert [is_tenant_within_share(tier, 0, 60, 100) for tier in range(3)] == [True, True, False]
    assert [is_tenant_within_share(tier, 0, 80, 100) for tier in range(3)] == [True, False, False]


def test_saturation_is_that_of_the_least_loaded_replica() -> None:
    full = load(waiting=8)
    assert saturation(0.1, [full]) == 1.0
    assert saturation(0.1, [full, load()]) == 0.1
    assert saturation(0.1, [load(waiting=800)]) == 1.0


def test_oversubscribed_requests_lower_the_saturation() -> None:
    crowded = load(waiting=8)
    for over, expected in ((0, 1.0), (6, 0.25), (9, 0.0)):
        crowded.oversubscribed = over
        assert saturation(0.0, [crowded]) == expected


def test_full_kv_cache_counts_only_while_requests_wait() -> None:
    assert saturation(0.0, [load(kv_used=1.0)]) == 0.0
    assert saturation(0.0, [load(waiting=1, kv_used=0.95)]) > 0.4


@given(
    st.lists(st.tuples(st.integers(1, 600), st.integers(1, 10_000)), min_size=1, max_size=6),
    st.integers(0, 300),
    st.integers(1, 64),
    st.floats(0, 1),
)
def test_pressure_on_a_replica_counts_against_those_who_cause_it(
    demands: list[tuple[int, int]], unknown: int, capacity: int, kv_used: float
) -> None:
    """A tenant sees no more than all together, the more the more it has there, and all if no other has more."""
    names = [f"t{number}" for number in range(len(demands))]
    known = load(0, capacity, kv_used)
    known.demand_by_tenant = {
        name: (count, count * tokens) for name, (count, tokens) in zip(names, demands, strict=True)
    }
    total = sum(count for count, _ in demands) + unknown
    known.running = min(capacity, total)
    known.waiting = total - known.running
    everything = saturation(0.0, [known])
    seen = {name: saturation(0.0, [known], name) for name in ("new", *names)}
    assert all(0.0 <= pressure <= everything for pressure in seen.values())
    assert seen["new"] <= min(seen.values())
    largest = max(names, key=known.demand_by_tenant.__getitem__)
    if (
        all(
            one >= each
            for demand in (*known.demand_by_tenant.values(), (unknown, 0))
            for one, each in zip(known.demand_by_tenant[largest], demand, strict=True)
        )
        and not unknown
    ):
        assert seen[largest] == pytest.approx(everything)
    if len(demands) == 1 and not unknown:
        assert is_tier_admitted(2, seen["new"])


@given(st.integers(1, 6), st.integers(200, 2000), st.integers(0, 2))
def test_tenant_without_queued_requests_is_admitted_during_a_flood(
    flooding_tenants: int, capacity: int, tier: int
) -> None:
    waiting = [0] * flooding_tenants
    for _ in range(capacity):
        for tenant in range(flooding_tenants):
            waiting[tenant] += is_tenant_within_share(tier, waiting[tenant], sum(waiting), capacity)
    assert is_tenant_within_share(tier, 0, sum(waiting), capacity)
    assert sum(waiting) >= (0.5, 0.35, 0.2)[tier] * capacity
    assert max(waiting) - min(waiting) <= 1 + max(waiting) // 5
