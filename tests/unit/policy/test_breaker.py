"""Breakers: what opens them, what does not, and that a pool never loses more than half of itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import Breaker, BreakerLimits, Outcome, classify, usable


def test_a_refusal_that_is_the_requests_own_fault_counts_as_success() -> None:
    assert classify(200) is classify(400) is classify(404) is Outcome.SUCCESS
    assert classify(429) is classify(503) is Outcome.BACKPRESSURE
    assert classify(500) is classify(502) is Outcome.FAILURE
    assert classify(401) is classify(402) is classify(424) is Outcome.FAILURE
    assert classify(204) is classify(301) is classify(307) is Outcome.FAILURE


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(3):
        breaker.record(Outcome.FAILURE, now)
    assert not breaker.closed
    return breaker


def test_failures_in_a_row_open_it_and_backpressure_never_does() -> None:
    breaker = Breaker()
    for outcome in (*[Outcome.BACKPRESSURE] * 100, *[Outcome.FAILURE] * 2, Outcome.SUCCESS):
        breaker.record(outcome, 0.0)
    for _ in range(2):
        breaker.record(Outcome.FAILURE, 0.0)
    assert breaker.closed
    assert not breaker.wants_probe(1000.0)
    breaker.record(Outcome.FAILURE, 0.0)
    assert not breaker.closed


def test_a_high_share_of_failures_opens_it_without_a_row() -> None:
    for each, closed in ((3, True), (2, False)):
        breaker = Breaker(BreakerLimits(sample=10))
        for number in range(60):
            breaker.record(Outcome.SUCCESS if number % each else Outcome.FAILURE, 0.0)
        assert breaker.closed == closed


def test_one_probe_at_a_time_decides_and_each_failed_one_doubles_the_wait() -> None:
    breaker, waits, now = opened(), [], 0.0
    for _ in range(1100):
        assert breaker.open_until is not None
        waits.append(breaker.open_until - now)
        assert not breaker.wants_probe(breaker.open_until - 0.1)
        now = breaker.open_until
        assert breaker.wants_probe(now)
        breaker.probe_sent()
        assert not breaker.wants_probe(now)
        breaker.probed(Outcome.FAILURE, now)
    assert waits == [2.0, 4.0, 8.0, *[10.0] * 1097]
    assert breaker.open_until is not None
    breaker.probe_sent()
    breaker.probed(Outcome.BACKPRESSURE, breaker.open_until)
    assert breaker.closed


def test_one_that_is_never_well_for_long_is_left_alone_for_longer() -> None:
    breaker, waits, now = Breaker(), [], 100.0
    for well_s in (1.0, 1.0, 1.0, 1.0, 60.0, 1.0):
        for _ in range(3):
            breaker.record(Outcome.FAILURE, now)
        assert breaker.open_until is not None
        waits.append(breaker.open_until - now)
        now = breaker.open_until
        breaker.probe_sent()
        breaker.probed(Outcome.SUCCESS, now)
        assert breaker.closed
        now += well_s
    assert waits == [2.0, 4.0, 8.0, 10.0, 10.0, 2.0]


def test_what_failed_before_it_closed_is_forgotten() -> None:
    breaker = Breaker(BreakerLimits(sample=4))
    for outcome in (Outcome.FAILURE, Outcome.SUCCESS, Outcome.FAILURE, Outcome.FAILURE):
        breaker.record(outcome, 0.0)
    assert not breaker.closed
    breaker.probe_sent()
    breaker.probed(Outcome.SUCCESS, 2.0)
    for _ in range(2):
        breaker.record(Outcome.FAILURE, 2.1)
    assert breaker.closed


def test_what_began_before_it_opened_neither_closes_nor_prolongs_it() -> None:
    breaker = opened()
    until = breaker.open_until
    breaker.record(Outcome.FAILURE, 0.1)
    breaker.record(Outcome.SUCCESS, 0.1)
    for _ in range(30):
        breaker.record(Outcome.FAILURE, 0.2)
    assert breaker.open_until == until
    breaker.probe_sent()
    breaker.record(Outcome.SUCCESS, 2.1)
    breaker.record(Outcome.FAILURE, 2.2)
    assert breaker.open_until == until
    breaker.probed(Outcome.SUCCESS, 2.3)
    assert breaker.closed


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_at_least_half_of_a_pool_stays_in_use(broken: list[bool]) -> None:
    pool = {}
    for number, is_broken in enumerate(broken):
        pool[str(number)] = opened(float(-number)) if is_broken else Breaker()
    closed = [name for name, breaker in pool.items() if breaker.closed]
    soonest = [name for name in reversed(pool) if name not in closed]
    assert usable(pool) == closed + soonest[: max(0, len(pool) - len(pool) // 2 - len(closed))]
