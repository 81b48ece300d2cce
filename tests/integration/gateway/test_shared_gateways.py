"""Three whole gateways with one store and one Redis: what clients are given never passes what is said of the limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.fake_engine import FakeEngine, Script
from tests.support.replica_servers import MODEL, serve
from tests.support.services import running_redis

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import GatewayConfig, GatewayServer, ModelConfig, ReplicaConfig
from argosy.gateway.filters.limit_filter import LimitsConfig
from argosy.store import StoreConfig, UsageTotals, open_store

TOKENS = list(range(100, 130))
LIMIT = 2000
CHATS = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "big",
    "messages": [{"role": "user", "content": "Tell me a story"}],
    "max_tokens": 30,
}


@contextlib.asynccontextmanager
async def gateways(config: GatewayConfig, count: int) -> AsyncIterator[list[str]]:
    """The URLs of so many."""
    loop = asyncio.get_running_loop()
    urls: list[asyncio.Future[str]] = [loop.create_future() for _ in range(count)]
    servers = [GatewayServer(config, url.set_result) for url in urls]
    running = [asyncio.create_task(server.run()) for server in servers]
    try:
        async with asyncio.timeout(30):
            ready = await asyncio.gather(*urls)
        yield ready
    finally:
        for server in servers:
            server.stop()
        await asyncio.gather(*running)


@pytest.mark.parametrize(("killed", "most"), [(False, LIMIT), (True, 2 * LIMIT)])
async def test_hammering_three_gateways(
    killed: bool, most: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    store = open_store(url)
    store.migrate()
    accounts, actor = store.accounts, "test"
    acme = accounts.create_organisation("acme", actor=actor)
    shop = accounts.create_project(acme.id, "shop", actor=actor)
    key, plain = accounts.create_key(shop.id, "web", actor=actor)
    store.limits_and_prices.set_limit(
        "project", shop.id, "tokens", LIMIT, window="hour", actor=actor
    )
    store.limits_and_prices.set_limit("key", key.id, "concurrency", 40, actor=actor)
    engine = FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length"))
    headers = {"authorization": f"Bearer {plain}"}
    _, viewer = accounts.create_key(shop.id, "ops", role="viewer", scope="gateway", actor=actor)
    operator = {"authorization": f"Bearer {viewer}"}
    statuses: list[int] = []
    with running_redis() as redis:
        async with serve(engine) as served:
            behind = ReplicaConfig(url=served.url, model=MODEL)
            config = GatewayConfig(
                port=0,
                models=[ModelConfig(name="big", replicas=[behind])],
                store=StoreConfig(url=url),
                limits=LimitsConfig(redis=redis.url),
            )
            async with gateways(config, 3) as urls, httpx2.AsyncClient(timeout=60) as client:

                async def ask(base: str, number: int) -> None:
                    body = BODY | {"stream": number % 2 == 0}
                    answer = await client.post(base + CHATS, json=body, headers=headers)
                    statuses.append(answer.status_code)
                    assert answer.status_code in {200, 429}, answer.text
                    assert int(answer.headers["x-ratelimit-limit-tokens"]) == LIMIT
                    if killed and len(statuses) == 15:
                        redis.process.kill()

                for _ in range(3):
                    await asyncio.gather(*(ask(base, n) for n in range(15) for base in urls))
                up = f"argosy_gateway_quota_store_up {0.0 if killed else 1.0}"
                async with asyncio.timeout(30):
                    for base in urls:
                        while (
                            up not in (await client.get(f"{base}/metrics", headers=operator)).text
                        ):
                            pass
    (spent,) = store.ledger.sum_by_owner("project", [shop.id], 0.0)[shop.id]
    store.close()
    assert statuses.count(429) > 0
    assert spent.requests == statuses.count(200)
    tokens = _tokens(spent)
    assert LIMIT // 2 <= tokens <= most + 40 * 10  # what is lent while Redis is asked


def _tokens(spent: UsageTotals) -> int:
    return spent.input_tokens + spent.output_tokens
