"""Limits that three gateways share in Redis: they are never exceeded, also while a gateway or Redis is down."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs
from tests.support.limit_harness import (
    PRINCIPAL,
    complete,
    deliver,
    expect_rejection,
    find_rejection,
    is_admitted,
    make_context,
    make_limit,
    make_snapshot,
)
from tests.support.quota_authority import FakeQuotaAuthority
from tests.support.services import RedisServer, running_redis
from tests.support.waiting import until

from argosy.gateway.filters import LimitFilter
from argosy.gateway.pool.pool import Pool
from argosy.gateway.request_context import RequestContext
from argosy.policy import LeaseGrant, LeaseRequest, calendar_bounds
from argosy.protocol import ApiError
from argosy.store import (
    Clock,
    Limit,
    Price,
    QuotaDemand,
    QuotaFailureMode,
    UsageReportRow,
    steady_clock,
)
from argosy.store.redis_quota_backend import RedisQuotaBackend
from argosy.telemetry import QuotaBackendGauges

WAIT_TIMEOUT_S = 30.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """Redis of this test alone, which the test may kill."""
    with running_redis() as server:
        yield server


@contextlib.asynccontextmanager
async def open_filter(
    backend: RedisQuotaBackend,
    *limits: Limit,
    failure_mode: QuotaFailureMode = "open",
    clock: Clock = steady_clock,
) -> AsyncIterator[LimitFilter]:
    limit_filter = LimitFilter(backend, clock)
    limit_filter.apply_snapshot(make_snapshot(*limits, failure_mode=failure_mode))
    await limit_filter.start()
    try:
        yield limit_filter
    finally:
        await limit_filter.close()


@contextlib.asynccontextmanager
async def shared_filters(
    server: RedisServer,
    *limits: Limit,
    count: int = 3,
    failure_mode: QuotaFailureMode = "open",
    timeout_s: float = 10.0,
    gateway_ttl_s: float = 5.0,
) -> AsyncIterator[list[LimitFilter]]:
    """Open one limit filter per gateway. The Redis timeout is long, because the machine may be busy."""
    backends = [
        RedisQuotaBackend(server.url, timeout_s=timeout_s, gateway_ttl_s=gateway_ttl_s)
        for _ in range(count)
    ]
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(open_filter(each, *limits, failure_mode=failure_mode))
            for each in backends
        ]


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while not await condition():  # noqa: ASYNC110 - the condition concerns another process
            await asyncio.sleep(0.02)


async def admit(limits: LimitFilter) -> RequestContext | None:
    """Send one request. Returns its context, or None if it is rejected."""
    context = make_context()
    return context if await find_rejection(limits, context) is None else None


async def count_admitted(limits: LimitFilter, attempts: int) -> int:
    return sum([await is_admitted(limits) for _ in range(attempts)])


async def counted_units(server: RedisServer, name: str) -> int:
    """Return the units that Redis counts for a limit."""
    async with Redis.from_url(server.url) as redis:
        fields = await redis.hgetall(f"{{argosy}}:limit:{name}")
    return sum(int(units) for slot, units in fields.items() if slot.isdigit())


# --- limits under load ---------------------------------------------------------------------------


async def test_concurrent_requests_stay_within_limit(server: RedisServer) -> None:
    limit = make_limit("requests", 100, "hour")
    async with shared_filters(server, limit) as filters:
        admitted = [await asyncio.gather(*map(is_admitted, filters * 12)) for _ in range(25)]
        error = await expect_rejection(filters[0], make_context())
        assert error.code == "rate_limit_exceeded"
        assert "the key's limit of 100 requests per hour" in error.message
    total = sum(map(sum, admitted))
    assert 90 <= total <= 100
    assert await counted_units(server, limit.id) == total


async def test_requests_at_once_exceed_a_budget_by_less_than_one(server: RedisServer) -> None:
    """Each costs the most that it may, which is known at its end only."""
    price = Price(model="big", input=1, cached_input=0, output=1_000)
    limit = make_limit("nano_dollars", 7_300_000, "day")
    spent = []
    async with shared_filters(server, limit) as filters:
        for each in filters:
            each.apply_snapshot(make_snapshot(limit, prices=[price]))
        for _ in range(12):
            contexts = [make_context(max_tokens=1_000) for _ in filters * 4]
            rejections = await asyncio.gather(*map(find_rejection, filters * 4, contexts))
            for limits, context, rejection in zip(filters * 4, contexts, rejections, strict=True):
                if rejection is None:
                    context.delivered.output_tokens = 1_064
                    complete(limits, context)
                    spent.append(context.bill.nano_dollars)
        assert "budget of $0.0073 per day" in (await expect_rejection(filters[0], context)).message
        await wait_until(lambda: is_counted(server, limit, sum(spent)))
    most = max(spent) + 9_000
    assert limit.amount - most < sum(spent) < limit.amount + most


async def is_counted(server: RedisServer, limit: Limit, units: int) -> bool:
    day = f"{limit.id}:{calendar_bounds('day', steady_clock())[0]:.0f}"
    return await counted_units(server, day) == units


async def test_streams_exceed_token_limit_only_by_overdraft(server: RedisServer) -> None:
    limit, chunk = 2_000, 1
    delivered = stopped = rejected = 0

    async def stream(limits: LimitFilter, number: int) -> None:
        nonlocal delivered, stopped, rejected
        context = make_context(prompt_tokens=10, max_tokens=1)  # the replica sends up to 64
        if await find_rejection(limits, context) is not None:
            rejected += 1
            return
        finish_reason = None
        for _ in range(20 + number * 7 % 45):
            await asyncio.sleep(0.002)  # tokens arrive one after another
            finish_reason = deliver(limits, context, chunk)
            if finish_reason is not None:
                stopped += 1
                break
        delivered += 10 + context.delivered.output_tokens
        complete(limits, context, "completed" if finish_reason is None else "stopped")

    limits = make_limit("tokens", limit, "hour"), make_limit("requests", 10**6)
    async with shared_filters(server, *limits) as filters:
        while rejected < 45:
            rejected = 0
            await asyncio.gather(*(stream(f, n) for n, f in enumerate(filters * 15)))
    assert stopped > 0
    # The overdraft is what the streams deliver until Redis has refused more.
    assert 0.75 * limit <= delivered <= limit + 45 * 20 * chunk
    assert await counted_units(server, "key-tokens-hour-None") == delivered


async def test_concurrency_limit_holds_over_all_gateways(server: RedisServer) -> None:
    running = max_running = completed = 0

    async def run(limits: LimitFilter) -> None:
        nonlocal running, max_running, completed
        while (context := await admit(limits)) is None:  # noqa: ASYNC110 - as a client retries
            await asyncio.sleep(0.01)
        running += 1
        max_running = max(max_running, running)
        await asyncio.sleep(0.002)
        running -= 1
        completed += 1
        complete(limits, context)

    async with shared_filters(server, make_limit("concurrency", 7)) as filters:
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            await asyncio.gather(*(run(each) for each in filters * 9))
    assert (completed, running) == (27, 0)
    assert 5 <= max_running <= 7


@pytest.mark.parametrize(
    ("window", "pause_s"),
    [
        ("hour", 0.1),
        ("day", 1.5),
        pytest.param("hour", 1.5, marks=pytest.mark.exhaustive),
        pytest.param("day", 0.1, marks=pytest.mark.exhaustive),
    ],
)
async def test_slow_stream_ends_at_limit(server: RedisServer, window: str, pause_s: float) -> None:
    now = calendar_bounds("day", steady_clock())[0] + 3600.0
    backend = RedisQuotaBackend(server.url, clock=lambda: now, timeout_s=10.0)
    limit = make_limit("tokens", 100, window)  # type: ignore[arg-type]
    async with open_filter(backend, limit, clock=lambda: now) as limits:
        other_meter = backend.create_meter(make_limit("requests", 100_000, "hour"))
        context = make_context(max_tokens=None)
        assert await find_rejection(limits, context) is None
        for _ in range(200):
            if deliver(limits, context, 1) is not None:
                break
            assert await backend.acquire([(other_meter, 1, 1)])  # waits for a reply of Redis
            now += pause_s
        assert 90 <= context.delivered.output_tokens <= 92


class ContendedBackend(RedisQuotaBackend):
    """Backend whose grants are used by other requests before the first three requests can use them."""

    num_stolen_grants = 3

    async def acquire(self, demand: QuotaDemand) -> bool:
        acquired = await super().acquire(demand)
        if self.num_stolen_grants:
            self.num_stolen_grants -= 1
            for meter, _, _ in demand:
                meter.add(meter.remaining(steady_clock()), steady_clock())
        return acquired


async def test_request_acquires_again_after_others_used_its_grant(server: RedisServer) -> None:
    backend = ContendedBackend(server.url, timeout_s=10.0)
    of_key = make_limit("tokens", 10**9, "day"), make_limit("requests", 10**9)
    async with open_filter(backend, *of_key) as limits:
        assert await is_admitted(limits)


async def test_utility_call_acquires_request_from_redis(server: RedisServer) -> None:
    async with shared_filters(server, make_limit("requests", 2, "hour"), count=1) as [limits]:
        for _ in range(2):
            async with limits.reserve_request(PRINCIPAL, "big", []):
                pass
        with pytest.raises(ApiError, match="2 requests per hour"):
            await limits.reserve_request(PRINCIPAL, "big", []).__aenter__()


# --- gateways that come and go -------------------------------------------------------------------


async def test_concurrency_slots_of_killed_gateway_are_freed(server: RedisServer) -> None:
    limit, killed = make_limit("concurrency", 3), RedisQuotaBackend(server.url, timeout_s=10.0)
    async with (
        open_filter(killed, limit) as killed_limits,
        shared_filters(server, limit, count=1, gateway_ttl_s=1.0) as [limits],
    ):
        assert await count_admitted(killed_limits, 3) == 3
        assert not await is_admitted(limits)
        assert killed._exchange_task is not None  # noqa: SLF001 - as SIGKILL, without a last message
        killed._exchange_task.cancel()  # noqa: SLF001
        await wait_until(lambda: is_admitted(limits))
        assert await count_admitted(limits, 2) == 2
        killed.is_connected = False  # it says no farewell


async def test_budget_that_a_killed_gateway_held_is_free_again(server: RedisServer) -> None:
    """A gateway that only seemed dead counts again what it holds."""
    limit = make_limit("nano_dollars", 1_200_000, "day")
    prices = [Price(model="big", input=0, cached_input=0, output=1_000)]
    stalled = RedisQuotaBackend(server.url, timeout_s=10.0, gateway_ttl_s=0.5)
    async with (
        open_filter(stalled, limit) as stalled_limits,
        shared_filters(server, limit, count=1, gateway_ttl_s=0.5) as [limits],
    ):
        contexts = [make_context(max_tokens=1_000) for _ in range(2)]
        for each in (stalled_limits, limits):
            each.apply_snapshot(make_snapshot(limit, prices=prices))
        assert await find_rejection(stalled_limits, contexts[0]) is None
        assert await find_rejection(limits, contexts[1]) is not None
        assert stalled._exchange_task is not None  # noqa: SLF001 - as SIGSTOP
        stalled._exchange_task.cancel()  # noqa: SLF001

        async def is_admitted_at_last() -> bool:
            return await find_rejection(limits, contexts[1]) is None

        await wait_until(is_admitted_at_last)
        stalled._exchange_task = asyncio.create_task(stalled._run_exchanges())  # noqa: SLF001
        for each, context in zip((stalled_limits, limits), contexts, strict=True):
            context.delivered.output_tokens = 300
            complete(each, context)
        await wait_until(lambda: is_counted(server, limit, 600_000))


async def test_stopping_gateway_returns_its_leases(server: RedisServer) -> None:
    limits = make_limit("requests", 100, "day"), make_limit("concurrency", 10)
    async with shared_filters(server, *limits, count=2) as [first, second]:
        for _ in range(10):
            context = await admit(first)
            assert context is not None
            complete(first, context)
        await first.close()
        contexts = [await admit(second) for _ in range(91)]
        assert [context is not None for context in contexts] == [True] * 10 + [False] * 81
        for context in contexts[:10]:
            assert context is not None
            complete(second, context)
        for _ in range(80):
            context = await admit(second)
            assert context is not None
            complete(second, context)
        assert not await is_admitted(second)


async def test_unused_grant_is_returned_to_other_gateways(server: RedisServer) -> None:
    async with shared_filters(server, make_limit("requests", 60), count=2) as [idle, busy]:
        assert await count_admitted(idle, 20) == 20
        admitted = 0

        async def has_rest() -> bool:
            nonlocal admitted
            admitted += await is_admitted(busy)
            return admitted == 40

        await wait_until(has_rest)
        assert not await is_admitted(busy)


async def test_limit_of_moved_alias_starts_without_usage_of_previous_model(
    server: RedisServer,
) -> None:
    limit = make_limit("requests", 2, "hour", model="big")
    async with shared_filters(server, limit, count=2) as filters:
        before = sum([await is_admitted(each) for each in filters * 2])
        for each in filters:
            each.apply_snapshot(make_snapshot(msgspec.structs.replace(limit, model="large")))
        after = 0
        for each in filters * 2:
            context = make_context()
            context.pool = Pool("large", [])
            after += await find_rejection(each, context) is None
    assert (before, after) == (2, 2)


# --- Redis is down, empty or replaced ------------------------------------------------------------


@contextlib.contextmanager
def suspended(server: RedisServer) -> Iterator[None]:
    """Suspend Redis, so that its connections stay open without replies."""
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


async def test_open_project_uses_even_share_while_redis_hangs_and_reports_it_later(
    server: RedisServer,
) -> None:
    limit = make_limit("requests", 30, "hour")
    # The TTL is long, because a busy machine may suspend a gateway for seconds.
    async with shared_filters(server, limit, timeout_s=0.3, gateway_ttl_s=60.0) as filters:
        for each in filters:  # every gateway learns the number of gateways
            assert await is_admitted(each)
        with suspended(server):
            admitted = [await count_admitted(each, 40) for each in filters]
            context = make_context()
            error = await expect_rejection(filters[1], context)
            assert error.status == 429
            assert (b"x-ratelimit-remaining-requests", b"20") in context.response_headers
        assert admitted == [9, 9, 9]

        async def is_reported() -> bool:
            return await counted_units(server, limit.id) == 30

        await wait_until(is_reported)
        assert sum([await count_admitted(each, 5) for each in filters]) == 0


async def test_closed_project_is_rejected_after_its_grant_while_redis_hangs(
    server: RedisServer,
) -> None:
    async with shared_filters(
        server,
        make_limit("requests", 300),
        make_limit("tokens", 10**6),
        failure_mode="closed",
        timeout_s=0.3,
    ) as filters:
        for each in filters:
            assert await is_admitted(each)
        limits = filters[0]
        stream = await admit(limits)
        assert stream is not None
        with suspended(server):
            error: ApiError | None = None
            attempts = 0
            while error is None:
                error = await find_rejection(limits, make_context())
                attempts += 1
            assert attempts <= 300
            assert (error.status, error.code) == (503, "limits_unavailable")
            assert error.retry_after_s is not None
            assert [deliver(limits, stream, 1000) for _ in range(5)][-1] == "limit"
        await wait_until(lambda: is_admitted(limits))


async def deliver_until_stopped(limits: LimitFilter, context: RequestContext) -> None:
    async def is_stopped() -> bool:
        return deliver(limits, context, 10) is not None

    await wait_until(is_stopped)
    complete(limits, context, "stopped")


async def test_changed_limits_apply_to_streams_of_all_gateways(server: RedisServer) -> None:
    limit, slots = make_limit("tokens", 10_000, "hour"), make_limit("concurrency", 1)
    async with shared_filters(server, limit, count=2) as filters:
        first, second = filters
        await first.on_request(stream := make_context(max_tokens=5000))
        assert deliver(first, stream, 100) is None

        def apply_limits(*limits: Limit) -> None:
            for each in filters:
                each.apply_snapshot(make_snapshot(*limits))

        apply_limits(msgspec.structs.replace(limit, amount=150))
        await deliver_until_stopped(first, stream)
        assert await find_rejection(second, make_context(max_tokens=100)) is not None
        apply_limits(limit)
        await wait_until(lambda: is_admitted(second))
        used = stream.delivered.output_tokens + 10

        apply_limits()
        await first.on_request(stream := make_context(max_tokens=5000))
        assert deliver(first, stream, 500) is None
        created = msgspec.structs.replace(limit, id="created", amount=100)
        apply_limits(created, slots)
        assert deliver(first, stream, 10) is None

        async def is_slot_taken() -> bool:
            error = await find_rejection(second, context := make_context())
            if error is None:
                complete(second, context)
            return error is not None and "at a time" in error.message

        await wait_until(is_slot_taken)
        await deliver_until_stopped(first, stream)
    assert await counted_units(server, limit.id) == used
    assert await counted_units(server, "created") == stream.delivered.output_tokens - 500


@pytest.mark.parametrize("failure_mode", ["closed", "open"])
async def test_decisions_without_redis_are_counted(
    server: RedisServer, failure_mode: QuotaFailureMode
) -> None:
    """A request above a whole limit is rejected as such, with Redis or not."""
    is_open = failure_mode == "open"
    limits_of_key = [
        make_limit("requests", 20, "hour"),
        *(make_limit("tokens", 1000, window) for window in ("hour", "minute", "day")),
    ]
    async with shared_filters(
        server, *limits_of_key, count=1, failure_mode=failure_mode, gateway_ttl_s=0.5
    ) as [limits]:

        def is_disconnected() -> bool:
            status = limits.read_quota_status()
            return status is not None and not status.is_connected

        stream = await admit(limits)
        assert stream is not None
        too_large = partial(make_context, prompt_tokens=2000)
        assert (await expect_rejection(limits, too_large())).status == 413
        assert await is_admitted(limits), "a too large request uses no units"
        assert limits.read_quota_status() == QuotaBackendGauges(
            is_connected=True, degraded_allowed=0, degraded_rejected=0
        )
        server.process.kill()
        await until(is_disconnected)
        assert (await expect_rejection(limits, too_large())).status == 413
        attempts = 1
        while await is_admitted(limits):
            attempts += 1
        status = limits.read_quota_status()
        assert status is not None
        assert status.degraded_rejected == 1
        assert (status.degraded_allowed > 0) == is_open
        assert status.degraded_allowed < attempts
        num_chunks = 10 if is_open else 1
        for _ in range(num_chunks):  # a stream counts once, whatever the number of chunks
            deliver(limits, stream, 500 // num_chunks)
        allowed, rejected = (status.degraded_allowed + 1, 1) if is_open else (0, 2)
        assert limits.read_quota_status() == QuotaBackendGauges(
            is_connected=False, degraded_allowed=allowed, degraded_rejected=rejected
        )


async def test_restarted_redis_is_seeded_from_usage_table(server: RedisServer) -> None:
    limits_of_key = make_limit("requests", 50, "month"), make_limit("concurrency", 9)
    async with shared_filters(server, *limits_of_key, count=1, timeout_s=1.0) as [limits]:
        assert await is_admitted(limits)
        server.program.stop()
        assert await is_admitted(limits)
        server.program.start()

        async def is_used_up() -> bool:
            await limits.seed_usage(lambda *_: {"k1": [UsageReportRow(model="big", requests=50)]})
            error = await find_rejection(limits, make_context())
            return error is not None and "50 requests per month" in error.message

        await wait_until(is_used_up)


async def test_new_budget_is_seeded_from_usage_table(server: RedisServer) -> None:
    queries = list[str]()

    def sum_by_owner(
        kind: str, owners: Collection[str], since: float
    ) -> dict[str, list[UsageReportRow]]:
        queries.append(f"{kind} {owners}")
        rows = [UsageReportRow(model="big", requests=48), UsageReportRow(model="small", requests=9)]
        return {"shop": rows}

    async with shared_filters(server, count=2) as filters:
        for each in filters:
            each.apply_snapshot(
                make_snapshot(make_limit("requests", 50, "month", "project", "big"))
            )
            await each.seed_usage(sum_by_owner)
            await each.seed_usage(sum_by_owner)
        assert queries == ["project {'shop'}"] * 2
        admitted = [await is_admitted(each) for each in filters * 2]
        assert admitted == [True, True, False, False]
        month = int(calendar_bounds("month", steady_clock())[0])
        assert await counted_units(server, f"project-requests-month-big:big:{month}") == 50


async def test_backend_follows_name_to_new_primary(server: RedisServer, tmp_path: Path) -> None:
    name = tmp_path / "name.sock"
    name.symlink_to(server.url.removeprefix("unix://"))
    backend = RedisQuotaBackend(f"unix://{name}", timeout_s=1.0, gateway_ttl_s=0.5)
    await backend.start()
    try:
        assert backend.is_connected
        with running_redis() as successor:
            async with Redis.from_url(server.url) as old:  # it stays up as a replica
                await old.replicaof("127.0.0.1", 1)
            name.unlink()
            name.symlink_to(successor.url.removeprefix("unix://"))

            async def is_registered() -> bool:
                async with Redis.from_url(successor.url) as new:
                    return await new.exists("{argosy}:gateways") == 1

            await wait_until(is_registered)
            assert backend.is_connected
    finally:
        await backend.close()


async def test_absent_redis_does_not_delay_requests() -> None:
    backend = RedisQuotaBackend("unix:///nowhere/redis.sock")
    async with open_filter(backend, make_limit("requests", 3)) as limits:
        assert [await is_admitted(limits) for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("password", ["wrong", None])
async def test_wrong_password_is_logged_with_name_of_setting(
    server: RedisServer, password: str | None
) -> None:
    with capture_logs() as logs:
        async with Redis.from_url(server.url) as client:
            await client.config_set("requirepass", "right")
        backend = RedisQuotaBackend(server.url, password)
        await backend.start()
        await backend.close()
    (entry,) = (entry for entry in logs if entry["event"] == "quota_backend_unavailable")
    assert "limits.password_env" in entry["reason"]


async def test_limits_become_free_after_clock_of_redis_is_set_back(server: RedisServer) -> None:
    """Otherwise used units and slots of dead gateways would stay until the clock reaches its old time."""
    hourly, concurrency = make_limit("requests", 3, "hour"), make_limit("concurrency", 1)
    async with shared_filters(server, hourly, count=1) as [limits]:
        assert [await is_admitted(limits) for _ in range(4)] == [True, True, True, False]
    async with Redis.from_url(server.url) as redis:
        key, later = f"{{argosy}}:limit:{hourly.id}", (await redis.time())[0] + 43_200
        for slot in await redis.hkeys(key):
            if slot != b"known":
                await redis.hset(key, str(later // 60), await redis.hget(key, slot))
                await redis.hdel(key, slot)
        await redis.hset(f"{{argosy}}:limit:{concurrency.id}", "dead", 1)
        await redis.zadd("{argosy}:gateways", {"dead": later})
    async with shared_filters(server, hourly, count=1, gateway_ttl_s=0.5) as [limits]:
        error = await expect_rejection(limits, make_context())
        assert error.retry_after_s is not None
        assert error.retry_after_s < 3700
        assert await counted_units(server, hourly.id) == 3
    async with shared_filters(server, concurrency, count=1, gateway_ttl_s=0.5) as [limits]:
        await wait_until(lambda: is_admitted(limits))


# --- the authority -------------------------------------------------------------------------------


async def test_redis_script_grants_same_units_as_model(server: RedisServer) -> None:
    """The state machines in tests/unit/policy check the model."""
    draw = random.Random(7)
    model = FakeQuotaAuthority()
    message_numbers = [0, 0, 0]
    slots: dict[str, list[tuple[int, int]]] = {"hour": [], "day": [], "new": []}
    """Slots of earlier grants by limit, in Redis and in the model."""
    async with Redis.from_url(server.url) as redis:
        script = redis.register_script(files("argosy.store").joinpath("leases.lua").read_text())
        for _ in range(300):
            gateway = draw.randrange(3)
            is_new = draw.random() < 0.9 or not message_numbers[gateway]
            message_numbers[gateway] += is_new
            requests, model_requests = [], []
            for name in draw.sample(["hour", "day", "new", "concurrency"], draw.randint(1, 4)):
                kind = {"hour": "window", "concurrency": "slots"}.get(name, "period")
                known_slots = slots.get(name, [])
                returned = draw.sample(known_slots, min(draw.randrange(3), len(known_slots)))
                units = [draw.randint(0, 5) for _ in returned]
                seeds, owed = (
                    tuple((draw.uniform(0, 7000), draw.randrange(9)) for _ in range(count))
                    for count in (draw.randrange(3), draw.choice([0, 0, 2]))
                )
                request = LeaseRequest(
                    kind=kind,  # type: ignore[arg-type]
                    limit=draw.choice([100, 200, 2**53 - 1]),
                    seconds=3600.0 if name == "hour" else 0.0,
                    lease_s=2.0,
                    keep_s=9000.0,
                    slot={"day": 1000, "new": int(steady_clock()) + 10**6}.get(name, 0),
                    need=draw.choice([0, draw.randrange(30)]),
                    overdraft=draw.choice([0, draw.randrange(30)]),
                    overdraft_above=draw.randrange(9),
                    held=draw.choice([None, draw.randrange(30)]),
                    was_held=draw.choice([0, draw.randrange(30)]),
                    ahead=draw.choice([0, draw.randrange(30)]),
                    kept=draw.choice([0, 0, draw.randrange(9)]),
                    owed=owed,
                    back=tuple((slot, n) for (slot, _), n in zip(returned, units, strict=True)),
                    seeds=draw.choice([None, seeds]),
                )
                requests.append((name, request))
                model_back = tuple((slot, n) for (_, slot), n in zip(returned, units, strict=True))
                model_requests.append((name, replace(request, back=model_back)))
            number = message_numbers[gateway]
            body = {
                "gateway": f"g{gateway}",
                "number": number,
                "alive_s": 1000.0,
                "asks": [request for _, request in requests],
            }
            keys = [f"gateway:g{gateway}", "gateways", *(name for name, _ in requests)]
            packed = await script(keys=keys, args=[msgspec.msgpack.encode(body)])
            reply = msgspec.msgpack.decode(packed, type=dict[str, int | list[LeaseGrant]])
            grants = reply["grants"]
            expected = model.exchange(f"g{gateway}", number, 1000.0, model_requests, steady_clock())
            assert reply["gateways"] == len(model.alive) or not is_new
            assert isinstance(grants, list)
            assert [(grant.granted, grant.used, grant.known) for grant in grants] == [
                (grant.granted, grant.used, grant.known) for grant in expected
            ]
            for (name, _), real, modelled in zip(requests, grants, expected, strict=is_new):
                if is_new and name in slots and real.granted:
                    slots[name].append((real.slot, modelled.slot))
