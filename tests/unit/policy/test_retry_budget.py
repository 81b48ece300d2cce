"""Retry budget and backoff: retries stay within their ratio and reserve, and delays follow the formula."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import RetryBudget, backoff_s


@given(st.lists(st.booleans(), max_size=300))
def test_retries_never_exceed_ratio_and_reserve(attempts: list[bool]) -> None:
    budget, requests, retries = RetryBudget(ratio=0.1, reserve=5.0), 0, 0
    for is_retry in attempts:
        if is_retry:
            retries += budget.try_acquire(0.0)
        else:
            budget.record_request(0.0)
            requests += 1
        assert retries <= 5 + 0.1 * requests


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 20.0)), max_size=200))
def test_reserve_refills_no_faster_than_its_half_life(
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
