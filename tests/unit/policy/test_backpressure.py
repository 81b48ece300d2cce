"""What a replica gets that is full: what it has, and slowly more; a pause where it has nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import Backpressure
from argosy.policy.backpressure import COOL_MOST_S


def wait_s(full: Backpressure, now: float) -> float:
    """For how long it gets nothing, to an eighth of a second, rounded up."""
    eighths = next(n for n in range(1000) if full.most(now + n / 8))
    assert full.cooling(now) == (eighths > 0)
    return eighths / 8


def test_one_that_never_refused_gets_whatever_there_is() -> None:
    assert Backpressure().most(0.0) == math.inf
    assert not Backpressure().cooling(0.0)


def test_a_refusal_tells_how_many_it_takes_and_time_that_it_may_be_more_now() -> None:
    full = Backpressure()
    for running in (9, 8, 7, 4):  # all that were sent at once come back
        full.refused(running, 10.0)
    assert not full.cooling(10.0)
    assert [full.most(now) for now in (10.0, 11.0, 14.0)] == [4.0, 6.0, 24.0]
    full.refused(100, 20.0)
    assert full.most(35.0) == 340.0


@pytest.mark.parametrize("told", [None, 0.0, 0.1])
def test_one_that_takes_nothing_at_all_is_asked_less_and_less(told: float | None) -> None:
    full, waits, now = Backpressure(), [], 0.0
    for number in range(7):
        for _ in range(5):  # all that were under way
            full.refused(0, now, told)
        waits.append(wait_s(full, now))
        now += waits[-1]
        assert full.most(now) == 1.0
        if number == 5:
            full.answered()
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 0.5]
    for _ in range(1100):
        full.refused(0, now, told)
        now += 4.0
    assert full.most(now) == 1.0


@given(running=st.integers(0, 300), told=st.floats(0.0, 1e300), now=st.floats(0.0, 1e6))
def test_it_is_left_alone_for_as_long_as_it_says_within_reason(
    running: int, told: float, now: float
) -> None:
    full = Backpressure()
    full.refused(running, now, told)
    wait = wait_s(full, now)
    assert min(told, COOL_MOST_S) <= wait <= COOL_MOST_S
    assert full.most(now + wait) < max(1, running) + 0.15
    assert full.most(now + wait + 1.0) > max(1, running) + 1
    full.refused(3, now)  # that was sent before it said so
    assert wait_s(full, now) == wait


def test_one_that_says_for_how_long_it_is_full_is_believed_while_it_is_left_alone() -> None:
    full = Backpressure()
    assert full.full_s(0.0) == 0.0
    full.refused(0, 0.0, 1000.0)
    assert [full.full_s(now) for now in (0.0, 40.0, COOL_MOST_S)] == [1000.0, 960.0, 0.0]
    full.refused(0, 70.0)  # it did not say this time
    assert full.full_s(70.0) == 0.0
