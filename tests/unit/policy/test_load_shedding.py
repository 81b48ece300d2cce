"""Shedding: lower tiers first, everybody at the end, nobody while there is room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import ReplicaLoad, is_tenant_within_share, is_tier_admitted, saturation

SHARE = st.floats(0, 2)


def load(waiting: int = 0, capacity: int = 8, kv_used: float = 0.0) -> ReplicaLoad:
    known = ReplicaLoad("r")
    known.waiting, known.max_seqs, known.kv_usage_ratio = waiting, capacity, kv_used
    return known


@given(SHARE)
def test_a_higher_tier_is_never_refused_where_a_lower_one_is_let_in(oldest: float) -> None:
    saturated = saturation(oldest, [])
    allowed = [is_tier_admitted(tier, saturated) for tier in range(3)]
    assert allowed == sorted(allowed, reverse=True)
    assert any(allowed) == (oldest < 1)


def test_an_idle_queue_takes_everybody() -> None:
    assert all(is_tier_admitted(tier, saturation(0.0, [load()])) for tier in range(3))
    assert all(is_tenant_within_share(tier, 0, 0, 1) for tier in range(3))


def test_free_goes_first_then_standard() -> None:
    assert [is_tier_admitted(tier, 0.6) for tier in range(3)] == [True, True, False]
    assert [is_tier_admitted(tier, 0.8) for tier in range(3)] == [True, False, False]
    assert [is_tenant_within_share(tier, 0, 60, 100) for tier in range(3)] == [True, True, False]
    assert [is_tenant_within_share(tier, 0, 80, 100) for tier in range(3)] == [True, False, False]


def test_replicas_count_by_the_least_pressed() -> None:
    full = load(waiting=8)
    assert saturation(0.1, [full]) == 1.0
    assert saturation(0.1, [full, load()]) == 0.1
    assert saturation(0.1, [load(waiting=800)]) == 1.0


def test_what_gateways_sent_beyond_the_seats_keeps_nobody_out() -> None:
    crowded = load(waiting=8)
    for over, saturated in ((0, 1.0), (6, 0.25), (9, 0.0)):
        crowded.oversubscribed = over
        assert saturation(0.0, [crowded]) == saturated


def test_a_full_cache_counts_only_while_something_waits_for_it() -> None:
    assert saturation(0.0, [load(kv_used=1.0)]) == 0.0
    assert saturation(0.0, [load(waiting=1, kv_used=0.95)]) > 0.4


@given(st.integers(1, 6), st.integers(200, 2000), st.integers(0, 2))
def test_however_many_flood_there_is_room_for_who_has_nothing_waiting(
    floods: int, most: int, tier: int
) -> None:
    waiting = [0] * floods
    for _ in range(most):
        for tenant in range(floods):
            waiting[tenant] += is_tenant_within_share(tier, waiting[tenant], sum(waiting), most)
    assert is_tenant_within_share(tier, 0, sum(waiting), most)
    assert sum(waiting) >= (0.5, 0.35, 0.2)[tier] * most
    assert max(waiting) - min(waiting) <= 1 + max(waiting) // 5
