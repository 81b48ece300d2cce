"""Limits in one gateway: who is let in, where streams end, what comes back, what callers are told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.limit_harness import (
    CALLER,
    OTHER,
    Gate,
    deliver,
    directory,
    leave,
    limit,
    refusal,
    request,
)

from argosy.gateway.accounting import AccountingService
from argosy.gateway.filters.limit_filter import LimitsConfig, open_quota_backend
from argosy.gateway.filters.limit_responses import format_duration
from argosy.gateway.request_context import RequestStatus
from argosy.store import (
    AccountSnapshot,
    Limit,
    LocalQuotaBackend,
    Price,
    StoreConfig,
    UsageLog,
    UsageRecord,
    UsageReportRow,
    open_store,
    usage_log_folder,
)
from argosy.store.clock import SteadyClock

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()
PRICE = Price(model="big", input=1_000, cached_input=100, output=10_000)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def in_force(clock: Clock, *limits: Limit, prices: tuple[Price, ...] = ()) -> Gate:
    stage = Gate(LocalQuotaBackend(), clock)
    stage.apply_snapshot(directory(*limits, prices=prices))
    return stage


async def test_who_has_no_limits_passes_untouched(clock: Clock) -> None:
    limits, context = in_force(clock, limit("requests", 1)), request(OTHER)
    for _ in range(3):
        await limits.on_request(context)
        assert deliver(limits, context, 10**6) is None
        leave(limits, context)
    assert (context.response_headers, context.trace.limits) == ([], [])


async def test_a_refusal_names_the_limit_and_tells_when_to_come_back(clock: Clock) -> None:
    limits = in_force(clock, limit("tokens", 100), limit("requests", 2, "hour", "project"))
    first = request(prompt=80)
    await limits.on_request(first)
    refused = await refusal(limits, second := request(prompt=15))
    assert refused is not None
    assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
    assert "the key's limit of 100 tokens per minute" in refused.message
    assert "Used: 85 tokens. Needed: 20 tokens." in refused.message
    assert refused.retry_after_s is not None
    assert 60.0 < refused.retry_after_s <= 61.0
    [line] = second.trace.limits
    assert line.used == 85
    assert (line.owner, line.unit, line.asked) == ("key", "tokens", 20)
    clock.now += refused.retry_after_s + 1e-3
    assert await refusal(limits, request(prompt=15)) is None
    refused = await refusal(limits, request(prompt=15))
    assert refused is not None
    assert "the project's limit of 2 requests per hour" in refused.message


async def test_what_never_fits_is_told_so(clock: Clock) -> None:
    refused = await refusal(in_force(clock, limit("tokens", 100)), request(prompt=100))
    assert refused is not None
    assert (refused.status, refused.code) == (413, "request_too_large")
    assert "This request needs 101 tokens and can never fit" in refused.message


@pytest.mark.parametrize(
    ("limited", "said"),
    [
        (limit("requests", 0), "the key's limit of 0 requests per minute. Have the limit raised."),
        (limit("concurrency", 0), "0 requests at a time. Have the limit raised."),
        (limit("tokens", 0), "0 tokens per minute. Have the limit raised."),
        (limit("input_tokens", 5), "5 input tokens per minute. Send a shorter prompt or have the"),
    ],
)
async def test_a_remedy_is_one(clock: Clock, limited: Limit, said: str) -> None:
    refused = await refusal(in_force(clock, limited), request(prompt=100))
    assert refused is not None
    assert said in refused.message


async def test_every_answer_tells_what_is_left_of_the_tightest_limits(clock: Clock) -> None:
    limits = in_force(
        clock,
        limit("requests", 10),
        limit("requests", 3, "hour", "project"),
        limit("tokens", 1000),
        limit("output_tokens", 300, "second", "user"),
    )
    context = request(prompt=10, most=5)
    await limits.on_request(context)
    assert dict(context.response_headers) == {
        b"x-ratelimit-limit-requests": b"3",
        b"x-ratelimit-remaining-requests": b"2",
        b"x-ratelimit-reset-requests": b"1h1m0s",
        b"x-ratelimit-limit-tokens": b"300",
        b"x-ratelimit-remaining-tokens": b"295",
        b"x-ratelimit-reset-tokens": b"1.1s",
    }
    assert [line.unit for line in context.trace.limits].count("requests") == 2
    for _ in range(2):
        await limits.on_request(request())
    refused = request()
    assert await refusal(limits, refused) is not None
    assert (b"x-ratelimit-remaining-requests", b"0") in refused.response_headers


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, "0ms"),
        (0.0601, "61ms"),
        (1.2, "1.2s"),
        (59.99, "60s"),
        (90, "1m30s"),
        (7505, "2h5m5s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, told: str) -> None:
    assert format_duration(seconds) == told


async def test_limits_on_a_model_count_that_model_alone(clock: Clock) -> None:
    limits = in_force(clock, limit("requests", 1, model="big"), limit("requests", 0, model="other"))
    assert await refusal(limits, request()) is None
    refused = await refusal(limits, request())
    assert refused is not None
    assert "for 'big'" in refused.message


async def test_a_stream_goes_on_past_what_was_expected_until_the_limit_ends_it(
    clock: Clock,
) -> None:
    limits = in_force(clock, limit("tokens", 400))
    context = request(prompt=10, most=None)
    await limits.on_request(context)
    told, ends = 0, None
    while ends is None:
        told += 7
        ends = deliver(limits, context, 7)
    assert ends == "limit"
    assert 400 < told + 10 <= 400 + 7
    leave(limits, context, "stopped")
    refused = await refusal(limits, request())
    assert refused is not None
    assert "Used: 402 tokens." in refused.message


async def test_a_budget_ends_a_stream_as_a_budget_and_is_renewed_at_midnight(clock: Clock) -> None:
    budget = 10 * 1_000 + 20 * 10_000
    limits = in_force(clock, limit("nano_dollars", budget, "day", "project"), prices=(PRICE,))
    context = request(prompt=10, most=1)
    await limits.on_request(context)
    assert deliver(limits, context, 20) is None
    assert deliver(limits, context, 1) == "budget"
    leave(limits, context, "stopped")
    let_in, ended = context.trace.limits
    assert (let_in.unit, let_in.fits) == (ended.unit, True)
    assert (ended.used, ended.asked, ended.limit, ended.fits) == (budget, 10_000, budget, False)
    refused = await refusal(limits, request(prompt=10, most=1))
    assert refused is not None
    assert (refused.status, refused.code) == (429, "insufficient_quota")
    assert "the project's budget of $0.00021 per day. Used: $0.00022." in refused.message
    assert "Possible cost of this request: $0.00002." in refused.message
    assert refused.retry_after_s == 12 * 3600
    clock.now += 12 * 3600
    assert await refusal(limits, request(prompt=10, most=1)) is None


async def test_what_a_prompt_really_was_and_what_was_cached_is_what_counts(clock: Clock) -> None:
    limits = in_force(
        clock,
        limit("input_tokens", 1000),
        limit("nano_dollars", 10**9, "month"),
        prices=(PRICE,),
    )
    context = request(prompt=20, most=5)
    await limits.on_request(context)
    context.delivered.cached_tokens = 400
    assert deliver(limits, context, 5, prompt=500) is None
    leave(limits, context)
    again = request(prompt=20, most=5)
    await limits.on_request(again)
    used = {line.unit: line.used for line in again.trace.limits}
    assert used == {
        "input_tokens": 500,
        "nano_dollars": 100 * 1_000 + 400 * 100 + 5 * 10_000,
    }


async def test_a_prompt_that_is_longer_than_estimated_holds_no_more_of_the_answer(
    clock: Clock,
) -> None:
    limits = in_force(clock, limit("tokens", 100))
    await limits.on_request(context := request(prompt=10, most=5))
    assert deliver(limits, context, 1, prompt=20) is None
    refused = await refusal(limits, request(prompt=85))
    assert refused is not None
    assert "Used: 25 tokens." in refused.message


async def test_a_request_that_got_nothing_because_of_us_costs_nothing(clock: Clock) -> None:
    limits = in_force(clock, limit("requests", 1), limit("concurrency", 1), limit("tokens", 100))
    for replica in ("", "replica", ""):
        context = request()
        await limits.on_request(context)
        leave(limits, context, "failed" if replica else "cancelled", replica)
    context = request()
    await limits.on_request(context)
    leave(limits, context, "cancelled")
    refused = await refusal(limits, request())
    assert refused is not None
    assert "1 request per minute" in refused.message


@pytest.mark.parametrize("status", ["cancelled", "stopped"])
async def test_who_leaves_or_is_out_of_time_before_the_first_token_has_used_the_prompt(
    clock: Clock, status: RequestStatus
) -> None:
    limits = in_force(
        clock,
        limit("input_tokens", 30),
        limit("nano_dollars", 31_000, "day"),
        prices=(msgspec.structs.replace(PRICE, output=1),),
    )
    for _ in range(2):
        context = request(prompt=15, most=1)
        await limits.on_request(context)
        leave(limits, context, status)
    refused = await refusal(limits, request(prompt=15, most=1))
    assert refused is not None
    assert "Used: 30 input tokens." in refused.message
    clock.now += 62
    assert await refusal(limits, request(prompt=30, most=1)) is None, "nobody pays for that"


async def test_who_leaves_before_a_whole_answer_has_used_what_was_made_of_it(clock: Clock) -> None:
    """Nobody pays for it, but a replica made it: who left all answers just before their ends had no limit."""
    dollars = limit("nano_dollars", 10**6)
    limits = in_force(clock, limit("output_tokens", 30), dollars, prices=(PRICE,))
    context = request(most=20)
    await limits.on_request(context)
    assert deliver(limits, context, 19) is None
    context.delivered.reset()
    leave(limits, context, "cancelled")
    refused = await refusal(limits, request(most=20))
    assert refused is not None
    assert "Used: 19 output tokens." in refused.message


async def test_places_come_back_when_requests_end(clock: Clock) -> None:
    limits = in_force(clock, limit("concurrency", 2))
    running = [request(), request()]
    for context in running:
        await limits.on_request(context)
    refused = await refusal(limits, request())
    assert refused is not None
    assert (refused.status, refused.retry_after_s) == (429, 1.0)
    assert "the key's limit of 2 requests at a time. Running: 2 requests." in refused.message
    leave(limits, running.pop())
    assert await refusal(limits, request()) is None


async def test_expectations_follow_what_answers_were(clock: Clock) -> None:
    limits = in_force(clock, limit("tokens", 10**9))
    for _ in range(60):
        context = request(most=None)
        await limits.on_request(context)
        deliver(limits, context, 40)
        leave(limits, context)
    context = request(prompt=10, most=None)
    await limits.on_request(context)
    [line] = context.trace.limits
    assert 35 <= line.asked - 10 <= 60


async def test_a_limit_that_is_changed_keeps_what_is_in_use(clock: Clock) -> None:
    limits = in_force(clock, limit("requests", 1), limit("concurrency", 1))
    context = request()
    await limits.on_request(context)
    limits.apply_snapshot(directory(limit("requests", 2), limit("concurrency", 2)))
    assert await refusal(limits, request()) is None
    assert await refusal(limits, request()) is not None
    limits.apply_snapshot(directory(limit("requests", 1)))
    assert await refusal(limits, request()) is not None
    limits.apply_snapshot(directory())
    assert await refusal(limits, request()) is None
    leave(limits, context)


async def test_a_key_and_what_it_was_rotated_into_share_their_limits(clock: Clock) -> None:
    def held_by(key: str) -> AccountSnapshot:
        return msgspec.structs.replace(
            directory(msgspec.structs.replace(limit("requests", 2), owner=key)),
            successors={"k0": "k1", "k1": "k2"},
        )

    limits = Gate(LocalQuotaBackend(), clock)
    limits.apply_snapshot(directory(msgspec.structs.replace(limit("requests", 2), owner="k0")))
    await limits.on_request(request(msgspec.structs.replace(CALLER, key="k0")))
    limits.apply_snapshot(held_by("k2"))
    await limits.on_request(request(msgspec.structs.replace(CALLER, key="k1")))
    for key in ("k0", "k1", "k2"):
        assert await refusal(limits, request(msgspec.structs.replace(CALLER, key=key))) is not None
    assert await refusal(limits, request(OTHER)) is not None, "that is k2"
    assert await refusal(limits, request(msgspec.structs.replace(CALLER, key="k3"))) is None


async def test_after_a_restart_the_ledger_tells_what_was_used(clock: Clock, tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/argosy.db")
    store.migrate()
    store.ledger.add_records(
        [row(number, NOON - age) for number, age in enumerate((30, 3000, 4000, 90_000))]
    )
    limits = in_force(
        clock,
        limit("requests", 100, "hour"),
        limit("tokens", 10_000, "month", "project"),
        limit("nano_dollars", 10**6, "day", "organisation"),
        limit("requests", 100, "month", "user", "big"),
        limit("requests", 100, "month", "user", "small"),
        limit("requests", 100, "second"),
    )
    await limits.seed_usage(store.ledger.sum_by_owner)
    context = request(prompt=10, most=5)
    await limits.on_request(context)
    used = [(line.unit, line.window, line.used) for line in context.trace.limits]
    assert used == [
        ("requests", "hour", 2),
        ("requests", "second", 0),
        ("requests", "month", 4),
        ("tokens", "month", 4 * 110),
        ("nano_dollars", "day", 3 * 7),
    ]
    leave(limits, context)
    clock.now += 1300.0
    context = request(prompt=10, most=5)
    await limits.seed_usage(store.ledger.sum_by_owner)
    await limits.on_request(context)
    assert context.trace.limits[0].used == 2  # the one at 3000 s is past
    store.close()


async def test_thousands_of_limits_are_looked_up_together(clock: Clock) -> None:
    """A gateway that starts waits for it."""
    asked = list[float]()

    def spent(kind: str, owners: Collection[str], since: float) -> dict[str, list[UsageReportRow]]:
        assert (kind, len(owners)) == ("key", 3000)
        asked.append(since)
        return {owner: [UsageReportRow(model="big", requests=int(owner))] for owner in owners}

    limits = Gate(LocalQuotaBackend(), clock)
    some = limit("requests", 3000, "minute"), limit("requests", 5000, "month")
    every = [
        msgspec.structs.replace(one, id=f"{one.id}{number}", owner=str(number))
        for one in some
        for number in range(3000)
    ]
    limits.apply_snapshot(directory(*every))
    await limits.seed_usage(spent)
    assert len(asked) == len(set(asked)) <= 10
    context = request(msgspec.structs.replace(CALLER, key="2000"))
    await limits.on_request(context)
    assert [line.used for line in context.trace.limits] == [2000, 2000]


async def test_what_a_gateway_that_died_had_not_settled_counts_at_the_next_start(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/argosy.db"
    spool = UsageLog(usage_log_folder(url))
    spool.allocate_slot(row(1, time.time())).set_counts(100, 0, 23)
    spool.close()
    books = await AccountingService.open(StoreConfig(url=url))
    limits = Gate(LocalQuotaBackend())
    limits.apply_snapshot(directory(limit("tokens", 10_000, "month")))
    await limits.seed_usage(books.store.ledger.sum_by_owner)
    context = request()
    await limits.on_request(context)
    assert context.trace.limits[0].used == 123
    await books.close()


def row(number: int, ended_at: float) -> UsageRecord:
    return UsageRecord(
        request=f"r{number}",
        organisation="org",
        project="shop",
        key="k1",
        user="ann",
        model="big",
        started_at=ended_at - 1.0,
        ended_at=ended_at,
        status="completed",
        input_tokens=100,
        output_tokens=10,
        nano_dollars=7,
    )


@settings(max_examples=50)
@given(
    most=st.integers(30, 2000),
    pieces=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    streams=st.integers(1, 12),
)
def test_hammering_passes_no_limit_by_more_than_a_piece_a_stream(
    most: int, pieces: list[int], streams: int
) -> None:
    clock = Clock()
    limits = in_force(clock, limit("tokens", most, "hour"), limit("output_tokens", most, "day"))
    delivered, overrun = 0, 0

    async def stream(number: int) -> None:
        nonlocal delivered, overrun
        for again in range(4):
            context = request(prompt=10, most=None if number % 2 else 30)
            if await refusal(limits, context) is not None:
                continue
            ends = None
            for piece in pieces * (1 + (number + again) % 3):
                await asyncio.sleep(0)
                ends = deliver(limits, context, piece)
                if ends is not None:
                    overrun += piece
                    break
            delivered += 10 + context.delivered.output_tokens
            leave(limits, context, "completed" if ends is None else "stopped")

    async def hammer() -> None:
        await asyncio.gather(*(stream(number) for number in range(streams)))

    asyncio.run(hammer())
    assert delivered <= most + overrun


def test_a_system_clock_that_is_set_back_does_not_stop_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([100.0, 101.0, 50.0, 51.5, 200.0])
    monkeypatch.setattr("time.time", lambda: next(times))
    clock = SteadyClock()
    assert [clock() for _ in range(5)] == [100.0, 101.0, 101.0, 102.5, 251.0]


def test_settings_say_where_the_shared_state_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_quota_backend(LimitsConfig()), LocalQuotaBackend)
    for wrong in ("http://nowhere", "redis://nowhere:66000/0", "redis://user:sec/ret@nowhere"):
        with pytest.raises(ValueError, match=r"Redis URL is not valid .*Write redis://") as caught:
            open_quota_backend(LimitsConfig(redis=wrong))
        assert "sec" not in str(caught.value)
    with pytest.raises(ValueError, match="set the environment variable NOT_THERE"):
        open_quota_backend(LimitsConfig(redis="redis://nowhere", password_env="NOT_THERE"))
    with pytest.raises(ValueError, match="add redis"):
        open_quota_backend(LimitsConfig(password_env="HOME"))
