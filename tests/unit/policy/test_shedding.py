"""Shedding: lower tiers first, everybody at the end, nobody while there is room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import ReplicaLoad, admits, saturation

SHARE = st.floats(0, 2)


def load(waiting: int = 0, capacity: int = 8, kv_used: float = 0.0) -> ReplicaLoad:
    known = ReplicaLoad("r")
    known.waiting, known.capacity, known.kv_used = waiting, capacity, kv_used
    return known


@given(SHARE, SHARE)
def test_a_higher_tier_is_never_refused_where_a_lower_one_is_let_in(
    waiting: float, oldest: float
) -> None:
    saturated = saturation(waiting, oldest, [])
    allowed = [admits(tier, saturated) for tier in range(3)]
    assert allowed == sorted(allowed, reverse=True)
    assert any(allowed) == (max(waiting, oldest) < 1)


def test_an_idle_queue_takes_everybody() -> None:
    assert all(admits(tier, saturation(0.0, 0.0, [load()])) for tier in range(3))


def test_free_goes_first_then_standard() -> None:
    assert [admits(tier, 0.6) for tier in range(3)] == [True, True, False]
    assert [admits(tier, 0.8) for tier in range(3)] == [True, False, False]


def test_replicas_count_by_the_least_pressed() -> None:
    full = load(waiting=8)
    assert saturation(0.1, 0.0, [full]) == 1.0
    assert saturation(0.1, 0.0, [full, load()]) == 0.1


def test_a_full_cache_counts_only_while_something_waits_for_it() -> None:
    assert saturation(0.0, 0.0, [load(kv_used=1.0)]) == 0.0
    assert saturation(0.0, 0.0, [load(waiting=1, kv_used=0.95)]) > 0.4
