"""Three gateways on one Redis: never more than the limit, and what happens when a gateway or Redis is gone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs
from tests.support.limit_harness import (
    Gate,
    deliver,
    directory,
    leave,
    limit,
    refusal,
    request,
)
from tests.support.quota_authority import Authority
from tests.support.services import RedisServer, running_redis

from argosy.gateway.request_context import RequestContext
from argosy.policy import LeaseGrant, LeaseRequest, calendar_bounds
from argosy.protocol import ApiError
from argosy.store import Limit, QuotaDemand, QuotaFailureMode, UsageReportRow, steady_clock
from argosy.store.redis_quota_backend import RedisQuotaBackend
from argosy.telemetry import QuotaBackendGauges

PATIENCE_S = 30.0
ROOT = Path(__file__).resolve().parents[3]
CHILD = "tests.support.limits_process"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis of its own, which the test may kill."""
    with running_redis() as server:
        yield server


@contextlib.asynccontextmanager
async def gateways(
    server: RedisServer,
    *limits: Limit,
    count: int = 3,
    unsure: QuotaFailureMode = "open",
    wait_s: float = 10.0,
    alive_s: float = 5.0,
) -> AsyncIterator[list[Gate]]:
    """Gateways that know these limits. They are patient, since the machine may be busy."""
    states = [
        RedisQuotaBackend(server.url, timeout_s=wait_s, gateway_ttl_s=alive_s) for _ in range(count)
    ]
    stages = [Gate(state) for state in states]
    for stage in stages:
        stage.apply_snapshot(directory(*limits, unsure=unsure))
        await stage.start()
    try:
        yield stages
    finally:
        for stage in stages:
            await stage.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for it."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 - what is waited for is elsewhere
            await asyncio.sleep(0.02)


async def let_in(stage: Gate) -> RequestContext | None:
    context = request()
    return context if await refusal(stage, context) is None else None


async def test_hammering_three_gateways_lets_no_more_requests_in_than_the_limit(
    server: RedisServer,
) -> None:
    count = 0
    async with gateways(server, limit("requests", 100, "hour")) as stages:
        for _ in range(3):
            tried = [let_in(stage) for stage in stages for _ in range(100)]
            count += sum(context is not None for context in await asyncio.gather(*tried))
        refused = await refusal(stages[0], request())
        assert refused is not None
        assert refused.code == "rate_limit_exceeded"
        assert "the key's limit of 100 requests per hour" in refused.message
    assert 90 <= count <= 100
    assert await _kept(server, "key-requests-hour-None") == count


@pytest.mark.parametrize("kept", [limit("tokens", 100), limit("tokens", 100, "day")])
async def test_what_never_fits_is_said_so_without_redis_and_disturbs_nobody(
    server: RedisServer, kept: Limit
) -> None:
    async with gateways(server, kept, count=1, unsure="closed") as [stage]:
        assert await let_in(stage) is not None  # there is a grant from now on
        refused = await refusal(stage, request(prompt=200))
        assert refused is not None
        assert refused.status == 413
        assert await let_in(stage) is not None  # though others have just asked for too much
        server.process.kill()

        async def lost() -> bool:
            told = stage.read_quota_status()
            return told is not None and not told.is_connected

        await until(lost)
        refused = await refusal(stage, request(prompt=200))
        assert refused is not None
        assert refused.status == 413


async def test_streams_of_three_gateways_deliver_no_more_than_the_limit_and_some_pieces(
    server: RedisServer,
) -> None:
    most, piece = 20_000, 5
    delivered = stopped = refused = 0

    async def stream(stage: Gate, number: int) -> None:
        nonlocal delivered, stopped, refused
        context = request(prompt=10, most=1)  # and more comes than that
        if await refusal(stage, context) is not None:
            refused += 1
            return
        ends = None
        for _ in range(20 + number * 7 % 100):
            await asyncio.sleep(0.002)  # a stream has a pace
            ends = deliver(stage, context, piece)
            if ends is not None:
                stopped += 1
                break
        delivered += 10 + context.delivered.output_tokens
        leave(stage, context, "completed" if ends is None else "stopped")

    async with gateways(server, limit("tokens", most, "hour"), limit("requests", 10**6)) as stages:
        while refused < 45:
            refused = 0
            await asyncio.gather(*(stream(s, n) for n, s in enumerate(stages * 15)))
    assert stopped > 0
    # Past the limit: what the streams that were lent to got until Redis had said no.
    assert 0.75 * most <= delivered <= most + 45 * 20 * piece
    assert await _kept(server, "key-tokens-hour-None") == delivered


async def test_what_runs_at_a_time_is_limited_over_all_gateways(server: RedisServer) -> None:
    running = most = done = 0

    async def run(stage: Gate) -> None:
        nonlocal running, most, done
        while (context := await let_in(stage)) is None:  # noqa: ASYNC110 - as a client would
            await asyncio.sleep(0.01)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        done += 1
        leave(stage, context)

    async with gateways(server, limit("concurrency", 7)) as stages:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(run(stage) for stage in stages * 20))
    assert (done, running) == (60, 0)
    assert 5 <= most <= 7


async def test_a_gateway_that_is_killed_gives_back_what_it_ran(server: RedisServer) -> None:
    async with gateways(server, limit("concurrency", 3), count=1, alive_s=1.0) as [stage]:
        with child(server, "3") as process:
            assert process.stdout is not None
            assert (await asyncio.to_thread(process.stdout.readline)).strip() == "3"
            assert await let_in(stage) is None
            process.kill()
        await until(lambda: _is_in(stage))
        assert await let_in(stage) is not None
        assert await let_in(stage) is not None


async def test_a_gateway_that_leaves_gives_back_what_it_had(server: RedisServer) -> None:
    limits = limit("requests", 100, "day"), limit("concurrency", 10)
    async with gateways(server, *limits, count=2) as [first, second]:
        for _ in range(10):
            context = await let_in(first)
            assert context is not None
            leave(first, context)
        await first.close()
        got = [await let_in(second) for _ in range(91)]
        assert [context is not None for context in got] == [True] * 10 + [False] * 81
        for context in got[:10]:
            assert context is not None
            leave(second, context)
        for _ in range(80):
            context = await let_in(second)
            assert context is not None
            leave(second, context)
        assert await let_in(second) is None


async def test_what_a_gateway_does_not_use_goes_to_the_others(server: RedisServer) -> None:
    async with gateways(server, limit("requests", 60), count=2) as [idle, busy]:
        for _ in range(20):
            assert await let_in(idle) is not None
        count = 0

        async def forty() -> bool:
            nonlocal count
            count += await let_in(busy) is not None
            return count == 40

        await until(forty)
        assert await let_in(busy) is None


async def test_what_is_too_little_for_one_request_is_there_for_streams_and_smaller_ones(
    server: RedisServer,
) -> None:
    now = steady_clock()
    state = RedisQuotaBackend(server.url, clock=lambda: now, timeout_s=10.0)
    await state.start()
    try:
        tokens = state.create_meter(limit("tokens", 1000, "hour"))
        others = state.create_meter(limit("requests", 1000, "hour"))
        assert await state.acquire([(tokens, 100)])
        tokens.add(100, now)
        now += 10.0
        for _ in range(6):  # until it is not spent any more, so nothing is held ahead
            assert await state.acquire([(others, 1)])
            now += 10.0
        assert await state.acquire([(tokens, 950)])
        assert tokens.remaining(now) == 900
        assert await state.acquire([(others, 1)])
        assert tokens.remaining(now) == 0
        assert state.overdraw([(tokens, 32)], now)
        assert await state.acquire([(tokens, 64)])
        assert tokens.remaining(now) >= 64
        now += 1.0
        assert await state.acquire([(tokens, 900)])
        assert tokens.remaining(now) == 900
        tokens.add(900, now)
        assert not state.overdraw([(tokens, 32)], now)
    finally:
        await state.close()


@pytest.mark.parametrize("kept", [limit("tokens", 100, "hour"), limit("tokens", 100, "day")])
@pytest.mark.parametrize("pause_s", [0.1, 1.5])
async def test_slow_streams_end_at_the_limit_too(
    server: RedisServer, kept: Limit, pause_s: float
) -> None:
    now = calendar_bounds("day", steady_clock())[0] + 3600.0
    state = RedisQuotaBackend(server.url, clock=lambda: now, timeout_s=10.0)
    stage = Gate(state, lambda: now)
    stage.apply_snapshot(directory(kept))
    await stage.start()
    try:
        others = state.create_meter(limit("requests", 100_000, "hour"))
        context = request(most=None)
        assert await refusal(stage, context) is None
        for _ in range(200):
            if deliver(stage, context, 1) is not None:
                break
            assert await state.acquire([(others, 1)])  # so Redis has answered
            now += pause_s
        assert 90 <= context.delivered.output_tokens <= 92
    finally:
        await stage.close()


async def test_while_redis_hangs_open_projects_go_on_with_their_share_and_it_is_told_later(
    server: RedisServer,
) -> None:
    thirty = limit("requests", 30, "hour")
    # A gateway that a busy machine holds up for seconds is one of three all the same.
    async with gateways(server, thirty, wait_s=0.3, alive_s=60.0) as stages:
        for stage in stages:  # each is told how many there are
            assert await let_in(stage) is not None
        with stopped(server):
            counts = [sum([await let_in(s) is not None for _ in range(40)]) for s in stages]
            context = request()
            refused = await refusal(stages[1], context)
            assert refused is not None
            assert refused.status == 429
            assert (b"x-ratelimit-remaining-requests", b"20") in context.response_headers
        assert counts == [9, 9, 9]

        async def told() -> bool:
            return await _kept(server, "key-requests-hour-None") == 30

        await until(told)
        assert not any([await let_in(stage) for stage in stages for _ in range(5)])


async def test_while_redis_hangs_closed_projects_use_what_they_have_and_then_refuse(
    server: RedisServer,
) -> None:
    async with gateways(
        server, limit("requests", 300), limit("tokens", 10**6), unsure="closed", wait_s=0.3
    ) as stages:
        for stage in stages:
            assert await let_in(stage) is not None
        stream = await let_in(stages[0])
        assert stream is not None
        with stopped(server):
            refused: ApiError | None = None
            count = 0
            while refused is None:
                refused = await refusal(stages[0], request())
                count += 1
            assert count <= 300
            assert (refused.status, refused.code) == (503, "limits_unavailable")
            assert refused.retry_after_s is not None
            ends = [deliver(stages[0], stream, 1000) for _ in range(5)]
            assert ends[-1] == "limit"
        await until(lambda: _is_in(stages[0]))


@pytest.mark.parametrize("unsure", ["closed", "open"])
async def test_what_is_decided_without_redis_is_counted(
    server: RedisServer, unsure: QuotaFailureMode
) -> None:
    limits = limit("requests", 20, "hour"), limit("tokens", 1000, "hour")
    async with gateways(server, *limits, count=1, unsure=unsure) as [stage]:
        stream = await let_in(stage)
        assert stream is not None
        assert stage.read_quota_status() == QuotaBackendGauges(
            is_connected=True, degraded_allowed=0, degraded_rejected=0
        )
        server.process.kill()

        async def lost() -> bool:
            told = stage.read_quota_status()
            return told is not None and not told.is_connected

        await until(lost)
        before, refused = 0, 0
        while not refused:
            refused = await let_in(stage) is None
            before += 1
        told = stage.read_quota_status()
        assert told is not None
        assert told.degraded_rejected == 1
        assert (told.degraded_allowed > 0) == (unsure == "open")
        assert told.degraded_allowed < before
        pieces = 10 if unsure == "open" else 1
        for _ in range(pieces):  # a stream counts once, however often it asks
            deliver(stage, stream, 500 // pieces)
        on, off = (told.degraded_allowed + 1, 1) if unsure == "open" else (0, 2)
        assert stage.read_quota_status() == QuotaBackendGauges(
            is_connected=False, degraded_allowed=on, degraded_rejected=off
        )


async def test_a_redis_that_comes_back_empty_learns_from_the_ledger(server: RedisServer) -> None:
    async with gateways(
        server, limit("requests", 50, "month"), limit("concurrency", 9), count=1, wait_s=1.0
    ) as [stage]:
        assert await let_in(stage) is not None
        server.process.kill()
        server.process.wait()
        assert await let_in(stage) is not None
        with another(server):

            async def full() -> bool:
                await stage.seed_usage(
                    lambda *_: {"k1": [UsageReportRow(model="big", requests=50)]}
                )
                refused = await refusal(stage, request())
                return refused is not None and "50 requests per month" in refused.message

            await until(full)


@pytest.mark.parametrize(("unsure", "most"), [("closed", 90), ("open", 2 * 90)])
async def test_hammering_while_redis_is_killed_passes_the_limit_by_no_more_than_is_said(
    server: RedisServer, unsure: QuotaFailureMode, most: int
) -> None:
    async with gateways(server, limit("requests", 90, "hour"), unsure=unsure) as stages:
        for stage in stages:  # each is told how many there are
            assert await let_in(stage) is not None
        count = 3

        async def hammer(stage: Gate) -> None:
            nonlocal count
            for _ in range(100):
                context = await let_in(stage)
                count += context is not None
                if count == 45:
                    server.process.kill()

        await asyncio.gather(*(hammer(stage) for stage in stages))
        assert server.process.wait() == -signal.SIGKILL
    assert 45 <= count <= most


async def test_a_budget_that_is_set_later_counts_what_the_ledger_has(server: RedisServer) -> None:
    asked = list[str]()

    def spent(kind: str, owners: Collection[str], since: float) -> dict[str, list[UsageReportRow]]:
        asked.append(f"{kind} {owners}")
        return {
            "shop": [
                UsageReportRow(model="big", requests=48),
                UsageReportRow(model="small", requests=9),
            ]
        }

    async with gateways(server, count=2) as stages:
        for stage in stages:
            stage.apply_snapshot(directory(limit("requests", 50, "month", "project", "big")))
            await stage.seed_usage(spent)
            await stage.seed_usage(spent)
        assert asked == ["project {'shop'}"] * 2
        got = [await let_in(stage) is not None for stage in stages * 2]
        assert got == [True, True, False, False]
        assert await _kept(server, f"project-requests-month-big:big:{_month()}") == 50


async def test_a_redis_whose_name_moves_to_its_successor_is_followed(
    server: RedisServer, tmp_path: Path
) -> None:
    name = tmp_path / "name.sock"
    name.symlink_to(server.url.removeprefix("unix://"))
    state = RedisQuotaBackend(f"unix://{name}", timeout_s=1.0)
    await state.start()
    try:
        assert state.is_connected
        with running_redis() as successor:
            async with Redis.from_url(server.url) as old:  # still there, as a replica of another
                await old.replicaof("127.0.0.1", 1)
            name.unlink()
            name.symlink_to(successor.url.removeprefix("unix://"))

            async def known() -> bool:
                async with Redis.from_url(successor.url) as new:
                    return await new.exists("{argosy}:gateways") == 1

            await until(known)
            assert state.is_connected
    finally:
        await state.close()


async def test_nobody_waits_for_a_redis_that_is_not_there() -> None:
    state = RedisQuotaBackend("unix:///nowhere/redis.sock")
    stage = Gate(state)
    stage.apply_snapshot(directory(limit("requests", 3)))
    await stage.start()
    assert [await let_in(stage) is not None for _ in range(4)] == [True, True, True, False]
    await stage.close()


@pytest.mark.parametrize("password", ["wrong", None])
async def test_a_redis_that_wants_another_password_says_which_setting_has_it(
    password: str | None,
) -> None:
    with running_redis() as guarded, capture_logs() as logs:
        async with Redis.from_url(guarded.url) as client:
            await client.config_set("requirepass", "right")
        state = RedisQuotaBackend(guarded.url, password)
        await state.start()
        await state.close()
    (lost,) = (entry for entry in logs if entry["event"] == "quota_backend_unavailable")
    assert "limits.password_env" in lost["reason"]


async def test_redis_grants_what_the_model_grants(server: RedisServer) -> None:
    draw = random.Random(7)
    model = Authority()
    numbers = [0, 0, 0]
    slots: dict[str, list[tuple[int, int]]] = {"hour": [], "day": [], "new": []}
    async with Redis.from_url(server.url) as redis:
        script = redis.register_script(files("argosy.store").joinpath("leases.lua").read_text())
        for _ in range(300):
            who = draw.randrange(3)
            fresh = draw.random() < 0.9 or not numbers[who]
            numbers[who] += fresh
            asks, theirs = [], []
            for name in draw.sample(["hour", "day", "new", "places"], draw.randint(1, 4)):
                kind = {"hour": "window", "places": "slots"}.get(name, "period")
                backs = draw.sample(
                    slots.get(name, []), min(draw.randrange(3), len(slots.get(name, [])))
                )
                units = [draw.randint(0, 5) for _ in backs]
                seeds, owed = (
                    tuple((draw.uniform(0, 7000), draw.randrange(9)) for _ in range(count))
                    for count in (draw.randrange(3), draw.choice([0, 0, 2]))
                )
                ask = LeaseRequest(
                    kind=kind,  # type: ignore[arg-type]
                    limit=draw.choice([100, 200, 2**53 - 1]),
                    seconds=3600.0 if name == "hour" else 0.0,
                    lease_s=2.0,
                    keep_s=9000.0,
                    slot={"day": 1000, "new": int(steady_clock()) + 10**6}.get(name, 0),
                    need=draw.choice([0, draw.randrange(30)]),
                    ahead=draw.choice([0, draw.randrange(30)]),
                    kept=draw.choice([0, 0, draw.randrange(9)]),
                    owed=owed,
                    back=tuple((real, n) for (real, _), n in zip(backs, units, strict=True)),
                    seeds=draw.choice([None, seeds]),
                )
                asks.append((name, ask))
                back = tuple((ours, n) for (_, ours), n in zip(backs, units, strict=True))
                theirs.append((name, replace(ask, back=back)))
            body = {
                "gateway": f"g{who}",
                "number": numbers[who],
                "alive_s": 1000.0,
                "asks": [ask for _, ask in asks],
            }
            keys = [f"gateway:g{who}", "gateways", *(name for name, _ in asks)]
            packed = await script(keys=keys, args=[msgspec.msgpack.encode(body)])
            answer = msgspec.msgpack.decode(packed, type=dict[str, int | list[LeaseGrant]])
            granted = answer["grants"]
            expected = model.exchange(f"g{who}", numbers[who], 1000.0, theirs, steady_clock())
            assert answer["gateways"] == len(model.alive) or not fresh
            assert isinstance(granted, list)
            assert [(g.granted, g.used, g.known) for g in granted] == [
                (g.granted, g.used, g.known) for g in expected
            ]
            for (name, _), real, ours in zip(asks, granted, expected, strict=fresh):
                if fresh and name in slots and real.granted:
                    slots[name].append((real.slot, ours.slot))


async def test_a_limit_is_free_again_in_time_though_the_clock_of_redis_was_set_back(
    server: RedisServer,
) -> None:
    """Else it would be used up until that clock is where it was, and where who has died held places, so would they."""
    hour, places = limit("requests", 3, "hour"), limit("concurrency", 1)
    async with gateways(server, hour, count=1) as [stage]:
        assert [await _is_in(stage) for _ in range(4)] == [True, True, True, False]
    async with Redis.from_url(server.url) as redis:
        key, later = f"{{argosy}}:limit:{hour.id}", (await redis.time())[0] + 43_200
        for at in await redis.hkeys(key):
            if at != b"known":
                await redis.hset(key, str(later // 60), await redis.hget(key, at))
                await redis.hdel(key, at)
        await redis.hset(f"{{argosy}}:limit:{places.id}", "dead", 1)
        await redis.zadd("{argosy}:gateways", {"dead": later})
    async with gateways(server, hour, count=1) as [stage]:
        refused = await refusal(stage, request())
        assert refused is not None
        assert refused.retry_after_s is not None
        assert refused.retry_after_s < 3700
        assert await _kept(server, hour.id) == 3
    async with gateways(server, places, count=1, alive_s=0.5) as [stage]:

        async def is_in() -> bool:
            return await _is_in(stage)

        await until(is_in)


async def test_a_rotated_key_finds_its_limits_as_used_as_they_were(server: RedisServer) -> None:
    limited = limit("requests", 10, "hour")
    moved = msgspec.structs.replace(
        directory(msgspec.structs.replace(limited, owner="k2")), successors={"k1": "k2"}
    )
    async with gateways(server, limited) as stages:
        before = [await _is_in(stage) for stage in stages for _ in range(2)]
        for stage in stages:
            stage.apply_snapshot(moved)
        after = [await _is_in(stage) for stage in stages for _ in range(10)]
    assert all(before)
    assert 9 <= sum(before) + sum(after) <= 10


def _month() -> int:
    return int(calendar_bounds("month", steady_clock())[0])


async def _is_in(stage: Gate) -> bool:
    return await let_in(stage) is not None


async def _kept(server: RedisServer, name: str) -> int:
    """Units that Redis counts for a limit."""
    async with Redis.from_url(server.url) as redis:
        fields = await redis.hgetall(f"{{argosy}}:limit:{name}")
    return sum(int(units) for at, units in fields.items() if at != b"known")


@contextlib.contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    """Redis hangs meanwhile."""
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def another(server: RedisServer) -> Iterator[None]:
    """A new Redis in the place of one that is dead."""
    command = server.process.args
    assert isinstance(command, list)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def child(server: RedisServer, requests: str) -> Iterator[subprocess.Popen[str]]:
    """Another gateway, in a process, with so many requests running."""
    command = [sys.executable, "-m", CHILD, server.url, requests]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


class Crowded(RedisQuotaBackend):
    """Others take what there is before who has asked for it can, three times."""

    times = 3

    async def acquire(self, demand: QuotaDemand) -> bool:
        answered = await super().acquire(demand)
        if self.times:
            self.times -= 1
            for counter, _ in demand:
                counter.add(counter.remaining(steady_clock()), steady_clock())
        return answered


async def test_whose_room_others_take_first_asks_again_while_there_is_more(
    server: RedisServer,
) -> None:
    """It was refused, until the day was over where that was the limit's window."""
    stage = Gate(Crowded(server.url, timeout_s=10.0))
    stage.apply_snapshot(directory(limit("tokens", 10**9, "day"), limit("requests", 10**9)))
    await stage.start()
    try:
        assert await refusal(stage, request()) is None
    finally:
        await stage.close()
