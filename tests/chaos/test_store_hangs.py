"""Databases that hang or are locked: gateways serve requests, lose no record and exit when they are terminated."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import LiteralString

import httpx2
import psutil
import psycopg
import pytest
from tests.support.fake_upstream import fake_upstream
from tests.support.gateway_processes import MODEL, GatewayProcess, open_organisation
from tests.support.services import PostgresServer, running_postgres
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.store import StoreConfig
from argosy.store.migrations import _ADVISORY_LOCK_ID as MIGRATION_LOCK_ID

pytestmark = pytest.mark.timeout(480)

EXIT_TIMEOUT_S = 30.0
UNUSED_URL = "http://127.0.0.1:1"
COMPLETION = {"model": MODEL, "prompt": "Say", "max_tokens": 3}
WAITING_READERS = "SELECT count(*) FROM pg_locks WHERE mode = 'AccessShareLock' AND NOT granted"
WAITING_MIGRATIONS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PostgresServer]:
    """PostgreSQL server that these tests may stop."""
    with running_postgres() as server:
        yield server


@contextlib.contextmanager
def suspended(server: PostgresServer) -> Iterator[None]:
    """Suspend all processes of a server."""
    parent = psutil.Process(server.program.process.pid)
    processes = [parent, *parent.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@contextlib.contextmanager
def prepare_gateway(replica_url: str, store_url: str, folder: Path) -> Iterator[GatewayProcess]:
    """Yield a gateway that is not started. The gateway is killed at the end if it still runs."""
    replicas = [ReplicaConfig(url=replica_url, kind="openai", model="rough")]
    models = [ModelConfig(name=MODEL, replicas=replicas)]
    config = GatewayConfig(port=0, models=models, store=StoreConfig(url=store_url))
    gateway = GatewayProcess(config, folder)
    try:
        yield gateway
    finally:
        if gateway.process is not None and gateway.process.returncode is None:
            gateway.process.kill()


async def terminate_before_ready(gateway: GatewayProcess, starting: asyncio.Task[None]) -> None:
    """Send SIGTERM to a gateway that is not ready, and check that it exits."""
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(EXIT_TIMEOUT_S):
        assert await gateway.process.wait() == 0
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)


def has_logged(gateway: GatewayProcess, event: str) -> bool:
    return any(event in line for line in gateway.log)


async def wait_for_lock_wait(connection: psycopg.Connection, query: LiteralString) -> None:
    """Wait until the query counts one session that waits for a lock."""
    while connection.execute(query).fetchone() != (1,):  # noqa: ASYNC110 - locks have no event
        await asyncio.sleep(0.05)


async def read_store_up(gateway: GatewayProcess) -> str:
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=30) as client:
        metrics = (await client.get("/metrics")).text
    (value,) = re.findall(r"^argosy_gateway_store_up (.*)$", metrics, re.MULTILINE)
    return str(value)


async def test_hang_is_shown_and_termination_during_it_exits_and_loses_no_record(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    url = own_postgres.create("hangs")
    async with fake_upstream() as replica:
        with (
            open_organisation(url) as store,
            prepare_gateway(replica.url, url, tmp_path / "terminated") as terminated,
            prepare_gateway(replica.url, url, tmp_path / "recovering") as recovering,
        ):
            await asyncio.gather(terminated.start(), recovering.start())
            assert await read_store_up(recovering) == "1.0"
            async with httpx2.AsyncClient(base_url=terminated.url, timeout=30) as client:
                await client.post("/v1/completions", json=COMPLETION)
                with suspended(own_postgres):
                    response = await client.post("/v1/completions", json=COMPLETION)
                    assert response.status_code == 200
                    async with asyncio.timeout(EXIT_TIMEOUT_S):
                        await terminated.stop()
                    await until(lambda: has_logged(recovering, "account_sync_stale"))
                    assert await read_store_up(recovering) == "0.0"
            await until(lambda: has_logged(recovering, "account_sync_recovered"))
            assert await read_store_up(recovering) == "1.0"
            await recovering.stop()
            await terminated.start()
            assert [row.status for row in await store.wait_for_rows(2)] == ["completed"] * 2
            await terminated.stop()


@pytest.mark.parametrize(
    ("lock_statement", "waiting"),
    [
        (f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK_ID})", WAITING_MIGRATIONS),
        ("LOCK TABLE usage IN ACCESS EXCLUSIVE MODE", WAITING_READERS),
    ],
    ids=["another migration", "sum of usage"],
)
async def test_termination_of_a_blocked_start_exits(
    own_postgres: PostgresServer,
    tmp_path: Path,
    lock_statement: LiteralString,
    waiting: LiteralString,
) -> None:
    with own_postgres.database() as url:
        if waiting == WAITING_READERS:  # a database without tables waits for the migration
            with open_organisation(url) as store:
                store.limit(store.project("web"), "tokens", 10**9, "month")
        with psycopg.connect(url) as lock, prepare_gateway(UNUSED_URL, url, tmp_path) as gateway:
            lock.execute(lock_statement)
            starting = asyncio.create_task(gateway.start())
            await wait_for_lock_wait(lock, waiting)
            await terminate_before_ready(gateway, starting)


async def test_gateway_waits_for_an_unavailable_database_until_terminated(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    url = own_postgres.create("late")
    with (
        prepare_gateway(UNUSED_URL, url, tmp_path / "terminated") as terminated,
        prepare_gateway(UNUSED_URL, url, tmp_path / "waiting") as waiting,
    ):
        own_postgres.program.stop()
        try:
            starting = [asyncio.create_task(each.start()) for each in (terminated, waiting)]
            for gateway in (terminated, waiting):
                await until(partial(has_logged, gateway, "waiting_for_store"))
            await terminate_before_ready(terminated, starting[0])
        finally:
            await asyncio.to_thread(own_postgres.program.start)
        await starting[1]
        await waiting.stop()


async def test_accounts_stay_current_while_usage_is_summed(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    url = own_postgres.create("sums")
    async with fake_upstream() as replica:
        with (
            open_organisation(url) as store,
            prepare_gateway(replica.url, url, tmp_path) as gateway,
        ):
            project = store.project("web")
            key, plain = store.store.accounts.create_key(project, "first", actor="test")
            await gateway.start()
            headers = {"authorization": f"Bearer {plain}"}
            async with httpx2.AsyncClient(
                base_url=gateway.url, headers=headers, timeout=30
            ) as client:
                response = await client.post("/v1/completions", json=COMPLETION)
                assert response.status_code == 200
                with psycopg.connect(url) as lock:
                    lock.execute("LOCK TABLE usage IN ACCESS EXCLUSIVE MODE")
                    store.limit(project, "tokens", 10**9, "month")
                    await wait_for_lock_wait(lock, WAITING_READERS)
                    store.store.accounts.revoke_key(key.id, actor="test")
                    async with asyncio.timeout(EXIT_TIMEOUT_S):
                        while response.status_code != 401:
                            response = await client.post("/v1/completions", json=COMPLETION)
            await gateway.stop()
