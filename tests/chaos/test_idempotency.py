"""Two gateways on one Redis, asked again and again with the same keys, while a gateway or Redis dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest
from tests.support.gateway_processes import MODEL, GatewayProcess, Tenants, gateways, tenants
from tests.support.scripted_server import Asked, rough_server
from tests.support.services import RedisServer, running_redis

from argosy.gateway import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway.filters.limit_filter import LimitsConfig
from argosy.store import StoreConfig

GATEWAYS = 2
KEYS = 20
RETRIES = 6
"""Of each key, at a time."""
TOKENS = 20
SOON_S = 0.02


@dataclass
class Engine:
    """Answers, and counts how often to which prompt; to one that says "hold" it begins, and waits."""

    runs: Counter[str] = field(default_factory=Counter)
    holds: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, asked: Asked) -> None:
        prompt = str(asked.body["prompt"])
        self.runs[prompt] += 1
        asked.stream()
        for place in range(TOKENS):
            if place == 5 and prompt == "hold" and self.runs[prompt] == 1:
                await asked.writer.drain()
                self.holds.set()
                await asyncio.Event().wait()
            asked.say(f" {place}", "length" if place == TOKENS - 1 else None)
            await asked.writer.drain()
            await asyncio.sleep(SOON_S / TOKENS)
        asked.end(tokens=TOKENS)


@dataclass
class Fleet:
    running: list[GatewayProcess]
    people: Tenants
    redis: RedisServer
    engine: Engine
    client: httpx2.AsyncClient

    async def ask(self, gateway: int, prompt: str) -> httpx2.Response:
        """The answer to a stream whose key is its prompt, once the key is not in use."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
        url = f"{self.running[gateway].url}/v1/completions"
        while True:
            answer = await self.client.post(url, json=body, headers={"Idempotency-Key": prompt})
            if answer.status_code != 409:
                return answer
            await asyncio.sleep(SOON_S)


@contextlib.asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    engine, store = Engine(), f"sqlite:///{folder / 'argosy.db'}"
    with running_redis() as redis, tenants(store) as people:
        key = people.key(people.project("shop"))
        people.price(1)
        async with rough_server(engine) as rough:
            behind = ReplicaConfig(url=rough.url, kind="openai", model="rough")
            config = GatewayConfig(
                port=0,
                models=[ModelConfig(name=MODEL, replicas=[behind])],
                store=StoreConfig(url=store),
                limits=LimitsConfig(redis=redis.url),
            )
            headers = {"authorization": f"Bearer {key}"}
            async with (
                gateways(config, folder, GATEWAYS) as running,
                httpx2.AsyncClient(headers=headers, timeout=60) as client,
            ):
                yield Fleet(running, people, redis, engine, client)


@pytest.mark.parametrize("killed", [False, True])
async def test_a_storm_of_retries_is_answered_once(killed: bool, tmp_path: Path) -> None:
    async with fleet(tmp_path) as here:
        asked = [
            asyncio.create_task(here.ask(number % GATEWAYS, f"p{key}"))
            for number in range(RETRIES)
            for key in range(KEYS)
        ]
        if killed:
            await asked[0]
            here.redis.process.kill()
        told: dict[str, list[httpx2.Response]] = {}
        for number, answer in enumerate(await asyncio.gather(*asked)):
            told.setdefault(f"p{number % KEYS}", []).append(answer)
        most = GATEWAYS if killed else 1
        for answers in told.values():
            assert {answer.status_code for answer in answers} == {200}
            first = [one.content for one in answers if "idempotent-replayed" not in one.headers]
            assert 1 <= len(first) <= most
            assert {answer.content for answer in answers} == set(first)
        assert max(here.engine.runs.values()) <= most
        runs = here.engine.runs.total()
        rows = await here.people.settled(runs)
        assert sum(row.output_tokens for row in rows) == runs * TOKENS


async def test_the_key_of_a_gateway_that_is_killed_is_free_soon(tmp_path: Path) -> None:
    async with fleet(tmp_path) as here:
        asking = asyncio.create_task(here.ask(0, "hold"))
        await here.engine.holds.wait()
        await here.running[0].kill()
        with pytest.raises(httpx2.TransportError):
            await asking
        answer = await here.ask(1, "hold")
        assert (answer.status_code, "idempotent-replayed" in answer.headers) == (200, False)
        assert here.engine.runs["hold"] == 2
        again = await here.ask(1, "hold")
        assert (again.content, again.headers["idempotent-replayed"]) == (answer.content, "true")
