"""Three complete gateways with one store and one Redis: the tokens that clients receive stay within the limit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_processes import open_organisation
from tests.support.idempotent_gateway import BODIES, CHATS, run_servers
from tests.support.replica_servers import MODEL, serve
from tests.support.services import running_redis

from argosy.deployment import LimitsConfig
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.store import StoreConfig

LIMIT = 2000
MAX_CONCURRENT = 40
MAX_OVERDRAFT = 10
"""Tokens that a stream delivers while its gateway acquires more."""


@pytest.mark.parametrize(
    ("redis_killed", "max_tokens"),
    [pytest.param(False, LIMIT, id="up"), pytest.param(True, 2 * LIMIT, id="killed")],
)
async def test_concurrent_requests_stay_within_token_limit(
    redis_killed: bool, max_tokens: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    engine = FakeEngine(tokenizer, lambda _: Script(list(range(100, 130)), finish="length"))
    statuses: list[int] = []
    with running_redis() as redis, open_organisation(url) as accounts:
        shop = accounts.project("shop")
        accounts.limit(shop, "tokens", LIMIT, "hour")
        accounts.limit(shop, "concurrency", MAX_CONCURRENT)
        headers = {"authorization": f"Bearer {accounts.key(shop)}"}
        viewer = accounts.key(shop, "viewer", role="viewer", scope="gateway")
        async with serve(engine) as served:
            replica = ReplicaConfig(url=served.url, model=MODEL)
            config = GatewayConfig(
                port=0,
                models=[ModelConfig(name="big", replicas=[replica])],
                store=StoreConfig(url=url),
                limits=LimitsConfig(redis=redis.url),
            )
            async with run_servers(config, 3) as urls, httpx2.AsyncClient(timeout=60) as client:

                async def post(base: str, number: int) -> None:
                    body = BODIES[CHATS] | {"max_tokens": 30, "stream": number % 2 == 0}
                    response = await client.post(base + CHATS, json=body, headers=headers)
                    statuses.append(response.status_code)
                    assert response.status_code in {200, 429}, response.text
                    assert int(response.headers["x-ratelimit-limit-tokens"]) == LIMIT
                    if redis_killed and len(statuses) == 15:
                        redis.process.kill()

                async def metrics(base: str) -> str:
                    response = await client.get(
                        f"{base}/metrics", headers={"authorization": f"Bearer {viewer}"}
                    )
                    return response.text

                for _ in range(3):
                    await asyncio.gather(*(post(base, n) for n in range(15) for base in urls))
                sample = f"argosy_gateway_quota_store_up {0.0 if redis_killed else 1.0}"
                async with asyncio.timeout(30):
                    for base in urls:
                        while sample not in await metrics(base):  # noqa: ASYNC110 - metrics have no event
                            await asyncio.sleep(0.05)
        (usage,) = accounts.store.ledger.sum_by_owner("project", [shop], 0.0)[shop]
    assert statuses.count(429) > 0
    assert usage.requests == statuses.count(200)
    overdraft = MAX_CONCURRENT * MAX_OVERDRAFT
    tokens = usage.input_tokens + usage.output_tokens
    assert LIMIT // 2 <= tokens <= max_tokens + overdraft
