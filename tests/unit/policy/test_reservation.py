"""Reservations: all limits or none; streams pass a limit by a piece each; in the end what counts is what was used."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import (
    NO_CHARGE,
    ConcurrencyMeter,
    OutputLengthEstimator,
    QuotaLimit,
    QuotaRejection,
    QuotaUsage,
    Rates,
    Reservation,
    SlidingWindow,
    final_usage,
    is_permanent,
    longest_rejection,
    reserve,
    running_usage,
)

UNITS = QuotaUsage.__struct_fields__
RATES = Rates(5, 2, 7)


def tokens(count: int) -> QuotaUsage:
    return running_usage(NO_CHARGE, 0, 0, count)


def done(count: int) -> QuotaUsage:
    return final_usage(0, count, 0)


def meters(most: int, requests: int = 10, places: int = 10) -> list[QuotaLimit]:
    return [
        QuotaLimit("key", "requests", "minute", None, SlidingWindow(requests, 60.0)),
        QuotaLimit("key", "tokens", "minute", None, SlidingWindow(most, 60.0)),
        QuotaLimit("key", "concurrency", "", None, ConcurrencyMeter(places)),
    ]


def used(of: list[QuotaLimit]) -> list[int]:
    return [meter.meter.used for meter in of]


def test_all_limits_are_held_or_none() -> None:
    wide, narrow = meters(1000), meters(50)
    held = reserve([*wide, *narrow], tokens(50), tokens(1), 0.0)
    assert isinstance(held, Reservation)
    assert held.covers_estimate
    held.settle(done(20), 0.0)
    refusals = reserve([*wide, *narrow], tokens(40), tokens(1), 0.0)
    assert isinstance(refusals, list)
    [refusal] = refusals
    assert (refusal.quota_limit, refusal.limit, refusal.used, refusal.requested) == (
        narrow[1],
        50,
        20,
        40,
    )
    assert used(wide) == used(narrow) == [1, 20, 0]


def test_what_was_not_used_comes_back_and_a_request_for_which_nothing_was_done_costs_nothing() -> (
    None
):
    limits = meters(100)
    held = reserve(limits, tokens(80), tokens(1), 0.0)
    assert isinstance(held, Reservation)
    assert isinstance(reserve(limits, tokens(30), tokens(1), 0.0), list)
    held.settle(done(20), 1.0)
    held.settle(done(90), 1.0)
    assert used(limits) == [1, 20, 0]
    other = reserve(limits, tokens(80), tokens(1), 1.0)
    assert isinstance(other, Reservation)
    other.settle(QuotaUsage(), 2.0)
    assert used(limits) == [1, 20, 0]


def test_more_than_the_limit_is_never_let_in_but_what_may_be_less_asks_for_all_of_it() -> None:
    limits = meters(100)
    refusals = reserve(limits, tokens(500), tokens(101), 0.0)
    assert isinstance(refusals, list)
    assert is_permanent(longest_rejection(refusals))
    held = reserve(limits, tokens(500), tokens(1), 0.0)
    assert isinstance(held, Reservation)
    assert used(limits) == [1, 100, 1]
    assert not held.covers_estimate


def test_the_refusal_that_lasts_longest_is_the_one_to_tell() -> None:
    meter = meters(1)[0]
    waits = [3.0, math.inf, 0.0]
    assert is_permanent(longest_rejection([QuotaRejection(meter, 1, 1, 1, wait) for wait in waits]))
    assert (
        longest_rejection([QuotaRejection(meter, 1, 1, 1, wait) for wait in (3.0, 5.0)]).wait_s
        == 5.0
    )


def test_one_at_a_time_means_one_at_a_time() -> None:
    limits = meters(100, places=1)
    held = reserve(limits, tokens(1), tokens(1), 0.0)
    assert isinstance(held, Reservation)
    refusals = reserve(limits, tokens(1), tokens(1), 0.0)
    assert isinstance(refusals, list)
    assert longest_rejection(refusals).quota_limit.unit == "concurrency"
    held.settle(done(1), 0.0)
    assert isinstance(reserve(limits, tokens(1), tokens(1), 0.0), Reservation)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=80), st.integers(1, 60))
def test_streams_that_stop_when_no_more_can_be_held_pass_a_limit_by_a_piece_each_at_most(
    pieces: list[tuple[int, int]], limit: int
) -> None:
    limits, streams, told = meters(limit), dict[int, Reservation](), dict[int, int]()
    stopped = set[int]()
    for stream, size in pieces:
        if stream not in streams:
            held = reserve(limits, tokens(2), tokens(1), 0.0)
            if not isinstance(held, Reservation):
                continue
            streams[stream], told[stream] = held, 0
        if stream in stopped:
            continue
        told[stream] += size
        if streams[stream].extend(tokens(told[stream]), 0.0) is not None:
            streams[stream].force_extend(tokens(told[stream]), 0.0)
            stopped.add(stream)
    assert sum(told.values()) <= limits[1].meter.used <= limit + 9 * len(stopped)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 200), st.lists(st.integers(0, 40), max_size=12), st.floats(0, 0.05)
        ),
        max_size=20,
    ),
    st.integers(0, 3),
    st.integers(0, 32),
    st.integers(0, 9),
)
def test_in_the_end_what_counts_is_what_was_used(
    requests: list[tuple[int, list[int], float]], prompt: int, ahead: int, dropped_each: int
) -> None:
    limits = [QuotaLimit("key", unit, "minute", None, SlidingWindow(10**9, 60.0)) for unit in UNITS]
    now, in_all = 0.0, [0] * len(UNITS)
    for number, (estimate, pieces, pause) in enumerate(requests):
        held = reserve(limits, running_usage(RATES, prompt, 0, estimate), tokens(1), now)
        assert isinstance(held, Reservation)
        delivered = 0
        for piece in pieces:
            now += pause
            delivered += piece
            assert held.extend(running_usage(RATES, prompt, 0, delivered + ahead), now) is None
        last = number % 3  # that was not held
        use = final_usage(
            prompt, delivered + last, RATES.cost_nano_dollars(prompt, 0, delivered + last)
        )
        if number % 10 == dropped_each:
            use = QuotaUsage()
        held.settle(use, now)
        in_all = [more + meter.units_of(use) for meter, more in zip(limits, in_all, strict=True)]
    assert used(limits) == in_all


def test_what_was_used_beyond_what_was_held_counts_too() -> None:
    limits = meters(100)
    held = reserve(limits, tokens(10), tokens(1), 0.0)
    assert isinstance(held, Reservation)
    held.settle(done(30), 0.0)
    assert used(limits) == [1, 30, 0]


@pytest.mark.parametrize(
    ("use", "left"), [(done(25), [1, 25, 0]), (done(2), [1, 22, 0]), (QuotaUsage(), [0, 22, 0])]
)
def test_of_a_long_stream_only_the_last_parts_are_remembered(
    use: QuotaUsage, left: list[int]
) -> None:
    limits = meters(30)
    held = reserve(limits, tokens(1), tokens(1), 0.0)
    assert isinstance(held, Reservation)
    for second in range(1, 30):
        assert held.extend(tokens(second + 1), float(second)) is None
    assert used(limits) == [1, 30, 1]
    assert max(len(hold.units_by_slot) for hold in held.holds) == 8
    held.settle(use, 30.0)
    assert used(limits) == left


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 3))
def test_who_needs_nothing_of_a_limit_is_let_in_however_far_it_was_passed_or_lowered(
    used_up: int, passed_by: int, free: int
) -> None:
    tokens_, cost = (
        QuotaLimit("key", unit, "minute", None, SlidingWindow(used_up, 60.0))
        for unit in ("tokens", "nano_dollars")
    )
    for meter in (tokens_, cost):
        meter.meter.add(used_up + passed_by, 0.0)
    one = QuotaUsage(requests=1, concurrency=1)
    assert isinstance(reserve([tokens_, cost], one, one, 1.0), Reservation)
    unpriced, least = running_usage(NO_CHARGE, 10, 0, free), running_usage(NO_CHARGE, 10, 0, 1)
    assert isinstance(reserve([cost], unpriced, least, 1.0), Reservation)
    assert isinstance(reserve([tokens_], unpriced, least, 1.0), list)


def test_estimates_settle_where_one_answer_in_ten_is_longer() -> None:
    estimates = OutputLengthEstimator()
    assert estimates.estimate("key", None, 256) == 256
    assert [estimates.estimate("key", most, 256) for most in (0, 50, 256, 300)] == [0, 50, 256, 256]
    for number in range(3000):
        estimates.observe("key", 1 + number * 37 % 100, 256)
    assert 70 <= estimates.estimate("key", None, 256) <= 140
    assert estimates.estimate("other", None, 256) == 256
    for _ in range(20_000):
        estimates.observe("key", 0, 256)
    assert estimates.estimate("key", None, 256) == 1
    for _ in range(10):
        estimates.observe("key", 50, 256)
    assert estimates.estimate("key", None, 256) > 40


def test_estimates_of_who_was_not_seen_for_longest_are_forgotten() -> None:
    estimates = OutputLengthEstimator()
    for asker in (*range(10_000), 0, 10_000):
        estimates.observe(asker, 1000, 256)
    known = [estimates.estimate(asker, None, 256) > 256 for asker in (0, 1, 2, 10_000)]
    assert known == [True, False, True, True]
