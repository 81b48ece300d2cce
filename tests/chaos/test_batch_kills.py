"""Gateways and replicas are killed while a batch runs, and connections to its store are cut.

Each line is answered once, billed once, and in its order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.support.gateway_processes import (
    GatewayProcess,
    gateways,
    open_organisation,
    open_sdk_client,
)
from tests.support.replica_process import MODEL, ReplicaProcess

from argosy.deployment import AuthConfig, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.store import Batch, ItemOwner, Price, StoreConfig, StoreError

RATE = 3
CHAT: Any = "/v1/chat/completions"
OPEN = {"validating", "in_progress", "finalizing"}
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(14_400), pytest.mark.asyncio]


def build_input(count: int) -> bytes:
    lines = []
    for number in range(count):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Tell me a story about {number}."}],
            "temperature": 0.9 if number % 2 else 0.0,
            "max_tokens": 16 if count < 1000 else 4,
        }
        line = {"custom_id": f"q{number}", "method": "POST", "url": CHAT, "body": body}
        lines.append(json.dumps(line | {"body": body | {"seed": number}}))
    return "\n".join(lines).encode()


def normalise(text: str) -> list[tuple[str, Any, Any]]:
    """Return id, choices and tokens of each line. Cached tokens and times differ between runs."""
    answers = [json.loads(line) for line in text.splitlines()]
    return [
        (
            each["custom_id"],
            each["response"]["body"]["choices"],
            each["response"]["body"]["usage"]["completion_tokens"],
        )
        for each in answers
    ]


async def create(url: str, key: str, count: int) -> str:
    async with open_sdk_client(url, key) as client:
        file = await client.files.create(file=("in.jsonl", build_input(count)), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
    return batch.id


async def read_output(url: str, key: str, batch_id: str) -> str:
    async with open_sdk_client(url, key) as sdk:
        client = sdk.with_options(max_retries=5)  # connections to the store may just have been cut
        batch = await client.batches.retrieve(batch_id)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        assert batch.output_file_id is not None
        return (await client.files.content(batch.output_file_id)).text


async def restart_later(process: GatewayProcess | ReplicaProcess) -> None:
    await process.kill()
    await asyncio.sleep(1.0)
    await process.start()


def cut_connections(url: str) -> None:
    """End all connections to a database of PostgreSQL."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


@pytest.mark.parametrize(("lines", "kills"), [(120, 12), (5000, 100)])
async def test_killed_processes_lose_and_repeat_no_line(
    tmp_path: Path, request: pytest.FixtureRequest, lines: int, kills: int
) -> None:
    url, draws = f"sqlite:///{tmp_path}/store.db", random.Random(5)
    has_server = lines > 1000
    if has_server:
        url = request.getfixturevalue("postgres_url")
    replicas = [ReplicaProcess(tmp_path / f"{number}.sock") for number in range(2)]
    with open_organisation(url) as accounts:
        price = Price(model=MODEL, input=RATE, cached_input=RATE, output=RATE)
        accounts.store.limits_and_prices.set_price(price, actor="test")
        project = accounts.project("batches")
        key, owner = accounts.key(project), ItemOwner(accounts.organisation, project)
        config = GatewayConfig(
            port=0,
            models=[
                ModelConfig(
                    name=MODEL,
                    replicas=[ReplicaConfig(url=f"unix:{each.socket}") for each in replicas],
                )
            ],
            store=StoreConfig(url=url, blobs=str(tmp_path / "blobs")),
            auth=AuthConfig(mode="required"),
        )

        async def find(batch_id: str) -> Batch:
            while True:
                with contextlib.suppress(StoreError):  # its connection was cut
                    return await asyncio.to_thread(accounts.store.batches.get, owner, batch_id)

        async def wait_ended(batch_id: str) -> None:
            async with asyncio.timeout(7200):
                while (await find(batch_id)).status in OPEN:  # noqa: ASYNC110 - the store has no event
                    await asyncio.sleep(0.5)

        try:
            for replica in replicas:
                await replica.start()
            await asyncio.gather(*(replica.wait_ready() for replica in replicas))
            async with gateways(config, tmp_path, 2) as running:
                calm = await create(running[0].url, key, lines)
                await wait_ended(calm)
                expected = normalise(await read_output(running[0].url, key, calm))
                disturbed = await create(running[1].url, key, lines)
                victims: list[GatewayProcess | ReplicaProcess] = [*running, *replicas]
                restarts: dict[int, asyncio.Task[None]] = {}
                for number in range(kills):  # evenly over the lines, however fast they are
                    while (await find(disturbed)).completed < lines * (number + 0.5) / kills:  # noqa: ASYNC110 - as above
                        await asyncio.sleep(0.1)
                    choices = [
                        index
                        for index in range(len(victims) + has_server)
                        if index not in restarts or restarts[index].done()
                    ]
                    if not choices:
                        await asyncio.wait(restarts.values(), return_when=asyncio.FIRST_COMPLETED)
                        continue
                    index = draws.choice(choices)
                    if index == len(victims):
                        await asyncio.to_thread(cut_connections, url)
                    else:
                        restarts[index] = asyncio.create_task(restart_later(victims[index]))
                await asyncio.gather(*restarts.values())
                await wait_ended(disturbed)
                output = await read_output(running[0].url, key, disturbed)
        finally:
            for replica in replicas:
                await replica.kill()
        assert normalise(output) == expected
        ids = {json.loads(line)["id"] for line in output.splitlines()}
        rows = [row for row in accounts.rows() if row.request in ids]
        assert len(rows) == len(ids) == lines
        usage = [json.loads(line)["response"]["body"]["usage"] for line in output.splitlines()]
        tokens = [each["total_tokens"] for each in usage]
        assert sum(row.nano_dollars for row in rows) == sum(count * RATE // 2 for count in tokens)
        batch = await find(disturbed)
        assert (batch.total, batch.completed, batch.failed) == (lines, lines, 0)
        assert not accounts.store.batches.list_holders()
