"""Reservations: all limits or none; streams exceed a limit by one piece each; settled usage equals real usage."""

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
    is_permanent,
    longest_rejection,
    reserve,
    running_usage,
)
from argosy.policy.reservation import final_usage
from argosy.protocol import TokenUsage

UNITS = QuotaUsage.__struct_fields__
RATES = Rates(5, 2, 7)


def token_usage(count: int) -> QuotaUsage:
    return running_usage(NO_CHARGE, TokenUsage(output_tokens=count))


def settled_usage(count: int) -> QuotaUsage:
    return final_usage(TokenUsage(output_tokens=count), 0)


def key_limits(max_tokens: int, requests: int = 10, max_concurrency: int = 10) -> list[QuotaLimit]:
    return [
        QuotaLimit("key", "requests", "minute", None, SlidingWindow(requests, 60.0)),
        QuotaLimit("key", "tokens", "minute", None, SlidingWindow(max_tokens, 60.0)),
        QuotaLimit("key", "concurrency", "", None, ConcurrencyMeter(max_concurrency)),
    ]


def used_units(limits: list[QuotaLimit]) -> list[int]:
    return [limit.meter.used for limit in limits]


def test_reserve_takes_all_limits_or_none() -> None:
    wide, narrow = key_limits(1000), key_limits(50)
    reservation = reserve([*wide, *narrow], token_usage(50), token_usage(1), 0.0)
    assert isinstance(reservation, Reservation)
    assert reservation.covers_estimate
    reservation.settle(settled_usage(20), 0.0)
    rejections = reserve([*wide, *narrow], token_usage(40), token_usage(1), 0.0)
    assert isinstance(rejections, list)
    [rejection] = rejections
    assert (rejection.quota_limit, rejection.limit, rejection.used, rejection.requested) == (
        narrow[1],
        50,
        20,
        40,
    )
    assert used_units(wide) == used_units(narrow) == [1, 20, 0]


def test_minimum_above_the_limit_is_rejected_and_larger_estimate_is_capped() -> None:
    limits = key_limits(100)
    rejections = reserve(limits, token_usage(500), token_usage(101), 0.0)
    assert isinstance(rejections, list)
    assert is_permanent(longest_rejection(rejections))
    reservation = reserve(limits, token_usage(500), token_usage(1), 0.0)
    assert isinstance(reservation, Reservation)
    assert used_units(limits) == [1, 100, 1]
    assert not reservation.covers_estimate


def test_longest_rejection_has_the_longest_wait() -> None:
    meter = key_limits(1)[0]
    waits = [3.0, math.inf, 0.0]
    assert is_permanent(longest_rejection([QuotaRejection(meter, 1, 1, 1, wait) for wait in waits]))
    assert (
        longest_rejection([QuotaRejection(meter, 1, 1, 1, wait) for wait in (3.0, 5.0)]).wait_s
        == 5.0
    )


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=80), st.integers(1, 60))
def test_stopped_streams_exceed_a_limit_by_at_most_one_chunk_each(
    chunks: list[tuple[int, int]], limit: int
) -> None:
    limits, streams, delivered = key_limits(limit), dict[int, Reservation](), dict[int, int]()
    stopped = set[int]()
    for stream, size in chunks:
        if stream not in streams:
            reservation = reserve(limits, token_usage(2), token_usage(1), 0.0)
            if not isinstance(reservation, Reservation):
                continue
            streams[stream], delivered[stream] = reservation, 0
        if stream in stopped:
            continue
        delivered[stream] += size
        if streams[stream].extend(token_usage(delivered[stream]), 0.0) is not None:
            streams[stream].force_extend(token_usage(delivered[stream]), 0.0)
            stopped.add(stream)
    assert sum(delivered.values()) <= limits[1].meter.used <= limit + 9 * len(stopped)


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
def test_settled_usage_equals_real_usage(
    requests: list[tuple[int, list[int], float]], prompt: int, ahead: int, failed_remainder: int
) -> None:
    limits = [QuotaLimit("key", unit, "minute", None, SlidingWindow(10**9, 60.0)) for unit in UNITS]
    now, totals = 0.0, [0] * len(UNITS)
    for number, (estimate, chunks, pause) in enumerate(requests):
        reservation = reserve(
            limits, running_usage(RATES, TokenUsage(prompt, 0, estimate)), token_usage(1), now
        )
        assert isinstance(reservation, Reservation)
        delivered = 0
        for chunk in chunks:
            now += pause
            delivered += chunk
            assert (
                reservation.extend(
                    running_usage(RATES, TokenUsage(prompt, 0, delivered + ahead)), now
                )
                is None
            )
        last = number % 3  # not reserved
        tokens = TokenUsage(prompt, 0, delivered + last)
        usage = final_usage(tokens, RATES.cost_nano_dollars(tokens))
        if number % 10 == failed_remainder:
            usage = QuotaUsage()
        reservation.settle(usage, now)
        totals = [
            total + meter.units_of(usage) for meter, total in zip(limits, totals, strict=True)
        ]
    assert used_units(limits) == totals


@pytest.mark.parametrize(
    ("usage", "expected"),
    [(settled_usage(25), [1, 25, 0]), (settled_usage(2), [1, 22, 0]), (QuotaUsage(), [0, 22, 0])],
)
def test_long_stream_keeps_a_bounded_number_of_slots(
    usage: QuotaUsage, expected: list[int]
) -> None:
    limits = key_limits(30)
    reservation = reserve(limits, token_usage(1), token_usage(1), 0.0)
    assert isinstance(reservation, Reservation)
    for second in range(1, 30):
        assert reservation.extend(token_usage(second + 1), float(second)) is None
    assert used_units(limits) == [1, 30, 1]
    assert max(len(hold.units_by_slot) for hold in reservation.holds) == 8
    reservation.settle(usage, 30.0)
    assert used_units(limits) == expected


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 3))
def test_request_without_need_of_an_exceeded_limit_is_admitted(
    used_up: int, passed_by: int, free: int
) -> None:
    token_limit, cost_limit = (
        QuotaLimit("key", unit, "minute", None, SlidingWindow(used_up, 60.0))
        for unit in ("tokens", "nano_dollars")
    )
    for meter in (token_limit, cost_limit):
        meter.meter.add(used_up + passed_by, 0.0)
    request_usage = QuotaUsage(requests=1, concurrency=1)
    assert isinstance(
        reserve([token_limit, cost_limit], request_usage, request_usage, 1.0), Reservation
    )
    unpriced = running_usage(NO_CHARGE, TokenUsage(10, 0, free))
    min_usage = running_usage(NO_CHARGE, TokenUsage(10, 0, 1))
    assert isinstance(reserve([cost_limit], unpriced, min_usage, 1.0), Reservation)
    assert isinstance(reserve([token_limit], unpriced, min_usage, 1.0), list)


def test_estimate_converges_to_the_ninetieth_percentile() -> None:
    estimates = OutputLengthEstimator()
    assert estimates.estimate("key", None, 256) == 256
    assert [estimates.estimate("key", max_tokens, 256) for max_tokens in (0, 50, 256, 300)] == [
        0,
        50,
        256,
        256,
    ]
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


def test_least_recent_estimate_is_forgotten() -> None:
    estimates = OutputLengthEstimator()
    for key in (*range(10_000), 0, 10_000):
        estimates.observe(key, 1000, 256)
    known = [estimates.estimate(key, None, 256) > 256 for key in (0, 1, 2, 10_000)]
    assert known == [True, False, True, True]
