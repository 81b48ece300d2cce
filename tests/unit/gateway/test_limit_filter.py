"""Filters of one gateway: limits with their headers, settlement and seeding, and the tenant of the telemetry."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection
from datetime import UTC, datetime
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from structlog.testing import capture_logs
from tests.support.fake_clock import FakeClock
from tests.support.limit_harness import (
    OTHER_PRINCIPAL,
    PRINCIPAL,
    complete,
    deliver,
    expect_rejection,
    find_rejection,
    is_admitted,
    make_context,
    make_embedding_context,
    make_limit,
    make_snapshot,
)

from argosy.deployment import ExplainConfig, LimitsConfig
from argosy.gateway.backends import find_max_usage
from argosy.gateway.filters import LimitFilter, read_redis_password
from argosy.gateway.filters.limit_responses import format_duration
from argosy.gateway.filters.telemetry_filter import TelemetryFilter
from argosy.gateway.principal import Principal
from argosy.gateway.request_context import REFUSED_BY_REPLICA, RequestContext
from argosy.gateway.request_fields import DEFAULT_OUTPUT_TOKENS
from argosy.gateway.request_trace import TraceStore
from argosy.http_server import DisconnectedError, HttpExchange
from argosy.policy import RequestStatus
from argosy.protocol import ApiError
from argosy.store import (
    Limit,
    LimitUnit,
    LocalQuotaBackend,
    Price,
    UsageReportRow,
    create_quota_backend,
    steady_clock,
)
from argosy.telemetry import GatewayGauges, GatewayMetrics

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()
PRICE = Price(model="big", input=1_000, cached_input=100, output=10_000)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOON)


def make_filter(clock: FakeClock, *limits: Limit, prices: tuple[Price, ...] = ()) -> LimitFilter:
    limit_filter = LimitFilter(LocalQuotaBackend(), clock)
    limit_filter.apply_snapshot(make_snapshot(*limits, prices=prices))
    return limit_filter


# --- admission and its responses -----------------------------------------------------------------


async def test_embeddings_use_no_output_and_teach_no_length(clock: FakeClock) -> None:
    limits = make_filter(
        clock, make_limit("input_tokens", 25), make_limit("output_tokens", 300), prices=(PRICE,)
    )
    for _ in range(2):
        context = make_embedding_context()
        await limits.on_request(context)
        context.delivered.prompt_tokens = 10
        complete(limits, context)
        assert (context.bill.usage.prompt_tokens, context.bill.usage.output_tokens) == (10, 0)
        assert context.bill.nano_dollars == 10 * PRICE.input
    rejection = await find_rejection(limits, make_embedding_context())
    assert rejection is not None
    assert (rejection.status, "input tokens" in rejection.message) == (429, True)
    clock.now += 61
    chat_context = make_context(max_tokens=None)
    await limits.on_request(chat_context)
    assert chat_context.trace.limits  # the expected output is still the default of 256 tokens
    assert chat_context.covered_output_tokens == DEFAULT_OUTPUT_TOKENS


async def test_principal_without_limits_is_not_limited(clock: FakeClock) -> None:
    limits, context = make_filter(clock, make_limit("requests", 1)), make_context(OTHER_PRINCIPAL)
    for _ in range(3):
        await limits.on_request(context)
        assert deliver(limits, context, 10**6) is None
        complete(limits, context)
    assert (context.response_headers, context.trace.limits) == ([], [])


async def test_rejection_names_limit_and_retry_time(clock: FakeClock) -> None:
    limits = make_filter(
        clock, make_limit("tokens", 100), make_limit("requests", 2, "hour", "project")
    )
    await limits.on_request(make_context(prompt_tokens=80))
    context = make_context(prompt_tokens=15)
    error = await expect_rejection(limits, context)
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert "the key's limit of 100 tokens per minute" in error.message
    assert "Used: 85 tokens. Needed: 20 tokens." in error.message
    assert error.retry_after_s is not None
    assert 60.0 < error.retry_after_s <= 61.0
    [decision] = context.trace.limits
    assert decision.used == 85
    assert (decision.owner, decision.unit, decision.asked) == ("key", "tokens", 20)
    clock.now += error.retry_after_s + 1e-3
    assert await find_rejection(limits, make_context(prompt_tokens=15)) is None
    error = await expect_rejection(limits, make_context(prompt_tokens=15))
    assert "the project's limit of 2 requests per hour" in error.message


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (
            make_limit("requests", 0),
            "the key's limit of 0 requests per minute. Have the limit raised.",
        ),
        (make_limit("concurrency", 0), "0 requests at a time. Have the limit raised."),
        (make_limit("tokens", 100), "This request needs 101 tokens and can never fit"),
        (make_limit("tokens", 0), "0 tokens per minute. Have the limit raised."),
        (
            make_limit("input_tokens", 5),
            "5 input tokens per minute. Send a shorter prompt or have the",
        ),
    ],
    ids=["requests", "concurrency", "tokens", "no-tokens", "input-tokens"],
)
async def test_request_above_whole_limit_is_too_large_and_learns_the_remedy(
    clock: FakeClock, limit: Limit, text: str
) -> None:
    error = await expect_rejection(make_filter(clock, limit), make_context(prompt_tokens=100))
    assert (error.status, error.code) == (413, "request_too_large")
    assert text in error.message


async def test_response_headers_describe_tightest_limits(clock: FakeClock) -> None:
    limits = make_filter(
        clock,
        make_limit("requests", 10),
        make_limit("requests", 3, "hour", "project"),
        make_limit("tokens", 1000),
        make_limit("output_tokens", 300, "second", "user"),
    )
    context = make_context(prompt_tokens=10, max_tokens=5)
    await limits.on_request(context)
    assert dict(context.response_headers) == {
        b"x-ratelimit-limit-requests": b"3",
        b"x-ratelimit-remaining-requests": b"2",
        b"x-ratelimit-reset-requests": b"1h1m0s",
        b"x-ratelimit-limit-tokens": b"300",
        b"x-ratelimit-remaining-tokens": b"295",
        b"x-ratelimit-reset-tokens": b"1.1s",
    }
    assert [decision.unit for decision in context.trace.limits].count("requests") == 2
    for _ in range(2):
        await limits.on_request(make_context())
    rejected = make_context()
    await expect_rejection(limits, rejected)
    assert (b"x-ratelimit-remaining-requests", b"0") in rejected.response_headers


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0601, "61ms"),
        (1.2, "1.2s"),
        (59.99, "60s"),
        (90, "1m30s"),
        (7505, "2h5m5s"),
    ],
)
def test_durations_have_format_of_openai_headers(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


async def test_model_limit_applies_to_its_model_only(clock: FakeClock) -> None:
    limits = make_filter(
        clock, make_limit("requests", 1, model="big"), make_limit("requests", 0, model="other")
    )
    assert await is_admitted(limits)
    error = await expect_rejection(limits, make_context())
    assert "for 'big'" in error.message


async def test_unknown_or_missing_window_disables_only_its_limit(clock: FakeClock) -> None:
    """A newer gateway may have written a limit with a window that this gateway does not know."""
    unusable = (
        make_limit("tokens", 5, None),
        make_limit("tokens", 5, "fortnight"),  # type: ignore[arg-type]
    )
    with capture_logs() as logs:
        limits = make_filter(clock, *unusable, make_limit("requests", 1))
    logged = [(entry["event"], entry["limit"]) for entry in logs]
    assert logged == [("limit_not_enforced", limit.id) for limit in unusable]
    assert [await is_admitted(limits) for _ in range(2)] == [True, False]


# --- streams and settlement ----------------------------------------------------------------------


async def test_budget_ends_stream_and_is_renewed_at_midnight(clock: FakeClock) -> None:
    budget = 10 * 1_000 + 20 * 10_000
    limits = make_filter(
        clock, make_limit("nano_dollars", budget, "day", "project"), prices=(PRICE,)
    )
    context = make_context(prompt_tokens=10, max_tokens=1)
    await limits.on_request(context)
    assert deliver(limits, context, 20) is None
    assert deliver(limits, context, 1) == "budget"
    complete(limits, context, "stopped")
    admission, end = context.trace.limits
    assert (admission.unit, admission.fits) == (end.unit, True)
    assert (end.used, end.asked, end.limit, end.fits) == (budget, 10_000, budget, False)
    error = await expect_rejection(limits, make_context(prompt_tokens=10, max_tokens=1))
    assert (error.status, error.code) == (429, "insufficient_quota")
    assert "the project's budget of $0.00021 per day. Used: $0.00022." in error.message
    assert "Possible cost of this request: $0.00002." in error.message
    assert error.retry_after_s == 12 * 3600
    clock.now += 12 * 3600
    assert await find_rejection(limits, make_context(prompt_tokens=10, max_tokens=1)) is None


async def test_reported_prompt_and_cached_tokens_replace_estimate(clock: FakeClock) -> None:
    limits = make_filter(
        clock,
        make_limit("input_tokens", 1000),
        make_limit("nano_dollars", 10**9, "month"),
        prices=(PRICE,),
    )
    context = make_context(prompt_tokens=20, max_tokens=5)
    await limits.on_request(context)
    context.delivered.cached_tokens = 400
    assert deliver(limits, context, 5, prompt_tokens=500) is None
    complete(limits, context)
    await limits.on_request(second := make_context(prompt_tokens=20, max_tokens=5))
    assert {decision.unit: decision.used for decision in second.trace.limits} == {
        "input_tokens": 500,
        "nano_dollars": 100 * 1_000 + 400 * 100 + 5 * 10_000,
    }


async def test_longer_prompt_does_not_increase_output_reservation(clock: FakeClock) -> None:
    limits = make_filter(clock, make_limit("tokens", 100))
    await limits.on_request(context := make_context(prompt_tokens=10, max_tokens=5))
    assert deliver(limits, context, 1, prompt_tokens=20) is None
    error = await expect_rejection(limits, make_context(prompt_tokens=85))
    assert "Used: 25 tokens." in error.message


@pytest.mark.parametrize(
    ("status", "counts"), [(400, True), (413, True), (422, True), (404, False)]
)
async def test_only_errors_of_the_request_itself_count(
    clock: FakeClock, status: int, counts: bool
) -> None:
    limits = make_filter(clock, make_limit("requests", 1))
    await limits.on_request(context := make_context())
    context.record_error(ApiError(status, REFUSED_BY_REPLICA, "The replica refuses it."))
    complete(limits, context, "refused")
    assert await is_admitted(limits) is not counts


async def test_output_reservation_follows_previous_responses(clock: FakeClock) -> None:
    limits = make_filter(clock, make_limit("tokens", 10**9))
    for _ in range(60):
        await limits.on_request(context := make_context(max_tokens=None))
        deliver(limits, context, 40)
        complete(limits, context)
    await limits.on_request(context := make_context(prompt_tokens=10, max_tokens=None))
    [decision] = context.trace.limits
    assert 35 <= decision.asked - 10 <= 60


@settings(max_examples=50)
@given(
    limit=st.integers(30, 2000),
    chunks=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    num_streams=st.integers(1, 12),
)
def test_concurrent_streams_exceed_limit_by_at_most_one_chunk_each(
    limit: int, chunks: list[int], num_streams: int
) -> None:
    limits = make_filter(
        FakeClock(NOON),
        make_limit("tokens", limit, "hour"),
        make_limit("output_tokens", limit, "day"),
    )
    delivered, overrun = 0, 0

    async def stream(number: int) -> None:
        nonlocal delivered, overrun
        for attempt in range(4):
            context = make_context(prompt_tokens=10, max_tokens=None if number % 2 else 90)
            if await find_rejection(limits, context) is not None:
                continue
            finish_reason = None
            for chunk in chunks * (1 + (number + attempt) % 3):
                await asyncio.sleep(0)
                finish_reason = deliver(limits, context, chunk)
                if finish_reason is not None:
                    overrun += chunk
                    break
            delivered += 10 + context.delivered.output_tokens
            complete(limits, context, "completed" if finish_reason is None else "stopped")

    async def run_streams() -> None:
        await asyncio.gather(*(stream(number) for number in range(num_streams)))

    asyncio.run(run_streams())
    assert delivered <= limit + overrun


@settings(max_examples=60)
@given(
    amount=st.integers(1, 10**8),
    requests=st.lists(
        st.tuples(
            st.none() | st.integers(1, 500),
            st.integers(1, 4),
            st.sampled_from([0, 0, 0, 0, 1, 5]),
            st.booleans(),
        ),
        min_size=1,
        max_size=40,
    ),
    draw=st.randoms(use_true_random=False),
)
@example(amount=20_000, requests=[(1, 1, 1, True)], draw=Random(0))
def test_requests_together_exceed_a_budget_by_less_than_one(
    amount: int, requests: list[tuple[int | None, int, int, bool]], draw: Random
) -> None:
    """A request that fits alone is admitted, and what it did not use is free again when it has ended."""
    limits = make_filter(
        FakeClock(NOON), make_limit("nano_dollars", amount, "day"), prices=(PRICE,)
    )
    running: list[RequestContext] = []
    costs = [0]

    def end(context: RequestContext, share: float) -> None:
        most = find_max_usage(context.fields, lambda: None)
        context.delivered.prompt_tokens = int(share * most.prompt_tokens)
        context.delivered.output_tokens = int(share * most.output_tokens)
        complete(limits, context)
        costs.append(context.bill.nano_dollars)

    for max_tokens, choices, num_ends, is_cheap in requests:
        context = make_context(max_tokens=max_tokens, choices=choices)
        if asyncio.run(find_rejection(limits, context)) is None:
            running.append(context)
        for _ in range(min(num_ends, len(running))):
            end(running.pop(draw.randrange(len(running))), 0.0 if is_cheap else draw.random())
    for context in running:
        end(context, 1.0)
    spent = sum(costs)
    assert spent - max(costs) < amount
    last = asyncio.run(find_rejection(limits, make_context(prompt_tokens=10, max_tokens=5)))
    needed, least = (10 * PRICE.input + tokens * PRICE.output for tokens in (5, 1))
    if needed > amount:  # the request may use the whole budget
        needed = max(amount, least)
    assert (last is None) == (spent + needed <= amount)
    if last is not None and (left := amount - spent - 10 * PRICE.input) >= PRICE.output:
        passing_tokens = left // PRICE.output
        assert f"'max_tokens' of at most {passing_tokens} passes now" in last.message
        context = make_context(prompt_tokens=10, max_tokens=passing_tokens)
        assert asyncio.run(find_rejection(limits, context)) is None


async def test_utility_call_holds_slot_and_counts_unless_the_fleet_fails(clock: FakeClock) -> None:
    stored_bytes = make_limit("stored_bytes", 0)  # counted by the store
    requests = make_limit("requests", 4)
    limits = make_filter(clock, make_limit("concurrency", 1), requests, stored_bytes)
    reserve = partial(limits.reserve_request, PRINCIPAL, "big", [])
    for failure in (RuntimeError(), ApiError(503, "no_replica", "")):
        with pytest.raises(type(failure)):
            async with reserve():
                raise failure
    async with reserve():
        with pytest.raises(ApiError, match="at a time"):
            await reserve().__aenter__()
        async with reserve(concurrency=0, requests=0):
            pass
    async with reserve():
        pass
    for error in (ApiError(404, "not_found", ""), DisconnectedError()):
        with pytest.raises(type(error)):
            async with reserve():
                raise error
    with pytest.raises(ApiError, match="4 requests per minute"):
        await reserve().__aenter__()


# --- changed limits and rotated keys -------------------------------------------------------------


async def test_changed_limit_keeps_current_usage(clock: FakeClock) -> None:
    limits = make_filter(clock, make_limit("requests", 1), make_limit("concurrency", 1))
    await limits.on_request(context := make_context())
    limits.apply_snapshot(make_snapshot(make_limit("requests", 2), make_limit("concurrency", 2)))
    assert [await is_admitted(limits) for _ in range(2)] == [True, False]
    limits.apply_snapshot(make_snapshot(make_limit("requests", 1)))
    assert not await is_admitted(limits)
    limits.apply_snapshot(make_snapshot())
    assert await is_admitted(limits)
    complete(limits, context)


async def test_created_limits_on_requests_count_slots_and_later_requests(clock: FakeClock) -> None:
    limits = make_filter(clock)
    await limits.on_request(running := make_context())
    limits.apply_snapshot(make_snapshot(make_limit("concurrency", 2), make_limit("requests", 2)))
    await limits.on_request(second := make_context())
    error = await expect_rejection(limits, make_context())
    assert (error.status, error.retry_after_s) == (429, 1.0)
    assert "the key's limit of 2 requests at a time. Running: 2 requests." in error.message
    for context in (running, second):
        assert deliver(limits, context, 5) is None
        complete(limits, context)
    await limits.on_request(third := make_context())
    complete(limits, third)
    assert "2 requests per minute" in (await expect_rejection(limits, make_context())).message


UNITS_PER_TOKEN = {
    "tokens": (1, 1, "limit"),
    "output_tokens": (0, 1, "limit"),
    "nano_dollars": (PRICE.input, PRICE.output, "budget"),
}
"""Units of a limit for a token of a prompt and of the output, and the reason for which it stops a stream."""


class ChangingLimit(RuleBasedStateMachine):
    """Running streams follow a limit that is created, changed and deleted.

    A created limit counts past usage, and what the running streams have not delivered yet. It is exceeded by at most
    the last chunk of each stopped stream.
    """

    @initialize(
        unit=st.sampled_from(["tokens", "output_tokens", "nano_dollars"]),
        past_tokens=st.sampled_from([0, 70]),
    )
    def begin(self, unit: LimitUnit, past_tokens: int) -> None:
        self.unit, self.past_tokens = unit, past_tokens
        self.prompt_units, self.output_units, self.reason = UNITS_PER_TOKEN[unit]
        self.limits = make_filter(FakeClock(NOON), prices=(PRICE,))
        self.amount, self.used, self.overrun = math.inf, 0, 0
        self.running: list[RequestContext] = []

    def sum_by_owner(self, kind: str, owners: Collection[str], _: float) -> dict[str, Any]:
        assert (kind, owners) == ("key", {"k1"})
        tokens, cost = self.past_tokens, self.past_tokens * PRICE.output
        return {"k1": [UsageReportRow(model="big", output_tokens=tokens, nano_dollars=cost)]}

    def units(self, context: RequestContext) -> int:
        output_units = self.output_units * context.delivered.output_tokens
        return self.prompt_units * context.delivered.prompt_tokens + output_units

    def end_stream(self, context: RequestContext, status: RequestStatus = "completed") -> None:
        self.running.remove(context)
        self.used -= self.units(context)
        context.delivered.prompt_tokens = 10
        self.used += self.units(context)
        complete(self.limits, context, status)

    @rule(max_tokens=st.sampled_from([None, 2000]))
    def start(self, max_tokens: int | None) -> None:
        context = make_context(max_tokens=max_tokens)
        if asyncio.run(find_rejection(self.limits, context)) is None:
            self.running.append(context)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 3), tokens=st.integers(1, 60))
    def deliver(self, number: int, tokens: int) -> None:
        context = self.running[number % len(self.running)]
        units_before = self.units(context)
        stop_reason = deliver(self.limits, context, tokens)
        chunk_units = self.units(context) - units_before
        self.used += chunk_units
        if self.used > self.amount + self.overrun:
            assert stop_reason == self.reason
        elif self.used <= self.amount and (math.isinf(self.amount) or len(self.running) == 1):
            assert stop_reason is None, "nothing else is reserved"
        if stop_reason is not None:
            self.overrun += chunk_units  # the others may still use what they hold
            self.end_stream(context, "stopped")
            assert context.trace.limits[-1].limit == self.amount

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 3))
    def end(self, number: int) -> None:
        self.end_stream(self.running[number % len(self.running)])

    @rule(tokens=st.integers(0, 120) | st.just(math.inf))
    def change(self, tokens: float) -> None:
        is_new, self.amount = math.isinf(self.amount), tokens * self.output_units
        self.overrun = 0
        is_deleted = math.isinf(tokens)
        changed = [] if is_deleted else [make_limit(self.unit, int(self.amount), "day")]
        self.limits.apply_snapshot(make_snapshot(*changed, prices=(PRICE,)))
        if is_new:
            self.used = self.past_tokens * self.output_units
            asyncio.run(self.limits.seed_usage(self.sum_by_owner))

    def teardown(self) -> None:
        for context in tuple(self.running):
            self.end_stream(context)
        if not math.isinf(self.amount):
            self.change(10**9)
            asyncio.run(self.limits.on_request(last := make_context()))
            assert last.trace.limits[0].used == self.used


ChangingLimit.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestChangingLimit = ChangingLimit.TestCase


async def test_rotated_key_shares_limit_with_predecessors(clock: FakeClock) -> None:
    def limit_of(key: str) -> Limit:
        return msgspec.structs.replace(make_limit("requests", 2), owner=key)

    def context_of(key: str) -> RequestContext:
        return make_context(msgspec.structs.replace(PRINCIPAL, key=key))

    limits = make_filter(clock, limit_of("k0"))
    await limits.on_request(context_of("k0"))
    rotated = make_snapshot(limit_of("k2"))
    limits.apply_snapshot(msgspec.structs.replace(rotated, successors={"k0": "k1", "k1": "k2"}))
    await limits.on_request(context_of("k1"))
    for key in ("k0", "k1", "k2"):
        assert await find_rejection(limits, context_of(key)) is not None
    assert await find_rejection(limits, context_of("k3")) is None


# --- seeding and settings ------------------------------------------------------------------------


async def test_thousands_of_limits_are_seeded_with_few_queries(clock: FakeClock) -> None:
    """A gateway waits for the queries when it starts."""
    queries = list[float]()

    def sum_by_owner(
        kind: str, owners: Collection[str], since: float
    ) -> dict[str, list[UsageReportRow]]:
        assert (kind, len(owners)) == ("key", 3000)
        queries.append(since)
        return {owner: [UsageReportRow(model="big", requests=int(owner))] for owner in owners}

    templates = make_limit("requests", 3000, "minute"), make_limit("requests", 5000, "month")
    limits = make_filter(
        clock,
        *(
            msgspec.structs.replace(template, id=f"{template.id}{number}", owner=str(number))
            for template in templates
            for number in range(3000)
        ),
    )
    await limits.seed_usage(sum_by_owner)
    assert len(queries) == len(set(queries)) <= 10
    context = make_context(msgspec.structs.replace(PRINCIPAL, key="2000"))
    await limits.on_request(context)
    assert [decision.used for decision in context.trace.limits] == [2000, 2000]


async def test_windows_follow_elapsed_time_and_days_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine's clock is 14 hours ahead until it is put right. Prices are those of the true time, too."""
    elapsed = FakeClock(time.monotonic() + NOON + 14 * 3600 - steady_clock())
    wall = FakeClock(NOON + 14 * 3600)
    fake_time = SimpleNamespace(time=wall, monotonic=elapsed)
    monkeypatch.setattr("argosy.store.clock.time", fake_time)
    dear = msgspec.structs.replace(PRICE, output=10**6, since=NOON + 3600)
    day, minute = make_limit("requests", 3, "day"), make_limit("requests", 2, "minute", "project")
    limits = LimitFilter(LocalQuotaBackend())
    limits.apply_snapshot(make_snapshot(day, minute, prices=(PRICE, dear)))
    assert await is_admitted(limits)
    wall.now = NOON
    await limits.on_request(context := make_context())
    assert context.rates.output == PRICE.output
    error = await expect_rejection(limits, make_context())
    assert error.retry_after_s == pytest.approx(60, abs=2)
    for clock in (wall, elapsed):
        clock.now += 62
    assert await is_admitted(limits)
    error = await expect_rejection(limits, make_context())
    assert "3 requests per day" in error.message
    assert error.retry_after_s == pytest.approx(12 * 3600 - 62, abs=1)
    monkeypatch.undo()
    assert steady_clock() == pytest.approx(time.time(), abs=5)
    assert steady_clock.offset_s == 0


def test_redis_settings_are_validated() -> None:
    assert isinstance(create_quota_backend(None), LocalQuotaBackend)
    assert read_redis_password(LimitsConfig()) is None
    for url in ("http://nowhere", "redis://nowhere:66000/0", "redis://user:sec/ret@nowhere"):
        with pytest.raises(ValueError, match=r"Redis URL is not valid .*Write redis://") as caught:
            create_quota_backend(url)
        assert "sec" not in str(caught.value)
    with pytest.raises(ValueError, match="set the environment variable NOT_THERE"):
        read_redis_password(LimitsConfig(redis="redis://nowhere", password_env="NOT_THERE"))
    with pytest.raises(ValueError, match="add redis"):
        read_redis_password(LimitsConfig(password_env="HOME"))


# --- telemetry ------------------------------------------------------------------------------------


async def test_telemetry_without_project_uses_organisation_as_tenant() -> None:
    metrics = GatewayMetrics()
    telemetry = TelemetryFilter(TraceStore(ExplainConfig()), metrics, lambda: 1.0)
    for organisation in ("acme", "zeta"):
        context = make_context(Principal(organisation=organisation))
        context.exchange = Mock(spec=HttpExchange, request_id="r", path="/v1/completions")
        await telemetry.on_request(context)
        telemetry.on_complete(context)
    exposition = metrics.exposition(GatewayGauges()).decode()
    for organisation in ("acme", "zeta"):
        assert (
            f'requests_total{{model="big",status="failed",tenant="{organisation}"}} 1.0'
            in exposition
        )
