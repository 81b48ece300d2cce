"""Reservations and bills: limits hold, settled usage equals real usage, and clients pay for what they received."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import (
    NO_CHARGE,
    CalendarPeriod,
    ConcurrencyMeter,
    OutputLengthEstimator,
    QuotaLimit,
    QuotaRejection,
    QuotaUsage,
    Rates,
    RequestEnd,
    RequestStatus,
    Reservation,
    SlidingWindow,
    WindowLease,
    compute_bill,
    is_permanent,
    longest_rejection,
    reserve,
    running_usage,
)
from argosy.policy.reservation import LimitHold, final_usage
from argosy.protocol import NO_TOKENS, TokenUsage

UNITS = QuotaUsage.__struct_fields__


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
    assert is_permanent(
        longest_rejection([QuotaRejection(meter, 1, 1, 1, wait, 1) for wait in waits])
    )
    assert (
        longest_rejection([QuotaRejection(meter, 1, 1, 1, wait, 1) for wait in (3.0, 5.0)]).wait_s
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


def test_hold_that_a_lower_limit_shrank_returns_the_rest_when_its_request_fails() -> None:
    (limit,) = limits = key_limits(100)[1:2]
    reservation = reserve(limits, token_usage(80), token_usage(1), 0.0)
    assert isinstance(reservation, Reservation)
    limit.meter.limit = 50
    reservation.change_limits(limits, token_usage(0), token_usage(10), 1.0, [limit.meter])
    assert used_units(limits) == [10]
    reservation.settle(QuotaUsage(), 2.0)
    assert (used_units(limits), limit.meter.held) == ([0], 0)


@pytest.mark.parametrize("is_leased", [False, True])
def test_budget_knows_what_requests_of_the_new_day_hold(is_leased: bool) -> None:
    midnight, day = 10 * 86_400.0, CalendarPeriod(1000, "day")
    meter = WindowLease("budget", day) if is_leased else day
    budget = QuotaLimit("key", "nano_dollars", "day", None, meter)
    old, new = (Reservation([LimitHold(budget, 0, 0, {})], covers_estimate=True) for _ in range(2))
    old.force_extend(QuotaUsage(nano_dollars=100), midnight - 1.0)
    assert meter.held == 100
    new.force_extend(QuotaUsage(nano_dollars=80), midnight + 1.0)
    assert meter.held == 80
    old.settle(QuotaUsage(), midnight + 2.0)
    assert meter.held == 80
    new.settle(QuotaUsage(nano_dollars=30), midnight + 3.0)
    assert (meter.held, meter.used) == (0, 30)


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


# --- bills: each token is paid once, and limits count the work that a request caused --------------


NANO = st.integers(0, 10**7)
COUNT = st.integers(0, 10**7)


@given(st.builds(Rates, NANO, NANO, NANO), COUNT, COUNT, COUNT, COUNT)
def test_every_token_is_charged_once(
    rates: Rates, uncached: int, cached: int, output: int, extra: int
) -> None:
    cost = rates.cost_nano_dollars(TokenUsage(uncached + cached, cached, output))
    assert cost == uncached * rates.input + cached * rates.cached_input + output * rates.output
    assert (
        rates.cost_nano_dollars(TokenUsage(uncached + cached, cached, output + extra))
        == cost + extra * rates.output
    )
    all_cached = TokenUsage(uncached, uncached + extra)
    assert rates.cost_nano_dollars(all_cached) == uncached * rates.cached_input


RATES = Rates(5, 1, 20)
ALL = TokenUsage(10, 4, 3)
PROMPT_ONLY = TokenUsage(10, 4, 0)
ESTIMATE = 12


@dataclass(frozen=True)
class Case:
    """A way in which a request ends, and its bill."""

    name: str
    status: RequestStatus
    generated: TokenUsage
    paid: TokenUsage
    counted: QuotaUsage
    started: bool = True
    sent: bool = True
    dispatched: bool = True
    client_error: bool = False


def counted(prompt: int, output: int, cost: int) -> QuotaUsage:
    return QuotaUsage(1, prompt + output, prompt, output, cost)


PAID = counted(10, 3, 6 * 5 + 4 * 1 + 3 * 20)
FREE = QuotaUsage()
CASES = [
    Case("completed", "completed", ALL, ALL, PAID),
    Case("completed in one piece", "completed", ALL, ALL, PAID, sent=False),
    Case("completed without output", "completed", PROMPT_ONLY, PROMPT_ONLY, counted(10, 0, 34)),
    Case("replayed", "completed", NO_TOKENS, NO_TOKENS, FREE, dispatched=False),
    Case("stopped by a limit", "stopped", ALL, ALL, PAID),
    Case("stopped in one piece", "stopped", ALL, ALL, PAID, sent=False),
    Case("stopped without output", "stopped", PROMPT_ONLY, NO_TOKENS, counted(10, 0, 0)),
    Case("deadline at silent replica", "stopped", NO_TOKENS, NO_TOKENS, counted(12, 0, 0), False),
    Case("deadline in queue", "stopped", NO_TOKENS, NO_TOKENS, FREE, False, False, False),
    Case("disconnect after output", "cancelled", ALL, ALL, PAID),
    Case("disconnect after role", "cancelled", PROMPT_ONLY, NO_TOKENS, counted(10, 0, 0)),
    Case("disconnect at silent replica", "cancelled", NO_TOKENS, NO_TOKENS, counted(12, 0, 0)),
    Case("disconnect before piece", "cancelled", ALL, NO_TOKENS, counted(10, 3, 0), False, False),
    Case("disconnect in queue", "cancelled", NO_TOKENS, NO_TOKENS, FREE, False, False, False),
    Case("failed before response", "failed", NO_TOKENS, NO_TOKENS, FREE, False, False),
    Case("failed after role", "failed", PROMPT_ONLY, NO_TOKENS, FREE),
    Case("failed after output", "failed", ALL, ALL, PAID),
    Case("failed with output held back", "failed", ALL, NO_TOKENS, FREE, sent=False),
    Case("failed before piece", "failed", ALL, NO_TOKENS, FREE, False, False),
    Case("no replica", "failed", NO_TOKENS, NO_TOKENS, FREE, False, False, False),
    Case("rejected by limit", "refused", NO_TOKENS, NO_TOKENS, FREE, False, False, False),
    Case(
        "rejected by replica",
        "refused",
        PROMPT_ONLY,
        NO_TOKENS,
        QuotaUsage(requests=1),
        False,
        False,
        client_error=True,
    ),
]


def make_end(case: Case) -> RequestEnd:
    return RequestEnd(
        status=case.status,
        generated=case.generated,
        estimated_prompt_tokens=ESTIMATE,
        is_response_started=case.started,
        is_output_sent=case.sent,
        is_dispatched=case.dispatched,
        is_client_error=case.client_error,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bill_follows_from_end_of_request(case: Case) -> None:
    cost = RATES.cost_nano_dollars(case.paid)
    bill = compute_bill(make_end(case), RATES)
    assert (bill.usage, bill.nano_dollars, bill.quota) == (case.paid, cost, case.counted)


def test_client_never_pays_for_more_than_counts_against_its_limits() -> None:
    """Holds for all combinations of facts, also for those that no request has."""
    flags = (False, True)
    for case, started, sent, dispatched, client_error in itertools.product(
        CASES, flags, flags, flags, flags
    ):
        end = msgspec.structs.replace(
            make_end(case),
            is_response_started=started,
            is_output_sent=sent,
            is_dispatched=dispatched,
            is_client_error=client_error,
        )
        bill = compute_bill(end, RATES)
        assert bill.usage in {NO_TOKENS, end.generated}
        assert bill.nano_dollars == RATES.cost_nano_dollars(bill.usage) == bill.quota.nano_dollars
        assert bill.usage.prompt_tokens <= bill.quota.input_tokens
        assert bill.usage.output_tokens <= bill.quota.output_tokens <= end.generated.output_tokens
        assert bill.quota.concurrency == 0
        assert bill.has_reached_client or bill.usage == NO_TOKENS
