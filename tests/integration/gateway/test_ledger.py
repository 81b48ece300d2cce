"""Usage of requests: recorded once at its price, billed as the client got it, and counted by limits after a restart."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import msgspec
import psycopg
import pytest
from psycopg import sql
from structlog.testing import capture_logs
from structlog.typing import EventDict
from tests.support.backend_formats import Vllm
from tests.support.fake_backend import Fault, serve_backends
from tests.support.fake_clock import FakeClock
from tests.support.fake_engine import FakeEngine, Script, constant_script
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest, fake_upstream, listening
from tests.support.gateway_client import gateway
from tests.support.gateway_harness import RecordingFilter, run_gateway
from tests.support.gateway_processes import open_organisation
from tests.support.idempotent_gateway import run_gateways
from tests.support.limit_harness import (
    complete,
    make_context,
    make_limit,
    make_snapshot,
)
from tests.support.metered_gateway import (
    CHATS,
    COMPLETIONS,
    PROMPT,
    STREAM,
    run_gateway_before,
    run_metered_gateway,
)
from tests.support.migrated_store import open_migrated_store
from tests.support.replica_servers import MODEL, serve
from tests.support.services import PostgresServer
from tests.support.usage_log_harness import drain
from tests.support.waiting import until

from argosy.deployment import ReplicaConfig
from argosy.engine.serving.text import Tokenizer
from argosy.gateway import accounting as accounting_module
from argosy.gateway.accounting import AccountingService
from argosy.gateway.filters import LimitFilter, UsageRecorder, flush_usage_forever
from argosy.gateway.pool import Pool
from argosy.gateway.principal import TIERS, Principal
from argosy.gateway.proxy import response_writers
from argosy.gateway.request_context import (
    CHAT,
    RequestContext,
    RequestFilter,
    complete_filters,
    run_filters,
)
from argosy.gateway.request_fields import parse_request_fields
from argosy.gateway.utility_handlers import MAX_CONCURRENT_PER_TENANT
from argosy.http_server import HttpExchange
from argosy.policy import RequestStatus
from argosy.protocol import ApiError, TokenUsage
from argosy.store import (
    AccountSnapshot,
    Limit,
    LocalQuotaBackend,
    Price,
    PriceList,
    StoreConfig,
    UsageLog,
    UsageLogFullError,
    UsageRecord,
    create_quota_backend,
    open_store,
    usage_log_folder,
)

NOW = 5000.0
PRICES = (
    Price(model="m", input=10, cached_input=1, output=30),
    Price(model="m", tier="premium", input=20, cached_input=2, output=60),
    Price(model="m", input=99, cached_input=99, output=99, since=NOW + 1),
)


def make_recorded(tier: int = 1, number: int = 1, *, stream: bool = True) -> RequestContext:
    body = {"model": "next", "messages": [], "stream": stream}
    fields = parse_request_fields(json.dumps(body).encode(), "messages")
    principal = Principal(organisation="acme", project="web", key="k", user="ann", tier=tier)
    pool = Pool("m", [])
    return RequestContext(
        Mock(spec=HttpExchange), fields, CHAT, pool, f"chatcmpl-{number}", principal, tier
    )


@pytest.fixture
def usage_log(tmp_path: Path) -> Iterator[UsageLog]:
    log = UsageLog(tmp_path)
    yield log
    log.close()


@pytest.mark.parametrize(
    ("tier", "status", "cost"),
    [(1, "completed", 60 * 10 + 40 + 7 * 30), (0, "cancelled", 60 * 20 + 80 + 7 * 60)],
)
async def test_request_is_recorded_once_at_its_price(
    usage_log: UsageLog, tier: int, status: RequestStatus, cost: int
) -> None:
    recorder, context = UsageRecorder(usage_log, lambda: NOW), make_recorded(tier)
    context.route_name = "canary"
    context.rates = PriceList(PRICES).rates_at("m", TIERS[tier], NOW)
    await recorder.on_request(context)
    context.delivered.prompt_tokens, context.delivered.cached_tokens = 100, 40
    for count in range(1, 8):
        context.delivered.output_tokens = count
        context.count_usage()
    context.status, context.replica_name = status, "there"
    context.close_bill(is_response_started=True, is_output_sent=True)
    recorder.on_complete(context)
    (record,) = drain(usage_log)
    assert record == UsageRecord(
        request="chatcmpl-1",
        organisation="acme",
        project="web",
        key="k",
        user="ann",
        model="m",
        asked="next",
        route="canary",
        replica="there",
        started_at=context.started_at,
        ended_at=NOW,
        status=status,
        input_tokens=100,
        cached_tokens=40,
        output_tokens=7,
        nano_dollars=cost,
    )
    assert context.trace.cost is not None
    assert context.trace.cost.nano_dollars == cost


async def test_budget_and_record_have_same_cost_although_price_changes(
    usage_log: UsageLog,
) -> None:
    """The limit filter may wait for Redis, and prices may change meanwhile."""
    limits, recorder = LimitFilter(create_quota_backend(None)), UsageRecorder(usage_log)
    budget = Limit(
        id="b", owner_kind="key", owner="k", unit="nano_dollars", amount=10**9, window="day"
    )
    before = AccountSnapshot(limits=(budget,), prices=PRICES)
    after = AccountSnapshot(
        limits=(budget,), prices=(Price(model="m", input=7, cached_input=7, output=7),)
    )
    first, second = make_recorded(), make_recorded(number=2)
    limits.apply_snapshot(before)
    assert await run_filters([limits], first)
    limits.apply_snapshot(after)
    assert await run_filters([recorder], first)
    first.delivered.prompt_tokens, first.delivered.output_tokens = 100, 7
    first.status, first.replica_name = "completed", "there"
    first.close_bill(is_response_started=True, is_output_sent=True)
    complete_filters(first)
    await limits.on_request(second)
    (record,) = drain(usage_log)
    assert [decision.used for decision in second.trace.limits] == [record.nano_dollars]


@pytest.mark.parametrize("stream", [True, False])
async def test_killed_gateway_records_only_tokens_of_streams(tmp_path: Path, stream: bool) -> None:
    dying = UsageLog(tmp_path)
    context = make_recorded(stream=stream)
    await UsageRecorder(dying).on_request(context)
    context.delivered.prompt_tokens, context.delivered.output_tokens = 10, 3
    context.count_usage()
    dying.close()
    restarted = UsageLog(tmp_path)
    restarted.recover()
    records = drain(restarted)
    restarted.close()
    expected = (10, 3) if stream else (0, 0)
    assert [(record.input_tokens, record.output_tokens) for record in records] == [expected]


async def test_request_is_rejected_while_usage_log_is_full(
    usage_log: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise UsageLogFullError

    monkeypatch.setattr(usage_log, "allocate_slot", full)
    with pytest.raises(ApiError) as caught:
        await UsageRecorder(usage_log).on_request(make_recorded())
    assert (caught.value.status, caught.value.code) == (503, "ledger_full")
    assert caught.value.retry_after_s is not None


async def test_records_of_killed_gateway_are_flushed_by_other_gateway(
    usage_log: UsageLog, tmp_path: Path
) -> None:
    records: list[UsageRecord] = []
    stopping, other = asyncio.Event(), UsageLog(tmp_path)
    flushing = asyncio.create_task(flush_usage_forever(usage_log, records.extend, stopping))
    await UsageRecorder(other).on_request(make_recorded())
    other.close()
    await until(lambda: bool(records))
    assert [(record.request, record.status) for record in records] == [
        ("chatcmpl-1", "interrupted")
    ]
    stopping.set()
    await flushing


async def test_postgres_gets_every_record_once_after_outage(
    usage_log: UsageLog, postgres: PostgresServer, postgres_url: str
) -> None:
    store, recorder, stopping = open_store(postgres_url), UsageRecorder(usage_log), asyncio.Event()
    store.migrate()

    async def send_requests(numbers: range) -> None:
        for number in numbers:
            context = make_recorded(number=number)
            await recorder.on_request(context)
            context.delivered.prompt_tokens, context.delivered.output_tokens = 10, number
            context.status = "completed"
            context.close_bill(is_response_started=True, is_output_sent=True)
            recorder.on_complete(context)

    await send_requests(range(100))
    flushing = asyncio.create_task(
        flush_usage_forever(usage_log, store.ledger.add_records, stopping)
    )
    await until(lambda: usage_log.pending_records == 0)
    with capture_logs() as logs:
        await asyncio.to_thread(close_database, postgres, postgres_url)
        await send_requests(range(100, 800))
        await until(lambda: "usage_flush_failed" in flush_warnings(logs))
        await asyncio.to_thread(reopen_database, postgres, postgres_url)
        await send_requests(range(800, 900))
        await until(lambda: usage_log.pending_records == 0)
    assert flush_warnings(logs) == ["usage_flush_failed"]
    stopping.set()
    await flushing
    (usage,) = store.ledger.report()
    store.close()
    assert (usage.requests, usage.input_tokens, usage.output_tokens) == (900, 9000, sum(range(900)))


def flush_warnings(logs: Sequence[EventDict]) -> list[str]:
    """Return the logged events about failed flushes."""
    return [entry["event"] for entry in logs if entry["event"] == "usage_flush_failed"]


def close_database(server: PostgresServer, url: str) -> None:
    """Reject new connections to a database and terminate the open ones."""
    name = set_connections_allowed(server, url, allowed=False)
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        connection.execute(query, [name])


def reopen_database(server: PostgresServer, url: str) -> None:
    set_connections_allowed(server, url, allowed=True)


def set_connections_allowed(server: PostgresServer, url: str, *, allowed: bool) -> str:
    """Allow or reject connections to a database. Returns its name."""
    name = url.partition("@/")[2].partition("?")[0]
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        query = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
        connection.execute(query.format(sql.Identifier(name), sql.Literal(allowed)))
    return name


async def test_records_older_than_retention_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that has just started may have a clock that is a year ahead, so nothing is deleted at once."""
    now = time.time()
    clock = Mock(time=Mock(return_value=now + 365 * 86_400))
    store = open_migrated_store(f"sqlite:///{tmp_path}/argosy.db")
    ends = {days: now - days * 86_400 for days in (0, 29, 32, 400)}
    store.ledger.add_records(
        [
            UsageRecord(request=str(days), started_at=at, ended_at=at, status="completed")
            for days, at in ends.items()
        ]
    )

    def stored_records() -> list[str]:
        return [record.request for page in store.ledger.iter_records() for record in page]

    async def wait(_: float) -> None:
        if clock.time.return_value == now:
            await asyncio.Event().wait()
        assert stored_records() == ["400", "32", "29", "0"]
        clock.time.return_value = now

    monkeypatch.setattr(accounting_module, "asyncio", Mock(sleep=wait))
    monkeypatch.setattr(accounting_module, "time", clock)
    accounting = AccountingService(store, Mock(), StoreConfig(keep_usage_days=30))
    rolling_up = asyncio.create_task(accounting.roll_up_usage())
    await until(lambda: rolling_up.done() or stored_records() == ["29", "0"])
    assert not rolling_up.done()
    rolling_up.cancel()
    store.close()


# --- bills over HTTP ------------------------------------------------------------------------------


NOTHING = (0, 0, 0, 0)


def billed(record: UsageRecord) -> tuple[int, int, int, int]:
    return record.input_tokens, record.cached_tokens, record.output_tokens, record.nano_dollars


@pytest.mark.parametrize(
    ("timeout_s", "events"), [(None, 1), (0.2, 0)], ids=["disconnect-after-role", "deadline"]
)
async def test_request_without_output_is_free(
    tmp_path: Path, timeout_s: float | None, events: int
) -> None:
    backend = Vllm()
    async with (
        serve_backends(backend),
        run_metered_gateway(tmp_path, backend.url) as metered,
    ):
        backend.faults.append(Fault("stall", events))
        fields = STREAM | ({} if timeout_s is None else {"timeout_s": timeout_s})
        task = asyncio.create_task(metered.post(CHATS, **fields))
        if timeout_s is None:
            await until(lambda: backend.requests)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: metered.usage_log.pending_records == 1)
        record = await metered.assert_consistent()
    assert billed(record) == NOTHING
    assert record.status == ("cancelled" if timeout_s is None else "stopped")


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_is_billed_for_delivered_tokens_of_streams_only(
    tmp_path: Path, tokenizer: Tokenizer, stream: bool
) -> None:
    """The client has received nothing yet of a whole response."""
    engine = FakeEngine(tokenizer, constant_script(Script([*range(100, 110)], pause_after=4)))
    async with (
        serve(engine) as served,
        run_gateway_before(tmp_path, ReplicaConfig(url=served.url, model=MODEL)) as metered,
    ):
        task = asyncio.create_task(metered.post(stream=stream, request_id="mine"))
        await engine.paused.wait()
        trace = metered.running.traces.find("mine")
        assert trace is not None
        await until(lambda: trace.last_token_at is not None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: metered.usage_log.pending_records == 1)
        record = await metered.assert_consistent()
    assert record.status == "cancelled"
    assert (billed(record) == NOTHING) is not stream


async def test_aggregated_response_ends_at_size_limit(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many choices with log-probabilities used all of the gateway's memory."""
    monkeypatch.setattr(response_writers, "MAX_AGGREGATED_BYTES", 100)
    monkeypatch.setattr(response_writers, "COUNTED_BYTES", 100)
    engine = FakeEngine(tokenizer, constant_script(Script([*range(100, 110)], pause_after=4)))
    async with (
        serve(engine) as served,
        run_gateway_before(tmp_path, ReplicaConfig(url=served.url, model=MODEL)) as metered,
    ):
        response = json.loads(await metered.post())
        record = await metered.assert_consistent()
    assert response["choices"][0]["finish_reason"] == "length"
    assert 0 < response["usage"]["completion_tokens"] == record.output_tokens <= 4


@pytest.mark.parametrize(("events", "is_free"), [(1, True), (3, False)])
async def test_failed_stream_is_billed_for_delivered_tokens(
    tmp_path: Path, events: int, is_free: bool
) -> None:
    backend = Vllm()
    async with (
        serve_backends(backend),
        run_metered_gateway(tmp_path, backend.url) as metered,
    ):
        backend.faults.append(Fault("disconnect", events))
        assert "upstream_failed" in await metered.post(CHATS, n=2, **STREAM)
        record = await metered.assert_consistent()
    assert record.status == "failed"
    assert (billed(record) == NOTHING) is is_free


async def test_output_that_a_started_stream_never_sent_is_free(tmp_path: Path) -> None:
    class GeneratesUnseenTokens(RecordingFilter):
        async def on_request(self, context: RequestContext) -> bool:
            context.delivered.output_tokens = 3
            return await super().on_request(context)

    async def script(request: UpstreamRequest) -> None:
        await asyncio.sleep(0.1)  # until the gateway starts the stream
        request.writer.close()

    usage_log = UsageLog(tmp_path)
    filters: list[RequestFilter] = [UsageRecorder(usage_log), GeneratesUnseenTokens()]
    async with (
        fake_upstream(script) as upstream,
        run_gateway(filters, ReplicaConfig(url=upstream.url), early_stream_start_s=0.01) as gateway,
    ):
        body = {"model": "big", "prompt": PROMPT, "n": 2} | STREAM
        response = await gateway.client.post(COMPLETIONS, json=body)
        assert (response.status_code, "upstream_failed" in response.text) == (200, True)
        await gateway.wait_until_idle()
    records = drain(usage_log)
    usage_log.close()
    assert [(billed(record), record.status) for record in records] == [(NOTHING, "failed")]


async def test_rejected_request_is_free(tmp_path: Path) -> None:
    async def script(request: UpstreamRequest) -> None:
        request.send_json(422, {"error": {"message": "The temperature is too high."}})

    async with (
        fake_upstream(script) as upstream,
        run_metered_gateway(tmp_path, upstream.url) as metered,
    ):
        await metered.post()
        record = await metered.assert_consistent()
    assert (billed(record), record.status) == (NOTHING, "refused")


# --- limits with a usage table --------------------------------------------------------------------


TODAY = 1_795_262_400.0


def make_past_record(number: int, ended_at: float) -> UsageRecord:
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


async def test_restarted_gateway_seeds_limits_from_usage_table(tmp_path: Path) -> None:
    clock = FakeClock(TODAY)
    store = open_migrated_store(f"sqlite:///{tmp_path}/argosy.db")
    store.ledger.add_records(
        [
            make_past_record(number, TODAY - age)
            for number, age in enumerate((30, 3000, 4000, 90_000))
        ]
    )
    # A line of a batch only counts against budgets.
    line = msgspec.structs.replace(make_past_record(9, TODAY - 30), service_tier="batch")
    store.ledger.add_records([line])
    limits = LimitFilter(LocalQuotaBackend(), clock)
    limits.apply_snapshot(
        make_snapshot(
            make_limit("requests", 100, "hour"),
            make_limit("tokens", 10_000, "month", "project"),
            make_limit("nano_dollars", 10**6, "day", "organisation"),
            make_limit("requests", 100, "month", "user", "big"),
            make_limit("requests", 100, "month", "user", "small"),
            make_limit("requests", 100, "second"),
        )
    )
    await limits.seed_usage(store.ledger.sum_by_owner)
    await limits.on_request(context := make_context())
    used = [(decision.unit, decision.window, decision.used) for decision in context.trace.limits]
    assert used == [
        ("requests", "hour", 2),
        ("requests", "second", 0),
        ("requests", "month", 4),
        ("tokens", "month", 4 * 110),
        ("nano_dollars", "day", 4 * 7),
    ]
    complete(limits, context)
    clock.now += 1300.0
    await limits.seed_usage(store.ledger.sum_by_owner)
    await limits.on_request(context := make_context())
    assert context.trace.limits[0].used == 2, "the request of 3000 s ago has left the window"
    store.close()


async def test_unsettled_usage_of_killed_gateway_counts_after_restart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/argosy.db"
    usage_log = UsageLog(usage_log_folder(url))
    usage_log.allocate_slot(make_past_record(1, time.time())).set_counts(TokenUsage(100, 0, 23))
    usage_log.close()
    accounting = await AccountingService.open(StoreConfig(url=url))
    limits = LimitFilter(LocalQuotaBackend())
    limits.apply_snapshot(make_snapshot(make_limit("tokens", 10_000, "month")))
    await limits.seed_usage(accounting.store.ledger.sum_by_owner)
    await limits.on_request(context := make_context())
    assert context.trace.limits[0].used == 123
    await accounting.close()


@pytest.mark.parametrize(
    ("replica_status", "first", "second"),
    [(400, 400, 429), (500, 502, 502)],
)
async def test_only_client_errors_of_replica_count_as_requests(
    tmp_path: Path, replica_status: int, first: int, second: int
) -> None:
    """Otherwise invalid requests would have no limit. Failures of the fleet cost nothing."""

    async def script(request: UpstreamRequest) -> None:
        request.send_json(replica_status, {"error": {"message": "no"}})

    async with (
        fake_upstream(script) as server,
        run_gateways(tmp_path, ReplicaConfig(url=server.url, kind="openai"), requests=1) as fleet,
    ):
        client = await fleet.client()
        assert (await client.post("a")).status_code == first
        assert (await client.post("b")).status_code == second


class BlockedTokenizer(FakeUpstream):
    """Server whose responses wait until `unblocked` is set."""

    def __init__(self) -> None:
        super().__init__(token_ids=[1, 2])
        self.unblocked = asyncio.Event()
        self.num_running = 0
        self.max_running = 0

    async def _respond(self, request: UpstreamRequest) -> None:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        await self.unblocked.wait()
        self.num_running -= 1
        await super()._respond(request)


async def test_tokenize_concurrency_is_limited_per_tenant(tmp_path: Path) -> None:
    """Sixty long texts of one tenant would delay the prompts of all other tenants by seconds."""
    backend, url = BlockedTokenizer(), f"sqlite:///{tmp_path / 'argosy.db'}"
    with open_organisation(url) as accounts:
        shop, other = (accounts.key(accounts.project(name)) for name in ("shop", "other"))
        async with listening(backend):
            replica = ReplicaConfig(url=backend.url, kind="openai", model="rough")
            async with gateway(replica, store=StoreConfig(url=url)) as (_, client):

                async def tokenize(key: str) -> int:
                    headers = {"authorization": f"Bearer {key}"}
                    body = {"model": "big", "prompt": "Tell me"}
                    return (await client.post("/tokenize", json=body, headers=headers)).status_code

                calls = [
                    asyncio.create_task(tokenize(shop))
                    for _ in range(3 * MAX_CONCURRENT_PER_TENANT)
                ]
                await until(lambda: backend.num_running >= MAX_CONCURRENT_PER_TENANT)
                calls.append(asyncio.create_task(tokenize(other)))
                await until(lambda: backend.num_running > MAX_CONCURRENT_PER_TENANT)
                backend.unblocked.set()
                assert await asyncio.gather(*calls) == [200] * len(calls)
                assert backend.max_running == MAX_CONCURRENT_PER_TENANT + 1
