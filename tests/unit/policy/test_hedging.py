"""Hedged requests stay within their budget and start only where slots are free."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import Hedging
from argosy.policy.retries import HEDGE_RATIO, HEDGE_RESERVE, MIN_FREE_FRACTION

SLOTS = 40


def try_acquire_with_room(hedging: Hedging, now: float = 0.0) -> bool:
    """Request a hedge while every slot is free."""
    return hedging.try_acquire(now, queued=0, free_slots=SLOTS, total_slots=SLOTS, saturation=0.0)


@given(st.lists(st.booleans(), max_size=300))
def test_hedges_never_exceed_ratio_and_reserve(events: list[bool]) -> None:
    hedging, requests, hedges = Hedging(1.0), 0, 0
    for is_hedge in events:
        if is_hedge:
            hedges += try_acquire_with_room(hedging)
        else:
            hedging.record_request(0.0)
            requests += 1
        assert hedges <= HEDGE_RESERVE + HEDGE_RATIO * requests


@given(
    st.integers(0, 3),
    st.integers(0, SLOTS),
    st.sampled_from((0.0, 0.01, 1.0)),
)
def test_hedge_needs_free_slots_and_rejection_spends_no_budget(
    queued: int, free: int, saturation: float
) -> None:
    hedging = Hedging(1.0)
    is_room_free = queued == 0 and saturation == 0.0 and free >= MIN_FREE_FRACTION * SLOTS
    acquired = hedging.try_acquire(
        0.0, queued=queued, free_slots=free, total_slots=SLOTS, saturation=saturation
    )
    assert acquired == is_room_free
    assert sum(try_acquire_with_room(hedging) for _ in range(5)) == HEDGE_RESERVE - is_room_free


@given(st.floats(0.01, 1e6))
def test_pool_without_slots_gets_no_hedge(now: float) -> None:
    assert not Hedging(1.0).try_acquire(now, queued=0, free_slots=0, total_slots=0, saturation=0.0)


def test_budget_recovers_over_time() -> None:
    hedging = Hedging(1.0)
    assert [try_acquire_with_room(hedging, now) for now in (0.0, 0.0, 1.0, 1000.0)] == [
        True,
        True,
        False,
        True,
    ]


def test_default_ratio_is_one_in_twenty_with_a_quarter_of_slots_free() -> None:
    hedging = Hedging(1.0)
    for _ in range(100):
        hedging.record_request(0.0)
    acquired = [
        hedging.try_acquire(0.0, queued=0, free_slots=1, total_slots=slots, saturation=0.0)
        for slots in (*[4] * 7, 5, 4)
    ]
    assert acquired == [*[True] * 7, False, False]
