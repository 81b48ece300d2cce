"""Backpressure: a full replica's concurrency is capped and rises over time. A replica that runs nothing is paused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import Backpressure
from argosy.policy.backpressure import MAX_RETRY_AFTER_S


def pause_s(backpressure: Backpressure, now: float) -> float:
    """Return the seconds without a request, rounded up to an eighth."""
    eighths = next(n for n in range(1000) if backpressure.concurrency_limit(now + n / 8))
    assert backpressure.is_backing_off(now) == (eighths > 0)
    return eighths / 8


def test_replica_without_rejections_has_no_cap() -> None:
    assert Backpressure().concurrency_limit(0.0) == math.inf
    assert not Backpressure().is_backing_off(0.0)


def test_rejection_caps_concurrency_at_running_count_and_cap_rises_over_time() -> None:
    backpressure = Backpressure()
    for running in (9, 8, 7, 4):  # all requests of one burst are rejected
        backpressure.on_rejected(running, 10.0)
    assert not backpressure.is_backing_off(10.0)
    assert [backpressure.concurrency_limit(now) for now in (10.0, 11.0, 14.0)] == [4.0, 6.0, 24.0]
    backpressure.on_rejected(100, 20.0)
    assert backpressure.concurrency_limit(35.0) == 340.0


@pytest.mark.parametrize("retry_after_s", [None, 0.0, 0.1])
def test_repeated_rejections_while_idle_double_the_pause(retry_after_s: float | None) -> None:
    backpressure, pauses, now = Backpressure(), [], 0.0
    for number in range(7):
        for _ in range(5):  # all requests in flight are rejected
            backpressure.on_rejected(0, now, retry_after_s)
        pauses.append(pause_s(backpressure, now))
        now += pauses[-1]
        assert backpressure.concurrency_limit(now) == 1.0
        if number == 5:
            backpressure.on_accepted()
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 0.5]
    for _ in range(1100):
        backpressure.on_rejected(0, now, retry_after_s)
        now += 4.0
    assert backpressure.concurrency_limit(now) == 1.0


@given(running=st.integers(0, 300), retry_after_s=st.floats(0.0, 1e300), now=st.floats(0.0, 1e6))
def test_retry_after_sets_the_pause_within_its_maximum(
    running: int, retry_after_s: float, now: float
) -> None:
    backpressure = Backpressure()
    backpressure.on_rejected(running, now, retry_after_s)
    pause = pause_s(backpressure, now)
    assert min(retry_after_s, MAX_RETRY_AFTER_S) <= pause <= MAX_RETRY_AFTER_S
    assert backpressure.concurrency_limit(now + pause) < max(1, running) + 0.15
    assert backpressure.concurrency_limit(now + pause + 1.0) > max(1, running) + 1
    backpressure.on_rejected(3, now)  # sent before the replica asked for the pause
    assert pause_s(backpressure, now) == pause


def test_retry_after_is_reported_only_during_the_pause() -> None:
    backpressure = Backpressure()
    assert backpressure.retry_after_s(0.0) == 0.0
    backpressure.on_rejected(0, 0.0, 1000.0)
    assert [backpressure.retry_after_s(now) for now in (0.0, 40.0, MAX_RETRY_AFTER_S)] == [
        1000.0,
        960.0,
        0.0,
    ]
    backpressure.on_rejected(0, 70.0)  # without Retry-After
    assert backpressure.retry_after_s(70.0) == 0.0
