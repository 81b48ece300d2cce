"""The ledger's stage: what was delivered becomes a row with its price and reaches the store, sooner or later."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import psycopg
import pytest
from psycopg import sql
from structlog.testing import capture_logs
from structlog.typing import EventDict
from tests.support.services import PostgresServer
from tests.support.waiting import until

from argosy.gateway import accounting as books_module
from argosy.gateway.accounting import AccountingService
from argosy.gateway.filters.limit_filter import LimitFilter
from argosy.gateway.filters.usage_recorder import UsageRecorder, flush_usage_forever
from argosy.gateway.pool.pool import Pool
from argosy.gateway.principal import Principal
from argosy.gateway.request_context import (
    CHAT,
    FilterState,
    RequestContext,
    RequestStatus,
    complete_filters,
    run_filters,
)
from argosy.gateway.request_fields import parse_request_fields
from argosy.http_server import HttpExchange
from argosy.protocol import ApiError
from argosy.store import (
    AccountSnapshot,
    Limit,
    Price,
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


def context(tier: int = 1, number: int = 1, *, stream: bool = True) -> RequestContext:
    body = {"model": "next", "messages": [], "stream": stream}
    ask = parse_request_fields(json.dumps(body).encode(), "messages")
    principal = Principal(organisation="acme", project="web", key="k", user="ann", tier=tier)
    pool = Pool("m", [])
    return RequestContext(
        Mock(spec=HttpExchange), ask, CHAT, pool, f"chatcmpl-{number}", principal, tier
    )


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[UsageLog]:
    opened = UsageLog(tmp_path)
    yield opened
    opened.close()


def drained(spool: UsageLog) -> list[UsageRecord]:
    rows: list[UsageRecord] = []
    spool.drain(rows.extend)
    return rows


@pytest.mark.parametrize(
    ("tier", "status", "cost"),
    [(1, "completed", 60 * 10 + 40 + 7 * 30), (0, "cancelled", 60 * 20 + 80 + 7 * 60)],
)
async def test_a_request_becomes_one_row_at_the_price_of_its_tier_when_it_began(
    spool: UsageLog, tier: int, status: RequestStatus, cost: int
) -> None:
    ledger, one = UsageRecorder(spool, lambda: NOW), context(tier)
    one.route_name = "canary"
    ledger.apply_snapshot(AccountSnapshot(prices=PRICES))
    entry = await ledger.on_request(one)
    ledger.apply_snapshot(AccountSnapshot())
    one.delivered.prompt_tokens, one.delivered.cached_tokens = 100, 40
    for count in range(1, 8):
        one.delivered.output_tokens = count
        entry.on_tokens((0.0,))
    one.status, one.replica_name = status, "there"
    entry.on_complete()
    (row,) = drained(spool)
    assert row == UsageRecord(
        request="chatcmpl-1",
        organisation="acme",
        project="web",
        key="k",
        user="ann",
        model="m",
        asked="next",
        route="canary",
        replica="there",
        started_at=one.started_at,
        ended_at=NOW,
        status=status,
        input_tokens=100,
        cached_tokens=40,
        output_tokens=7,
        nano_dollars=cost,
    )
    assert one.trace.usage is not None
    assert one.trace.usage.nano_dollars == cost


async def test_a_budget_is_charged_what_the_ledger_says_though_prices_change_in_between(
    spool: UsageLog,
) -> None:
    """Others may be asked how much room there is, which takes a moment."""
    limits, ledger = LimitFilter(create_quota_backend(None)), UsageRecorder(spool)
    budget = Limit(
        id="b", owner_kind="key", owner="k", unit="nano_dollars", amount=10**9, window="day"
    )
    before = AccountSnapshot(limits=(budget,), prices=PRICES)
    after = AccountSnapshot(
        limits=(budget,), prices=(Price(model="m", input=7, cached_input=7, output=7),)
    )
    one, two = context(), context(number=2)
    for stage in (limits, ledger):
        stage.apply_snapshot(before)
    visits: list[FilterState] = []
    assert await run_filters([limits], visits, one)
    for stage in (limits, ledger):
        stage.apply_snapshot(after)
    assert await run_filters([ledger], visits, one)
    one.delivered.prompt_tokens, one.delivered.output_tokens = 100, 7
    one.status, one.replica_name = "completed", "there"
    complete_filters(visits, one)
    await limits.on_request(two)
    (row,) = drained(spool)
    assert [line.used for line in two.trace.limits] == [row.nano_dollars]


@pytest.mark.parametrize("stream", [True, False])
async def test_of_an_answer_that_was_to_be_sent_whole_a_dead_gateway_delivered_nothing(
    tmp_path: Path, stream: bool
) -> None:
    dying, rows = UsageLog(tmp_path), list[UsageRecord]()
    one = context(stream=stream)
    entry = await UsageRecorder(dying).on_request(one)
    one.delivered.prompt_tokens, one.delivered.output_tokens = 10, 3
    entry.on_tokens((0.0,))
    dying.close()
    heir = UsageLog(tmp_path)
    heir.recover()
    heir.drain(rows.extend)
    heir.close()
    told = (10, 3) if stream else (0, 0)
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [told]


async def test_nothing_is_answered_that_cannot_be_recorded(
    spool: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise UsageLogFullError

    monkeypatch.setattr(spool, "allocate_slot", full)
    with pytest.raises(ApiError) as refused:
        await UsageRecorder(spool).on_request(context())
    assert (refused.value.status, refused.value.code) == (503, "ledger_full")
    assert refused.value.retry_after_s is not None


async def test_rows_wait_while_the_store_is_down_and_reach_it_once(spool: UsageLog) -> None:
    up, tried, leaving = False, asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    rows: list[UsageRecord] = []

    def store(given: list[UsageRecord]) -> None:
        loop.call_soon_threadsafe(tried.set)
        if not up:
            raise ConnectionError("the database is down")
        rows.extend(given)

    ledger = UsageRecorder(spool)
    for number in range(600):
        one = context(number=number)
        entry = await ledger.on_request(one)
        entry.on_complete()
    settling = asyncio.create_task(flush_usage_forever(spool, store, leaving))
    await tried.wait()
    up = True
    leaving.set()
    await settling
    assert len({row.request for row in rows}) == len(rows) == 600
    assert spool.pending_records == 0


async def test_what_a_gateway_left_that_died_meanwhile_is_settled_by_another(
    spool: UsageLog, tmp_path: Path
) -> None:
    rows: list[UsageRecord] = []
    leaving, other = asyncio.Event(), UsageLog(tmp_path)
    settling = asyncio.create_task(flush_usage_forever(spool, rows.extend, leaving))
    await UsageRecorder(other).on_request(context())
    other.close()
    await until(lambda: bool(rows))
    assert [(row.request, row.status) for row in rows] == [("chatcmpl-1", "interrupted")]
    leaving.set()
    await settling


async def test_rows_reach_the_store_though_somebody_removed_the_folder(
    spool: UsageLog, tmp_path: Path
) -> None:
    rows: list[UsageRecord] = []
    leaving, ledger = asyncio.Event(), UsageRecorder(spool)
    shutil.rmtree(tmp_path)
    for number in range(5000):
        one = context(number=number)
        entry = await ledger.on_request(one)
        entry.on_complete()
    leaving.set()
    await flush_usage_forever(spool, rows.extend, leaving)
    assert len({row.request for row in rows}) == 5000


async def test_a_database_that_goes_away_and_comes_back_gets_every_row_once(
    spool: UsageLog, postgres: PostgresServer, postgres_url: str
) -> None:
    store, ledger, leaving = open_store(postgres_url), UsageRecorder(spool), asyncio.Event()
    store.migrate()

    async def requests(numbers: range) -> None:
        for number in numbers:
            one = context(number=number)
            entry = await ledger.on_request(one)
            one.delivered.prompt_tokens, one.delivered.output_tokens = 10, number
            entry.on_complete()

    await requests(range(100))
    settling = asyncio.create_task(flush_usage_forever(spool, store.ledger.add_records, leaving))
    await until(lambda: spool.pending_records == 0)
    with capture_logs() as logs:
        await asyncio.to_thread(take_away, postgres, postgres_url)
        await requests(range(100, 800))
        await until(lambda: "usage_flush_failed" in warnings(logs))
        await asyncio.to_thread(bring_back, postgres, postgres_url)
        await requests(range(800, 900))
        await until(lambda: spool.pending_records == 0)
    assert warnings(logs) == ["usage_flush_failed"]
    leaving.set()
    await settling
    (used,) = store.ledger.report()
    store.close()
    assert (used.requests, used.input_tokens, used.output_tokens) == (900, 9000, sum(range(900)))


def warnings(logs: Sequence[EventDict]) -> list[str]:
    """What operators were warned of, whatever else the process said."""
    return [entry["event"] for entry in logs if entry["event"] == "usage_flush_failed"]


def take_away(server: PostgresServer, url: str) -> None:
    """The database lets nobody in, and throws out who is there."""
    name = allow(server, url, connections=False)
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        connection.execute(query, [name])


def bring_back(server: PostgresServer, url: str) -> None:
    allow(server, url, connections=True)


def allow(server: PostgresServer, url: str, *, connections: bool) -> str:
    name = url.partition("@/")[2].partition("?")[0]
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        query = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
        connection.execute(query.format(sql.Identifier(name), sql.Literal(connections)))
    return name


async def test_a_gateway_forgets_the_rows_of_days_that_are_not_to_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But none while the clock may still be a year ahead, as that of a machine that has just started."""
    waits, go_on = asyncio.Event(), asyncio.Event()
    now = time.time()
    clock = Mock(time=Mock(return_value=now + 365 * 86_400))

    async def wait(_: float) -> None:
        waits.set()
        await go_on.wait()
        go_on.clear()

    monkeypatch.setattr(books_module, "asyncio", Mock(sleep=wait))
    monkeypatch.setattr(books_module, "time", clock)
    store = open_store(f"sqlite:///{tmp_path}/argosy.db")
    store.migrate()
    ends = {days: now - days * 86_400 for days in (0, 29, 32, 400)}
    rows = [
        UsageRecord(request=str(days), started_at=at, ended_at=at, status="completed")
        for days, at in ends.items()
    ]
    store.ledger.add_records(rows)

    def kept() -> list[str]:
        return [row.request for page in store.ledger.iter_records() for row in page]

    books = AccountingService(store, Mock(), StoreConfig(keep_usage_days=30))
    forgetting = asyncio.create_task(books.roll_up_usage())
    await waits.wait()
    assert kept() == ["400", "32", "29", "0"]
    clock.time.return_value = now
    waits.clear()
    go_on.set()
    await waits.wait()
    assert kept() == ["29", "0"]
    forgetting.cancel()
    store.close()
