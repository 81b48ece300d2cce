"""A database that does not answer: requests go on, no row is lost, and whoever is told to leave does."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString

import httpx2
import psutil
import psycopg
import pytest
from tests.support.gateway_processes import MODEL, GatewayProcess, tenants
from tests.support.scripted_server import rough_server
from tests.support.services import PostgresServer, running_postgres
from tests.support.waiting import until

from argosy.gateway import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.store import StoreConfig
from argosy.store.migrations import _ADVISORY_LOCK_ID as MIGRATING

pytestmark = pytest.mark.timeout(480)

LEAVES_S = 30.0
NOBODY = "http://127.0.0.1:1"
ASKS = "SELECT count(*) FROM pg_locks WHERE mode = 'AccessShareLock' AND NOT granted"
"""Who wants to read what is locked."""


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PostgresServer]:
    """One that may be stopped."""
    with running_postgres() as server:
        yield server


@contextlib.contextmanager
def hanging(server: PostgresServer) -> Iterator[None]:
    """Meanwhile none of its processes does anything."""
    process = psutil.Process(server.program.process.pid)
    stopped = [process, *process.children(recursive=True)]
    for one in stopped:
        one.suspend()
    try:
        yield
    finally:
        for one in stopped:
            one.resume()


@contextlib.contextmanager
def gateway(replica: str, url: str, folder: Path) -> Iterator[GatewayProcess]:
    """One to be started; killed at the end if it is still there."""
    replicas = [ReplicaConfig(url=replica, kind="openai", model="rough")]
    models = [ModelConfig(name=MODEL, replicas=replicas)]
    config = GatewayConfig(port=0, models=models, store=StoreConfig(url=url))
    made = GatewayProcess(config, folder / "gateway")
    try:
        yield made
    finally:
        if made.process is not None and made.process.returncode is None:
            made.process.kill()


async def test_who_is_told_to_leave_while_it_hangs_leaves_and_no_row_is_lost(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    url = own_postgres.create("hangs")
    body = {"model": MODEL, "prompt": "Say", "max_tokens": 3}
    async with rough_server() as replica:
        with tenants(url), gateway(replica.url, url, tmp_path) as first:
            await first.start()
            async with httpx2.AsyncClient(base_url=first.url, timeout=30) as client:
                await client.post("/v1/completions", json=body)
                with hanging(own_postgres):
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == 200
                    async with asyncio.timeout(LEAVES_S):
                        await first.stop()
        with tenants(url, "other") as store, gateway(replica.url, url, tmp_path) as second:
            await second.start()
            assert [row.status for row in await store.settled(2)] == ["completed"] * 2
            await second.stop()


async def test_log_and_metrics_say_when_accounts_are_as_they_were_and_when_no_longer(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    url = own_postgres.create("stale")

    def says(event: str) -> bool:
        return any(event in line for line in first.log)

    async def store_up() -> str:
        async with httpx2.AsyncClient(base_url=first.url, timeout=30) as client:
            shown = (await client.get("/metrics")).text
        (line,) = re.findall(r"^argosy_gateway_store_up (.*)$", shown, re.MULTILINE)
        return str(line)

    async with rough_server() as replica:
        with tenants(url), gateway(replica.url, url, tmp_path) as first:
            await first.start()
            assert await store_up() == "1.0"
            with hanging(own_postgres):
                await until(lambda: says("account_sync_stale"))
                assert await store_up() == "0.0"
            await until(lambda: says("account_sync_recovered"))
            assert await store_up() == "1.0"
            await first.stop()


async def test_who_is_told_to_leave_while_others_migrate_leaves(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    url = own_postgres.create("migrating")
    with psycopg.connect(url) as migrating, gateway(NOBODY, url, tmp_path) as one:
        migrating.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATING,))
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        await leaves_at_its_start(one, migrating, waiting)


async def test_who_is_told_to_leave_while_it_asks_what_was_used_leaves(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    url = own_postgres.create("summing")
    with tenants(url) as store:
        store.limit(store.project("web"), "tokens", 10**9, "month")
    with psycopg.connect(url) as locking, gateway(NOBODY, url, tmp_path) as one:
        locking.execute("LOCK TABLE usage IN ACCESS EXCLUSIVE MODE")
        await leaves_at_its_start(one, locking, ASKS)


async def leaves_at_its_start(
    one: GatewayProcess, connection: psycopg.Connection, waits: LiteralString
) -> None:
    """Start it, and tell it to leave once the query counts one that waits: it does."""
    starting = asyncio.create_task(one.start())
    while connection.execute(waits).fetchone() != (1,):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.05)
    assert one.process is not None
    one.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(LEAVES_S):
        assert await one.process.wait() == 0
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)


async def test_who_starts_while_it_is_away_waits_for_it_unless_told_to_leave(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    url = own_postgres.create("late")

    def waits() -> bool:
        return any("waiting_for_store" in line for line in one.log)

    async with rough_server() as replica:
        with gateway(replica.url, url, tmp_path) as one:
            own_postgres.program.stop()
            try:
                starting = asyncio.create_task(one.start())
                await until(waits)
                assert one.process is not None
                one.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(LEAVES_S):
                    assert await one.process.wait() == 0
                await asyncio.gather(starting, return_exceptions=True)
                one.log.clear()
                starting = asyncio.create_task(one.start())
                await until(waits)
            finally:
                await asyncio.to_thread(own_postgres.program.start)
            await starting
            await one.stop()


async def test_accounts_are_fresh_while_it_takes_long_to_say_what_was_used(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    url = own_postgres.create("sums")
    body = {"model": MODEL, "prompt": "Say", "max_tokens": 3}
    async with rough_server() as replica:
        with tenants(url) as store, gateway(replica.url, url, tmp_path) as one:
            project = store.project("web")
            key, plain = store.store.accounts.create_key(project, "first", actor="test")
            await one.start()
            headers = {"authorization": f"Bearer {plain}"}
            async with httpx2.AsyncClient(base_url=one.url, headers=headers, timeout=30) as client:
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200
                with psycopg.connect(url) as locking:
                    locking.execute("LOCK TABLE usage IN ACCESS EXCLUSIVE MODE")
                    store.limit(project, "tokens", 10**9, "month")
                    while locking.execute(ASKS).fetchone() != (1,):  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.05)
                    store.store.accounts.revoke_key(key.id, actor="test")
                    async with asyncio.timeout(LEAVES_S):
                        while answer.status_code != 401:
                            answer = await client.post("/v1/completions", json=body)
            await one.stop()
