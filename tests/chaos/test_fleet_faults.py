"""Gateways, replicas, Redis and PostgreSQL fail in turn. Every retried request completes and has its usage row."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.gateway_client import chunk_text, parse_stream
from tests.support.gateway_processes import (
    GatewayProcess,
    OrganisationAccounts,
    gateways,
    open_organisation,
)
from tests.support.replica_process import MODEL, ReplicaProcess
from tests.support.services import (
    PostgresServer,
    Program,
    RedisServer,
    running_postgres,
    running_redis,
)

from argosy.deployment import GatewayConfig, LimitsConfig, ModelConfig, ReplicaConfig, Timeouts
from argosy.store import StoreConfig

pytestmark = pytest.mark.timeout(480)

CLIENTS = 6
RETRYABLE = (httpx2.TransportError, ConnectionError)
"""Errors of a request whose gateway dies."""

Output = tuple[dict[int, str], int]
"""Text by choice, and the number of output tokens."""
Step = Callable[[], Awaitable[object]]


def make_body(number: int) -> dict[str, Any]:
    """Return a request body. Every second request streams, every third one has two choices."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Tell me a story about {number}."}],
        "temperature": 0.9 if number % 2 else 0.0,
        "seed": number,
        "n": 1 + (number % 3 == 1),
        "max_tokens": 40,
    }
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    return body | (streams if number % 2 else {})


def parse_response(content: str) -> Output:
    """Parse a streamed or non-streamed response.

    Raises:
        ConnectionError: The stream ended early.
    """
    if content.startswith("{"):
        body = json.loads(content)
        texts = {each["index"]: each["message"]["content"] for each in body["choices"]}
        return texts, body["usage"]["completion_tokens"]
    stream = parse_stream(content)
    if not stream.done_count:
        raise ConnectionError(content[-200:])
    assert stream.is_complete, content
    stream_texts = defaultdict[int, str](str)
    for choice in (choice for chunk in stream.chunks for choice in chunk["choices"]):
        stream_texts[choice["index"]] += chunk_text(choice)
    return dict(stream_texts), stream.token_counts[-1][1]


@dataclass
class SharedFleet:
    """Gateways that share accounts, limits and replicas, and clients that retry until they succeed."""

    gateways: list[GatewayProcess]
    replicas: list[ReplicaProcess]
    redis: RedisServer
    postgres: PostgresServer
    tenants: OrganisationAccounts
    key: str
    responses_per_step: int
    expected: list[Output] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    """Output tokens by request id, without replayed responses."""
    responses: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released once per response."""

    async def send(self, client: httpx2.AsyncClient, number: int, key: str) -> Output:
        """Send a request to one gateway after another until one returns a complete response."""
        first = number % len(self.gateways)
        for gateway in itertools.cycle(self.gateways[first:] + self.gateways[:first]):
            with contextlib.suppress(*RETRYABLE):
                response = await client.post(
                    f"{gateway.url}/v1/chat/completions",
                    json=make_body(number),
                    headers={"authorization": f"Bearer {self.key}", "idempotency-key": key},
                )
                if response.status_code == 200:
                    output = parse_response(response.text)
                    if "idempotent-replayed" not in response.headers:
                        self.rows[response.headers["x-argosy-request"]] = output[1]
                    return output
                assert response.status_code in {409, 429, 502, 503}, response.text
            await asyncio.sleep(0.05)  # the pause of a client before its retry
        raise AssertionError

    async def send_repeatedly(self, number: int) -> None:
        """Repeat one request, with a new idempotency key each time."""
        async with httpx2.AsyncClient(timeout=60.0) as client:
            for turn in itertools.count():
                output = await self.send(client, number, f"{number}-{turn}")
                assert output == self.expected[number]
                self.responses.release()

    async def during_outages(self, *outages: tuple[Step, Step]) -> None:
        """Check that responses arrive during outages that begin one after the other, and after their common end."""
        for fail, _ in outages:
            await fail()
            await self.wait_for_responses()
        await asyncio.gather(*(recover() for _, recover in outages))
        await self.wait_for_responses()

    async def wait_for_responses(self) -> None:
        for _ in range(self.responses_per_step):
            await self.responses.acquire()


@contextlib.asynccontextmanager
async def run_fleet(
    folder: Path, gateway_count: int, responses_per_step: int
) -> AsyncIterator[SharedFleet]:
    replicas = [ReplicaProcess(folder / f"{number}.sock") for number in range(2)]
    with running_postgres() as postgres, running_redis() as redis:
        url = postgres.create("fleet")
        replica_configs = [ReplicaConfig(url=f"unix:{replica.socket}") for replica in replicas]
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name=MODEL, replicas=replica_configs)],
            store=StoreConfig(url=url),
            limits=LimitsConfig(redis=redis.url),
            timeouts=Timeouts(stream_idle_timeout_s=2.0, first_token_timeout_s=8.0),
        )
        with open_organisation(url) as store:
            project = store.project("web")
            store.limit(project, "tokens", 10**9, "day")
            store.limit(project, "concurrency", 100)
            key = store.key(project)
            try:
                for replica in replicas:
                    await replica.start()
                await asyncio.gather(*(replica.wait_ready() for replica in replicas))
                async with gateways(config, folder, gateway_count) as running:
                    yield SharedFleet(
                        running, replicas, redis, postgres, store, key, responses_per_step
                    )
            finally:
                for replica in replicas:
                    await replica.kill()


async def inject_faults(fleet: SharedFleet) -> None:
    """Make each component fail once, and a gateway and a replica at the same time. Two of three gateways are killed."""
    first, *others, last = fleet.gateways
    left, right = fleet.replicas
    await fleet.during_outages((first.kill, first.start), (left.kill, left.restart))
    await fleet.during_outages(restart_steps(fleet.redis.program))
    for gateway in others:
        await fleet.during_outages((gateway.kill, gateway.start))
    await fleet.during_outages(restart_steps(fleet.postgres.program))
    await fleet.during_outages((partial(suspend, right), right.restart), (last.stop, last.start))


def restart_steps(program: Program) -> tuple[Step, Step]:
    """Return the steps that kill a server with its in-memory data and start it again."""
    return partial(asyncio.to_thread, program.stop), partial(asyncio.to_thread, program.start)


async def suspend(replica: ReplicaProcess) -> None:
    assert replica.process is not None
    replica.process.send_signal(signal.SIGSTOP)


@pytest.mark.parametrize(
    ("gateway_count", "responses_per_step"), [(2, 2), pytest.param(3, 8, marks=pytest.mark.soak)]
)
async def test_retried_requests_complete_and_have_usage_rows(
    tmp_path: Path, gateway_count: int, responses_per_step: int
) -> None:
    async with run_fleet(tmp_path, gateway_count, responses_per_step) as fleet:
        async with httpx2.AsyncClient(timeout=60.0) as client:
            for number in range(CLIENTS):
                fleet.expected.append(await fleet.send(client, number, f"undisturbed-{number}"))
        clients = [asyncio.create_task(fleet.send_repeatedly(n)) for n in range(CLIENTS)]
        faults = asyncio.create_task(inject_faults(fleet))
        done, _ = await asyncio.wait({faults, *clients}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        recorded: dict[str, int] = {}
        while not fleet.rows.keys() <= recorded.keys():
            rows = await asyncio.to_thread(fleet.tenants.rows)
            recorded = {row.request: row.output_tokens for row in rows}
            await asyncio.sleep(0.05)
        assert {name: recorded[name] for name in fleet.rows} == fleet.rows
