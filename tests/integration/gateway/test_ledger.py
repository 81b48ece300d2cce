"""Usage recorder: delivered tokens become a priced record that reaches the store once, also after outages."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import psycopg
import pytest
from psycopg import sql
from structlog.testing import capture_logs
from structlog.typing import EventDict
from tests.support.migrated_store import open_migrated_store
from tests.support.services import PostgresServer
from tests.support.waiting import until

from argosy.gateway import accounting as accounting_module
from argosy.gateway.accounting import AccountingService
from argosy.gateway.filters import LimitFilter, UsageRecorder, flush_usage_forever
from argosy.gateway.pool import Pool
from argosy.gateway.principal import TIERS, Principal
from argosy.gateway.request_context import (
    CHAT,
    RequestContext,
    complete_filters,
    run_filters,
)
from argosy.gateway.request_fields import parse_request_fields
from argosy.http_server import HttpExchange
from argosy.policy import RequestStatus
from argosy.protocol import ApiError
from argosy.store import (
    AccountSnapshot,
    Limit,
    Price,
    PriceList,
    StoreConfig,
    UsageLog,
    UsageLogFullError,
    UsageRecord,
    create_quota_backend,
    open_store,
)

NOW = 5000.0
PRICES = (
    Price(model="m", input=10, cached_input=1, output=30),
    Price(model="m", tier="premium", input=20, cached_input=2, output=60),
    Price(model="m", input=99, cached_input=99, output=99, since=NOW + 1),
)


def make_context(tier: int = 1, number: int = 1, *, stream: bool = True) -> RequestContext:
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


def drain(usage_log: UsageLog) -> list[UsageRecord]:
    records: list[UsageRecord] = []
    usage_log.drain(records.extend)
    return records


@pytest.mark.parametrize(
    ("tier", "status", "cost"),
    [(1, "completed", 60 * 10 + 40 + 7 * 30), (0, "cancelled", 60 * 20 + 80 + 7 * 60)],
)
async def test_request_is_recorded_once_at_its_price(
    usage_log: UsageLog, tier: int, status: RequestStatus, cost: int
) -> None:
    recorder, context = UsageRecorder(usage_log, lambda: NOW), make_context(tier)
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
    first, second = make_context(), make_context(number=2)
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
    dying, records = UsageLog(tmp_path), list[UsageRecord]()
    context = make_context(stream=stream)
    await UsageRecorder(dying).on_request(context)
    context.delivered.prompt_tokens, context.delivered.output_tokens = 10, 3
    context.count_usage()
    dying.close()
    restarted = UsageLog(tmp_path)
    restarted.recover()
    restarted.drain(records.extend)
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
        await UsageRecorder(usage_log).on_request(make_context())
    assert (caught.value.status, caught.value.code) == (503, "ledger_full")
    assert caught.value.retry_after_s is not None


async def test_records_of_killed_gateway_are_flushed_by_other_gateway(
    usage_log: UsageLog, tmp_path: Path
) -> None:
    records: list[UsageRecord] = []
    stopping, other = asyncio.Event(), UsageLog(tmp_path)
    flushing = asyncio.create_task(flush_usage_forever(usage_log, records.extend, stopping))
    await UsageRecorder(other).on_request(make_context())
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
            context = make_context(number=number)
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
    is_waiting, resume = asyncio.Event(), asyncio.Event()
    now = time.time()
    clock = Mock(time=Mock(return_value=now + 365 * 86_400))

    async def wait(_: float) -> None:
        is_waiting.set()
        await resume.wait()
        resume.clear()

    monkeypatch.setattr(accounting_module, "asyncio", Mock(sleep=wait))
    monkeypatch.setattr(accounting_module, "time", clock)
    store = open_migrated_store(f"sqlite:///{tmp_path}/argosy.db")
    ends = {days: now - days * 86_400 for days in (0, 29, 32, 400)}
    records = [
        UsageRecord(request=str(days), started_at=at, ended_at=at, status="completed")
        for days, at in ends.items()
    ]
    store.ledger.add_records(records)

    def stored_records() -> list[str]:
        return [record.request for page in store.ledger.iter_records() for record in page]

    accounting = AccountingService(store, Mock(), StoreConfig(keep_usage_days=30))
    rolling_up = asyncio.create_task(accounting.roll_up_usage())
    await is_waiting.wait()
    assert stored_records() == ["400", "32", "29", "0"]
    clock.time.return_value = now
    is_waiting.clear()
    resume.set()
    await is_waiting.wait()
    assert stored_records() == ["29", "0"]
    rolling_up.cancel()
    store.close()
