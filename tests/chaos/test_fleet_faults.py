"""Gateways, replicas, Redis and PostgreSQL die in turns: who asks again is answered, and each answer has its row."""

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
from tests.chaos.test_gateway_faults import ReplicaProcess
from tests.support.gateway_processes import GatewayProcess, Tenants, gateways, tenants
from tests.support.services import (
    PostgresServer,
    Program,
    RedisServer,
    running_postgres,
    running_redis,
)

from argosy.gateway import GatewayConfig, ModelConfig, ReplicaConfig, Timeouts
from argosy.gateway.filters import LimitsConfig
from argosy.store import StoreConfig

pytestmark = pytest.mark.timeout(480)

MODEL = "argosy-mini"
CLIENTS = 6
BETWEEN = 8
"""Answers that come while something is away, and after it is back."""
PASSING = (httpx2.TransportError, ConnectionError)
"""What befalls who asks a gateway that dies."""

Answer = tuple[dict[int, str], int]
"""Text by choice, and output tokens."""
Step = Callable[[], Awaitable[object]]


def asked(number: int) -> dict[str, Any]:
    """The body of a request: every second one streams, every third one has two choices."""
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


def read(content: str) -> Answer:
    """An answer, streamed or whole. Raises ConnectionError for one that broke off."""
    if content.startswith("{"):
        whole = json.loads(content)
        texts = {one["index"]: one["message"]["content"] for one in whole["choices"]}
        return texts, whole["usage"]["completion_tokens"]
    told, tokens = defaultdict[int, str](str), 0
    events = [line.removeprefix("data: ") for line in content.split("\n\n") if line[:1] == "d"]
    if events[-1:] != ["[DONE]"]:
        raise ConnectionError(content[-200:])
    for chunk in map(json.loads, events[:-1]):
        for choice in chunk["choices"]:
            told[choice["index"]] += choice["delta"].get("content") or ""
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return dict(told), tokens


@dataclass
class Fleet:
    """Three gateways that share accounts, limits and replicas, and clients who ask again until they are answered."""

    gateways: list[GatewayProcess]
    replicas: list[ReplicaProcess]
    redis: RedisServer
    postgres: PostgresServer
    tenants: Tenants
    key: str
    expected: list[Answer] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    """Tokens of each answer, by its id; not of those that were kept, and given again."""
    came: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """One for each answer."""

    async def answer(self, client: httpx2.AsyncClient, number: int, key: str) -> Answer:
        """One request, sent to one gateway after another."""
        for gateway in itertools.cycle(self.gateways[number % 3 :] + self.gateways[: number % 3]):
            with contextlib.suppress(*PASSING):
                told = await client.post(
                    f"{gateway.url}/v1/chat/completions",
                    json=asked(number),
                    headers={"authorization": f"Bearer {self.key}", "idempotency-key": key},
                )
                if told.status_code == 200:
                    answer = read(told.text)
                    if "idempotent-replayed" not in told.headers:
                        self.rows[told.headers["x-argosy-request"]] = answer[1]
                    return answer
                assert told.status_code in {409, 429, 502, 503}, told.text
            await asyncio.sleep(0.05)  # as clients do
        raise AssertionError

    async def ask_on(self, number: int) -> None:
        """One client: its request again and again, each time under another key."""
        async with httpx2.AsyncClient(timeout=60.0) as client:
            for turn in itertools.count():
                answer = await self.answer(client, number, f"{number}-{turn}")
                assert answer == self.expected[number]
                self.came.release()

    async def without(self, goes: Step, is_back: Step) -> None:
        """Answers come while a part of it is away, and after that."""
        for step in (goes, is_back):
            await step()
            for _ in range(BETWEEN):
                await self.came.acquire()


@contextlib.asynccontextmanager
async def started(folder: Path) -> AsyncIterator[Fleet]:
    replicas = [ReplicaProcess(folder / f"{number}.sock") for number in range(2)]
    with running_postgres() as postgres, running_redis() as redis:
        url = postgres.create("fleet")
        behind = [ReplicaConfig(url=f"unix:{replica.socket}") for replica in replicas]
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name=MODEL, replicas=behind)],
            store=StoreConfig(url=url),
            limits=LimitsConfig(redis=redis.url),
            timeouts=Timeouts(stream_idle_timeout_s=4.0, first_token_timeout_s=20.0),
        )
        with tenants(url) as store:
            project = store.project("web")
            store.limit(project, "tokens", 10**9, "day")
            store.limit(project, "concurrency", 100)
            key = store.key(project)
            try:
                for replica in replicas:
                    await replica.start()
                await asyncio.gather(*(replica.ready() for replica in replicas))
                async with gateways(config, folder, 3) as running:
                    yield Fleet(running, replicas, redis, postgres, store, key)
            finally:
                for replica in replicas:
                    await replica.end()


async def faults(fleet: Fleet) -> None:
    """One after the other, each part away for a while."""
    first, second, third = fleet.gateways
    left, right = fleet.replicas
    await fleet.without(first.kill, first.start)
    await fleet.without(left.end, partial(begin, left))
    await fleet.without(*dying(fleet.redis.program))
    await fleet.without(second.kill, second.start)
    await fleet.without(*dying(fleet.postgres.program))
    await fleet.without(partial(stand_still, right), partial(begin, right))
    await fleet.without(third.stop, third.start)


def dying(program: Program) -> tuple[Step, Step]:
    """How a server goes, with all that it keeps in memory, and how it is back."""
    return partial(asyncio.to_thread, program.stop), partial(asyncio.to_thread, program.start)


async def begin(replica: ReplicaProcess) -> None:
    await replica.end()
    await replica.start()
    await replica.ready()


async def stand_still(replica: ReplicaProcess) -> None:
    assert replica.process is not None
    replica.process.send_signal(signal.SIGSTOP)


async def test_whatever_dies_who_asks_again_is_answered_and_each_answer_has_its_row(
    tmp_path: Path,
) -> None:
    async with started(tmp_path) as fleet:
        async with httpx2.AsyncClient(timeout=60.0) as client:
            for number in range(CLIENTS):
                fleet.expected.append(await fleet.answer(client, number, f"calm-{number}"))
        clients = [asyncio.create_task(fleet.ask_on(number)) for number in range(CLIENTS)]
        suffering = asyncio.create_task(faults(fleet))
        done, _ = await asyncio.wait({suffering, *clients}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        there: dict[str, int] = {}
        while not fleet.rows.keys() <= there.keys():
            rows = await asyncio.to_thread(fleet.tenants.rows)
            there = {row.request: row.output_tokens for row in rows}
        assert {name: there[name] for name in fleet.rows} == fleet.rows
