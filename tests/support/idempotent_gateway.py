"""Gateways whose callers send an `Idempotency-Key`, in front of scripted replicas: what its tests share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import GatewayConfig, GatewayServer, ModelConfig, ReplicaConfig, Timeouts
from argosy.gateway.filters.limit_filter import LimitsConfig
from argosy.store import IdempotencyConfig, StoreConfig
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_processes import Tenants, tenants
from tests.support.replica_servers import MODEL, serve

TOKENS = list(range(100, 160))
CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {
        "model": "big",
        "messages": [{"role": "user", "content": "Tell me a story"}],
        "max_tokens": 60,
    },
    COMPLETIONS: {"model": "big", "prompt": "Once upon", "max_tokens": 60},
}
KEY = "Idempotency-Key"
REPLAYED = "idempotent-replayed"
PRICE = 7
"""Of an output token, in nano-dollars."""


@dataclass(frozen=True)
class Caller:
    """Who asks one gateway."""

    client: httpx2.AsyncClient

    async def ask(self, key: str = "a", path: str = CHATS, **extra: object) -> httpx2.Response:
        return await self.client.post(path, json=BODIES[path] | extra, headers={KEY: key})

    async def begin(self, engine: FakeEngine, **extra: object) -> asyncio.Task[httpx2.Response]:
        """Ask, and go on once the engine waits in the middle of the answer."""
        asking = asyncio.create_task(self.ask("a", CHATS, **extra))
        await engine.paused.wait()
        return asking

    async def metrics(self) -> str:
        return (await self.client.get("/metrics")).text


@dataclass(frozen=True)
class Fleet:
    """Gateways with one store, and those whom they know."""

    urls: list[str]
    people: Tenants
    keys: dict[str, str]
    """In plain: of the project "shop", of another of its organisation, and of another organisation."""
    clients: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def principal(self, who: str = "shop", gateway: int = 0) -> Caller:
        headers = {"authorization": f"Bearer {self.keys[who]}"}
        client = httpx2.AsyncClient(base_url=self.urls[gateway], headers=headers, timeout=30)
        return Caller(await self.clients.enter_async_context(client))


@contextlib.asynccontextmanager
async def fleet(
    folder: Path,
    *behind: ReplicaConfig,
    gateways: int = 1,
    redis: str | None = None,
    requests: int | None = None,
    tokens: int | None = None,
    idempotency: IdempotencyConfig = IdempotencyConfig(),  # noqa: B008 - immutable
) -> AsyncIterator[Fleet]:
    """Gateways in front of these replicas; "shop" may ask so often a day, and be given so many tokens."""
    store = f"sqlite:///{folder / 'argosy.db'}"
    config = GatewayConfig(
        port=0,
        models=[ModelConfig(name="big", routing="round-robin", replicas=list(behind))],
        store=StoreConfig(url=store),
        limits=LimitsConfig(redis=redis),
        idempotency=idempotency,
        timeouts=Timeouts(failover_timeout_s=0.5),
    )
    with tenants(store) as people:
        keys = _keys(people)
        (shop,) = {p.id for p in people.store.load_snapshot().projects if p.name == "shop"}
        for unit, most in (("requests", requests), ("output_tokens", tokens)):
            if most is not None:
                people.limit(shop, unit, most, "day")
        loop = asyncio.get_running_loop()
        urls: list[asyncio.Future[str]] = [loop.create_future() for _ in range(gateways)]
        servers = [GatewayServer(config, url.set_result) for url in urls]
        running = [asyncio.create_task(server.run()) for server in servers]
        try:
            async with contextlib.AsyncExitStack() as clients:
                yield Fleet([await url for url in urls], people, keys, clients)
        finally:
            for server in servers:
                server.stop()
            await asyncio.gather(*running)


def _keys(people: Tenants) -> dict[str, str]:
    accounts, shop = people.store.accounts, people.project("shop")
    zeta = accounts.create_organisation("zeta", actor="test").id
    theirs = accounts.create_project(zeta, "store", actor="test").id
    people.price(PRICE)
    return {
        "shop": people.key(shop, role="admin", scope="gateway"),
        "colleague": people.key(shop, "second"),
        "small": people.key(shop, "small", models=("small",)),
        "other": people.key(people.project("other")),
        "elsewhere": people.key(theirs),
    }


@contextlib.asynccontextmanager
async def before_replica(
    folder: Path,
    tokenizer: Tokenizer,
    pause_after: int | None = None,
    **settings: Any,  # noqa: ANN401 - a fleet's
) -> AsyncIterator[tuple[Fleet, FakeEngine, Caller]]:
    """A fleet before one replica of ours, which may wait after so many tokens until it is told to go on; and "shop"."""
    engine = FakeEngine(
        tokenizer, lambda _: Script(TOKENS, finish="length", pause_after=pause_after)
    )
    async with (
        serve(engine) as served,
        fleet(folder, ReplicaConfig(url=served.url, model=MODEL), **settings) as made,
    ):
        yield made, engine, await made.principal()


def refusal(answer: httpx2.Response) -> tuple[int, str]:
    """Status and code."""
    return answer.status_code, answer.json()["error"]["code"]
