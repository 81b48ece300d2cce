"""Circuit breaker: conditions that open it, probes that close it, and the share of a pool that stays eligible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import AttemptOutcome, Breaker, BreakerLimits, classify_status, eligible_replicas


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ((200, 400, 404), AttemptOutcome.SUCCESS),  # the client's own mistakes count as success
        ((429, 503), AttemptOutcome.BACKPRESSURE),
        ((500, 502, 401, 402, 424, 204, 301, 307), AttemptOutcome.FAILURE),
    ],
    ids=lambda value: value.name if isinstance(value, AttemptOutcome) else "",
)
def test_status_is_classified(statuses: tuple[int, ...], outcome: AttemptOutcome) -> None:
    assert {classify_status(status) for status in statuses} == {outcome}


def open_breaker(now: float = 0.0) -> Breaker:
    """Return a breaker that three failures at `now` have opened."""
    breaker = Breaker()
    for _ in range(3):
        breaker.record_outcome(AttemptOutcome.FAILURE, now)
    assert not breaker.is_closed
    return breaker


def test_consecutive_failures_open_breaker_and_backpressure_does_not() -> None:
    breaker = Breaker()
    for outcome in (
        *[AttemptOutcome.BACKPRESSURE] * 100,
        *[AttemptOutcome.FAILURE] * 2,
        AttemptOutcome.SUCCESS,
    ):
        breaker.record_outcome(outcome, 0.0)
    for _ in range(2):
        breaker.record_outcome(AttemptOutcome.FAILURE, 0.0)
    assert breaker.is_closed
    assert not breaker.is_probe_due(1000.0)
    breaker.record_outcome(AttemptOutcome.FAILURE, 0.0)
    assert not breaker.is_closed


def test_failure_ratio_opens_breaker_without_consecutive_failures() -> None:
    for failure_period, closed in ((3, True), (2, False)):
        breaker = Breaker(BreakerLimits(sample_size=10))
        for number in range(60):
            breaker.record_outcome(
                AttemptOutcome.SUCCESS if number % failure_period else AttemptOutcome.FAILURE, 0.0
            )
        assert breaker.is_closed == closed


def test_failed_probe_doubles_the_open_interval() -> None:
    breaker, intervals, now = open_breaker(), [], 0.0
    for _ in range(1100):
        assert breaker.open_until is not None
        intervals.append(breaker.open_until - now)
        assert not breaker.is_probe_due(breaker.open_until - 0.1)
        now = breaker.open_until
        assert breaker.is_probe_due(now)
        breaker.record_probe_outcome(AttemptOutcome.FAILURE, now)
    assert intervals == [2.0, 4.0, 8.0, *[10.0] * 1097]
    assert breaker.open_until is not None
    breaker.record_probe_outcome(AttemptOutcome.BACKPRESSURE, breaker.open_until)
    assert breaker.is_closed


def test_short_recovery_does_not_reset_the_open_interval() -> None:
    breaker, intervals, now = Breaker(), [], 100.0
    for closed_s in (1.0, 1.0, 1.0, 1.0, 60.0, 1.0):
        for _ in range(3):
            breaker.record_outcome(AttemptOutcome.FAILURE, now)
        assert breaker.open_until is not None
        intervals.append(breaker.open_until - now)
        now = breaker.open_until
        breaker.record_probe_outcome(AttemptOutcome.SUCCESS, now)
        assert breaker.is_closed
        now += closed_s
    assert intervals == [2.0, 4.0, 8.0, 10.0, 10.0, 2.0]


def test_failures_before_closing_do_not_count_afterwards() -> None:
    breaker = Breaker(BreakerLimits(sample_size=4))
    for outcome in (
        AttemptOutcome.FAILURE,
        AttemptOutcome.SUCCESS,
        AttemptOutcome.FAILURE,
        AttemptOutcome.FAILURE,
    ):
        breaker.record_outcome(outcome, 0.0)
    assert not breaker.is_closed
    breaker.record_probe_outcome(AttemptOutcome.SUCCESS, 2.0)
    for _ in range(2):
        breaker.record_outcome(AttemptOutcome.FAILURE, 2.1)
    assert breaker.is_closed


def test_outcomes_of_earlier_requests_do_not_change_an_open_breaker() -> None:
    breaker = open_breaker()
    until = breaker.open_until
    breaker.record_outcome(AttemptOutcome.FAILURE, 0.1)
    breaker.record_outcome(AttemptOutcome.SUCCESS, 0.1)
    for _ in range(30):
        breaker.record_outcome(AttemptOutcome.FAILURE, 0.2)
    assert breaker.open_until == until
    breaker.record_outcome(AttemptOutcome.SUCCESS, 2.1)
    breaker.record_outcome(AttemptOutcome.FAILURE, 2.2)
    assert breaker.open_until == until
    breaker.record_probe_outcome(AttemptOutcome.SUCCESS, 2.3)
    assert breaker.is_closed


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_at_least_half_of_a_pool_stays_eligible(open_flags: list[bool]) -> None:
    pool = {}
    for number, is_open in enumerate(open_flags):
        pool[str(number)] = open_breaker(float(-number)) if is_open else Breaker()
    closed = [name for name, breaker in pool.items() if breaker.is_closed]
    earliest_open = [name for name in reversed(pool) if name not in closed]
    assert (
        eligible_replicas(pool)
        == closed + earliest_open[: max(0, len(pool) - len(pool) // 2 - len(closed))]
    )
