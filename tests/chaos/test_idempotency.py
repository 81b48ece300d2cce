"""Retries with the same idempotency keys at two gateways on one Redis while Redis or a gateway is killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.gateway_processes import (
    MODEL,
    GatewayProcess,
    OrganisationAccounts,
    gateways,
    open_organisation,
)
from tests.support.idempotent_gateway import KEY_HEADER, REPLAYED
from tests.support.services import RedisServer, running_redis

from argosy.deployment import GatewayConfig, LimitsConfig, ModelConfig, ReplicaConfig
from argosy.store import StoreConfig

NUM_GATEWAYS = 2
NUM_KEYS = 10
NUM_RETRIES = 4
"""Concurrent requests with each key."""
TOKENS = 20
RESPONSE_S = 0.02
RETRY_INTERVAL_S = 0.1


@dataclass
class CountingEngine:
    """Counts responses by prompt. The first response to the prompt "hang" hangs after five tokens."""

    num_responses: Counter[str] = field(default_factory=Counter)
    hanging: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, request: UpstreamRequest) -> None:
        prompt = str(request.body["prompt"])
        self.num_responses[prompt] += 1
        request.start_stream()
        for position in range(TOKENS):
            if position == 5 and prompt == "hang" and self.num_responses[prompt] == 1:
                await request.writer.drain()
                self.hanging.set()
                await asyncio.Event().wait()
            request.send_text(f" {position}", "length" if position == TOKENS - 1 else None)
            await request.writer.drain()
            await asyncio.sleep(RESPONSE_S / TOKENS)
        request.end_stream(tokens=TOKENS)


@dataclass
class Fleet:
    """Gateway processes in front of one engine."""

    processes: list[GatewayProcess]
    accounts: OrganisationAccounts
    redis: RedisServer
    engine: CountingEngine
    client: httpx2.AsyncClient

    async def post(self, gateway: int, prompt: str) -> httpx2.Response:
        """Send a request whose key is its prompt, again while the key is in use."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
        url = f"{self.processes[gateway].url}/v1/completions"
        while True:
            response = await self.client.post(url, json=body, headers={KEY_HEADER: prompt})
            if response.status_code != 409:
                return response
            await asyncio.sleep(RETRY_INTERVAL_S)


@contextlib.asynccontextmanager
async def run_fleet(folder: Path) -> AsyncIterator[Fleet]:
    engine, store = CountingEngine(), f"sqlite:///{folder / 'argosy.db'}"
    with running_redis() as redis, open_organisation(store) as accounts:
        key = accounts.key(accounts.project("shop"))
        accounts.price(1)
        async with fake_upstream(engine) as server:
            replica = ReplicaConfig(url=server.url, kind="openai", model="rough")
            config = GatewayConfig(
                port=0,
                models=[ModelConfig(name=MODEL, replicas=[replica])],
                store=StoreConfig(url=store),
                limits=LimitsConfig(redis=redis.url),
            )
            headers = {"authorization": f"Bearer {key}"}
            async with (
                gateways(config, folder, NUM_GATEWAYS) as processes,
                httpx2.AsyncClient(headers=headers, timeout=60) as client,
            ):
                yield Fleet(processes, accounts, redis, engine, client)


@pytest.mark.parametrize(
    "redis_killed",
    [
        pytest.param(True, id="redis-killed"),
        pytest.param(False, id="redis-up", marks=pytest.mark.soak),
    ],
)
async def test_concurrent_retries_generate_one_response_per_key(
    redis_killed: bool, tmp_path: Path
) -> None:
    """Without Redis each gateway may generate one response per key."""
    async with run_fleet(tmp_path) as fleet:
        requests = [
            asyncio.create_task(fleet.post(retry % NUM_GATEWAYS, f"p{key}"))
            for retry in range(NUM_RETRIES)
            for key in range(NUM_KEYS)
        ]
        if redis_killed:
            await requests[0]
            fleet.redis.process.kill()
        responses_by_key: dict[str, list[httpx2.Response]] = {}
        for number, response in enumerate(await asyncio.gather(*requests)):
            responses_by_key.setdefault(f"p{number % NUM_KEYS}", []).append(response)
        max_generated = NUM_GATEWAYS if redis_killed else 1
        for responses in responses_by_key.values():
            assert {response.status_code for response in responses} == {200}
            generated = [each.content for each in responses if REPLAYED not in each.headers]
            assert 1 <= len(generated) <= max_generated
            assert {response.content for response in responses} == set(generated)
        assert max(fleet.engine.num_responses.values()) <= max_generated
        num_responses = fleet.engine.num_responses.total()
        records = await fleet.accounts.wait_for_rows(num_responses)
        assert sum(record.output_tokens for record in records) == num_responses * TOKENS


@pytest.mark.soak
async def test_key_of_killed_gateway_becomes_free(tmp_path: Path) -> None:
    async with run_fleet(tmp_path) as fleet:
        request = asyncio.create_task(fleet.post(0, "hang"))
        await fleet.engine.hanging.wait()
        await fleet.processes[0].kill()
        with pytest.raises(httpx2.TransportError):
            await request
        response = await fleet.post(1, "hang")
        assert (response.status_code, REPLAYED in response.headers) == (200, False)
        assert fleet.engine.num_responses["hang"] == 2
        second = await fleet.post(1, "hang")
        assert (second.content, second.headers[REPLAYED]) == (response.content, "true")
