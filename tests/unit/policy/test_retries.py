"""The retry budget holds whatever comes, and waits lie where the formula says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import RetryBudget, backoff_s


@given(st.lists(st.booleans(), max_size=300))
def test_retries_never_exceed_the_share_and_the_reserve(tries: list[bool]) -> None:
    budget, requests, retries = RetryBudget(share=0.1, reserve=5.0), 0, 0
    for retry in tries:
        if retry:
            retries += budget.take(0.0)
        else:
            budget.request(0.0)
            requests += 1
        assert retries <= 5 + 0.1 * requests


def test_the_budget_comes_back_with_time() -> None:
    budget = RetryBudget()
    assert sum(budget.take(0.0) for _ in range(100)) == 5
    assert budget.take(100.0)


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_is_bounded_and_grows(attempt: int, draw: float) -> None:
    assert 0.0 <= backoff_s(attempt, draw) <= 5.0
    assert backoff_s(attempt, draw) <= backoff_s(attempt + 1, draw)
