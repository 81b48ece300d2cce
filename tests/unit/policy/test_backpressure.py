"""What a replica gets that is full: what it has, and slowly more; a pause where it has nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import Backpressure
from argosy.policy.backpressure import MAX_RETRY_AFTER_S


def wait_s(full: Backpressure, now: float) -> float:
    """For how long it gets nothing, to an eighth of a second, rounded up."""
    eighths = next(n for n in range(1000) if full.concurrency_limit(now + n / 8))
    assert full.is_backing_off(now) == (eighths > 0)
    return eighths / 8


def test_one_that_never_refused_gets_whatever_there_is() -> None:
    assert Backpressure().concurrency_limit(0.0) == math.inf
    assert not Backpressure().is_backing_off(0.0)


def test_a_refusal_tells_how_many_it_takes_and_time_that_it_may_be_more_now() -> None:
    full = Backpressure()
    for running in (9, 8, 7, 4):  # all that were sent at once come back
        full.on_rejected(running, 10.0)
    assert not full.is_backing_off(10.0)
    assert [full.concurrency_limit(now) for now in (10.0, 11.0, 14.0)] == [4.0, 6.0, 24.0]
    full.on_rejected(100, 20.0)
    assert full.concurrency_limit(35.0) == 340.0


@pytest.mark.parametrize("told", [None, 0.0, 0.1])
def test_one_that_takes_nothing_at_all_is_asked_less_and_less(told: float | None) -> None:
    full, waits, now = Backpressure(), [], 0.0
    for number in range(7):
        for _ in range(5):  # all that were under way
            full.on_rejected(0, now, told)
        waits.append(wait_s(full, now))
        now += waits[-1]
        assert full.concurrency_limit(now) == 1.0
        if number == 5:
            full.on_accepted()
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 0.5]
    for _ in range(1100):
        full.on_rejected(0, now, told)
        now += 4.0
    assert full.concurrency_limit(now) == 1.0


@given(running=st.integers(0, 300), told=st.floats(0.0, 1e300), now=st.floats(0.0, 1e6))
def test_it_is_left_alone_for_as_long_as_it_says_within_reason(
    running: int, told: float, now: float
) -> None:
    full = Backpressure()
    full.on_rejected(running, now, told)
    wait = wait_s(full, now)
    assert min(told, MAX_RETRY_AFTER_S) <= wait <= MAX_RETRY_AFTER_S
    assert full.concurrency_limit(now + wait) < max(1, running) + 0.15
    assert full.concurrency_limit(now + wait + 1.0) > max(1, running) + 1
    full.on_rejected(3, now)  # that was sent before it said so
    assert wait_s(full, now) == wait


def test_one_that_says_for_how_long_it_is_full_is_believed_while_it_is_left_alone() -> None:
    full = Backpressure()
    assert full.retry_after_s(0.0) == 0.0
    full.on_rejected(0, 0.0, 1000.0)
    assert [full.retry_after_s(now) for now in (0.0, 40.0, MAX_RETRY_AFTER_S)] == [
        1000.0,
        960.0,
        0.0,
    ]
    full.on_rejected(0, 70.0)  # it did not say this time
    assert full.retry_after_s(70.0) == 0.0
