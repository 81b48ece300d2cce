"""Limits of further attempts: retries and hedges stay within their budgets, and quarantine ends and is bounded."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import Hedging, PoisonRequestTracker, RetryBudget, backoff_s
from argosy.policy.retries import (
    HEDGE_RATIO,
    HEDGE_RESERVE,
    MAX_QUARANTINED,
    MIN_FREE_FRACTION,
    QUARANTINE_S,
    REJECTION_S,
)


@given(st.lists(st.tuples(st.booleans(), st.just(0.0) | st.floats(0.0, 20.0)), max_size=200))
def test_retries_never_exceed_ratio_and_reserve_that_refills_by_its_half_life(
    attempts: list[tuple[bool, float]],
) -> None:
    budget, requests, retries, now = RetryBudget(), 0, 0, 1000.0
    for is_retry, pause in attempts:
        now += pause
        if is_retry:
            retries += budget.try_acquire(now)
        else:
            budget.record_request(now)
            requests += 1
        reserve = 5.0 * (1.0 + (now - 1000.0) * math.log(2) / 10.0)
        assert retries <= 0.1 * requests + reserve + 1e-6


def test_budget_refills_by_half_life() -> None:
    budget = RetryBudget()
    for _ in range(100):
        budget.record_request(0.0)
    assert sum(budget.try_acquire(0.0) for _ in range(100)) == 5 + 10
    for now, expected in (
        (10.0, 2),
        (20.0, 2),
        (2000.0, 5),
    ):  # each half-life halves recorded requests and retries
        assert sum(budget.try_acquire(now) for _ in range(100)) == expected


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_is_bounded_and_grows(attempt: int, draw: float) -> None:
    assert 0.0 <= backoff_s(attempt, draw) <= 5.0
    assert backoff_s(attempt, draw) <= backoff_s(attempt + 1, draw)
    assert [backoff_s(n, 0.5) for n in range(1, 8)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.5]


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


def test_quarantined_request_is_rejected_then_retried_then_forgotten() -> None:
    tracker = PoisonRequestTracker()
    assert tracker.retry_after_s(b"a", 0.0) == 0.0
    tracker.quarantine(b"a", 10.0)
    assert tracker.retry_after_s(b"a", 10.0) == REJECTION_S
    assert tracker.retry_after_s(b"b", 10.0) == 0.0
    assert tracker.retry_after_s(b"a", 10.0 + REJECTION_S) == 0.0
    assert tracker.is_quarantined(b"a", 9.9 + QUARANTINE_S)
    assert not tracker.is_quarantined(b"a", 10.0 + QUARANTINE_S)
    assert not len(tracker)


def test_second_crash_renews_quarantine_and_success_clears_it() -> None:
    tracker = PoisonRequestTracker()
    tracker.quarantine(b"a", 0.0)
    tracker.quarantine(b"b", 1.0)
    tracker.quarantine(b"a", 50.0)
    assert tracker.retry_after_s(b"a", 51.0) == REJECTION_S - 1.0
    assert tracker.is_quarantined(b"a", 70.0)
    assert not tracker.is_quarantined(b"b", 70.0)
    tracker.clear(b"a")
    assert not tracker.is_quarantined(b"a", 70.0)
    tracker.clear(b"a")


def test_oldest_quarantined_request_is_dropped_at_capacity() -> None:
    tracker = PoisonRequestTracker()
    for number in range(MAX_QUARANTINED + 10):
        tracker.quarantine(b"%d" % number, 0.0)
    assert len(tracker) == MAX_QUARANTINED
    assert not tracker.is_quarantined(b"9", 0.0)
    assert tracker.is_quarantined(b"10", 0.0)
