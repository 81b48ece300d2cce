"""Breakers: what opens them, what does not, and that a pool never loses more than half of itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import AttemptOutcome, Breaker, BreakerLimits, classify_status, eligible_replicas


def test_a_refusal_that_is_the_requests_own_fault_counts_as_success() -> None:
    assert (
        classify_status(200)
        is classify_status(400)
        is classify_status(404)
        is AttemptOutcome.SUCCESS
    )
    assert classify_status(429) is classify_status(503) is AttemptOutcome.BACKPRESSURE
    assert classify_status(500) is classify_status(502) is AttemptOutcome.FAILURE
    assert (
        classify_status(401)
        is classify_status(402)
        is classify_status(424)
        is AttemptOutcome.FAILURE
    )
    assert (
        classify_status(204)
        is classify_status(301)
        is classify_status(307)
        is AttemptOutcome.FAILURE
    )


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(3):
        breaker.record_outcome(AttemptOutcome.FAILURE, now)
    assert not breaker.is_closed
    return breaker


def test_failures_in_a_row_open_it_and_backpressure_never_does() -> None:
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


def test_a_high_share_of_failures_opens_it_without_a_row() -> None:
    for each, closed in ((3, True), (2, False)):
        breaker = Breaker(BreakerLimits(sample_size=10))
        for number in range(60):
            breaker.record_outcome(
                AttemptOutcome.SUCCESS if number % each else AttemptOutcome.FAILURE, 0.0
            )
        assert breaker.is_closed == closed


def test_one_probe_at_a_time_decides_and_each_failed_one_doubles_the_wait() -> None:
    breaker, waits, now = opened(), [], 0.0
    for _ in range(1100):
        assert breaker.open_until is not None
        waits.append(breaker.open_until - now)
        assert not breaker.is_probe_due(breaker.open_until - 0.1)
        now = breaker.open_until
        assert breaker.is_probe_due(now)
        breaker.on_probe_sent()
        assert not breaker.is_probe_due(now)
        breaker.record_probe_outcome(AttemptOutcome.FAILURE, now)
    assert waits == [2.0, 4.0, 8.0, *[10.0] * 1097]
    assert breaker.open_until is not None
    breaker.on_probe_sent()
    breaker.record_probe_outcome(AttemptOutcome.BACKPRESSURE, breaker.open_until)
    assert breaker.is_closed


def test_one_that_is_never_well_for_long_is_left_alone_for_longer() -> None:
    breaker, waits, now = Breaker(), [], 100.0
    for well_s in (1.0, 1.0, 1.0, 1.0, 60.0, 1.0):
        for _ in range(3):
            breaker.record_outcome(AttemptOutcome.FAILURE, now)
        assert breaker.open_until is not None
        waits.append(breaker.open_until - now)
        now = breaker.open_until
        breaker.on_probe_sent()
        breaker.record_probe_outcome(AttemptOutcome.SUCCESS, now)
        assert breaker.is_closed
        now += well_s
    assert waits == [2.0, 4.0, 8.0, 10.0, 10.0, 2.0]


def test_what_failed_before_it_closed_is_forgotten() -> None:
    breaker = Breaker(BreakerLimits(sample_size=4))
    for outcome in (
        AttemptOutcome.FAILURE,
        AttemptOutcome.SUCCESS,
        AttemptOutcome.FAILURE,
        AttemptOutcome.FAILURE,
    ):
        breaker.record_outcome(outcome, 0.0)
    assert not breaker.is_closed
    breaker.on_probe_sent()
    breaker.record_probe_outcome(AttemptOutcome.SUCCESS, 2.0)
    for _ in range(2):
        breaker.record_outcome(AttemptOutcome.FAILURE, 2.1)
    assert breaker.is_closed


def test_what_began_before_it_opened_neither_closes_nor_prolongs_it() -> None:
    breaker = opened()
    until = breaker.open_until
    breaker.record_outcome(AttemptOutcome.FAILURE, 0.1)
    breaker.record_outcome(AttemptOutcome.SUCCESS, 0.1)
    for _ in range(30):
        breaker.record_outcome(AttemptOutcome.FAILURE, 0.2)
    assert breaker.open_until == until
    breaker.on_probe_sent()
    breaker.record_outcome(AttemptOutcome.SUCCESS, 2.1)
    breaker.record_outcome(AttemptOutcome.FAILURE, 2.2)
    assert breaker.open_until == until
    breaker.record_probe_outcome(AttemptOutcome.SUCCESS, 2.3)
    assert breaker.is_closed


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_at_least_half_of_a_pool_stays_in_use(broken: list[bool]) -> None:
    pool = {}
    for number, is_broken in enumerate(broken):
        pool[str(number)] = opened(float(-number)) if is_broken else Breaker()
    closed = [name for name, breaker in pool.items() if breaker.is_closed]
    soonest = [name for name in reversed(pool) if name not in closed]
    assert (
        eligible_replicas(pool)
        == closed + soonest[: max(0, len(pool) - len(pool) // 2 - len(closed))]
    )
