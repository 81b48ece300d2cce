"""Gateways with accounts whose clients send `Idempotency-Key`, in front of scripted replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from argosy.deployment import GatewayConfig, LimitsConfig, ModelConfig, ReplicaConfig, Timeouts
from argosy.engine.serving.text import Tokenizer
from argosy.store import IdempotencyConfig, StoreConfig
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_client import serve_gateway
from tests.support.gateway_processes import OrganisationAccounts, open_organisation
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
KEY_HEADER = "Idempotency-Key"
REPLAYED = "idempotent-replayed"
OUTPUT_PRICE = 7
"""Price of an output token in nano-dollars."""


@dataclass(frozen=True)
class IdempotentClient:
    """Client of one gateway with the API key of one project."""

    http: httpx2.AsyncClient

    async def post(self, key: str = "a", path: str = CHATS, **fields: object) -> httpx2.Response:
        """Send the request of `BODIES`, changed by `fields`, with an idempotency key."""
        return await self.http.post(path, json=BODIES[path] | fields, headers={KEY_HEADER: key})

    async def post_until_paused(
        self, engine: FakeEngine, **fields: object
    ) -> asyncio.Task[httpx2.Response]:
        """Send a request and return its task once the engine has paused in the response."""
        task = asyncio.create_task(self.post("a", CHATS, **fields))
        await engine.paused.wait()
        return task

    async def metrics(self) -> str:
        """Return the gateway's metrics."""
        return (await self.http.get("/metrics")).text


@dataclass(frozen=True)
class GatewayFleet:
    """Gateways with one store, and the plaintext API keys of its projects."""

    urls: list[str]
    tenants: OrganisationAccounts
    api_keys: dict[str, str]
    """By name, see `_create_api_keys`."""
    clients: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def client(self, api_key: str = "shop", gateway: int = 0) -> IdempotentClient:
        """Open a client of one gateway that uses the API key with this name."""
        headers = {"authorization": f"Bearer {self.api_keys[api_key]}"}
        http = httpx2.AsyncClient(base_url=self.urls[gateway], headers=headers, timeout=30)
        return IdempotentClient(await self.clients.enter_async_context(http))


@contextlib.asynccontextmanager
async def run_servers(config: GatewayConfig, count: int = 1) -> AsyncIterator[list[str]]:
    """Run gateways with one configuration in this process. Yields their URLs."""
    async with contextlib.AsyncExitStack() as stack:
        yield [(await stack.enter_async_context(serve_gateway(config)))[1] for _ in range(count)]


@contextlib.asynccontextmanager
async def run_gateways(
    folder: Path,
    *replicas: ReplicaConfig,
    gateways: int = 1,
    redis: str | None = None,
    requests: int | None = None,
    output_tokens: int | None = None,
    idempotency: IdempotencyConfig = IdempotencyConfig(),  # noqa: B008 - immutable
) -> AsyncIterator[GatewayFleet]:
    """Run gateways in front of these replicas.

    Args:
        folder: Folder of the store.
        replicas: Replicas of the model "big".
        gateways: Number of gateways.
        redis: URL of the Redis that the gateways share.
        requests: Daily limit of the project "shop" on requests.
        output_tokens: The same on output tokens.
        idempotency: Settings of the idempotency store.
    """
    store = f"sqlite:///{folder / 'argosy.db'}"
    config = GatewayConfig(
        port=0,
        models=[ModelConfig(name="big", routing="round-robin", replicas=list(replicas))],
        store=StoreConfig(url=store),
        limits=LimitsConfig(redis=redis),
        idempotency=idempotency,
        timeouts=Timeouts(failover_timeout_s=0.5),
    )
    with open_organisation(store) as accounts:
        shop = accounts.project("shop")
        for unit, amount in (("requests", requests), ("output_tokens", output_tokens)):
            if amount is not None:
                accounts.limit(shop, unit, amount, "day")
        api_keys = _create_api_keys(accounts, shop)
        async with run_servers(config, gateways) as urls, contextlib.AsyncExitStack() as clients:
            yield GatewayFleet(urls, accounts, api_keys, clients)


def _create_api_keys(accounts: OrganisationAccounts, shop: str) -> dict[str, str]:
    """Create two keys of the project "shop", a key without access to "big", and keys of other projects."""
    zeta = accounts.store.accounts.create_organisation("zeta", actor="test").id
    zeta_project = accounts.store.accounts.create_project(zeta, "store", actor="test").id
    accounts.price(OUTPUT_PRICE)
    return {
        "shop": accounts.key(shop, role="admin", scope="gateway"),
        "same project": accounts.key(shop, "second"),
        "other model": accounts.key(shop, "small", models=("small",)),
        "other project": accounts.key(accounts.project("other")),
        "other organisation": accounts.key(zeta_project),
    }


@contextlib.asynccontextmanager
async def run_gateway_with_engine(
    folder: Path,
    tokenizer: Tokenizer,
    pause_after: int | None = None,
    **settings: Any,  # noqa: ANN401 - arguments of `run_gateways`
) -> AsyncIterator[tuple[GatewayFleet, FakeEngine, IdempotentClient]]:
    """Run gateways in front of one Argosy replica.

    Yields the gateways, the replica's engine and a client of the project "shop". With `pause_after`, the engine pauses
    after that many tokens until the test sets `may_continue`.
    """
    engine = FakeEngine(
        tokenizer, lambda _: Script(TOKENS, finish="length", pause_after=pause_after)
    )
    async with (
        serve(engine) as served,
        run_gateways(folder, ReplicaConfig(url=served.url, model=MODEL), **settings) as fleet,
    ):
        yield fleet, engine, await fleet.client()


def status_and_code(response: httpx2.Response) -> tuple[int, str]:
    """Return the status and the error code of an error response."""
    return response.status_code, response.json()["error"]["code"]
