"""Versions of a model: which of them serves whom, takeover by the stable one, and rollback without a controller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.cutting_proxy import StreamCutter, cutting_proxy
from tests.support.fake_engine import FakeEngine, Script, arithmetic
from tests.support.gateway_client import run_gateway_server
from tests.support.migrated_store import open_migrated_store
from tests.support.replica_servers import CONFIG, MODEL, events, serve
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.engine.serving.text import Tokenizer
from argosy.gateway import (
    ROUTE_PREFIX,
    FleetPools,
    GatewayPoolsClient,
    PoolsStatus,
    PublishedVersions,
)
from argosy.policy import ReplicaStatus
from argosy.policy.traffic import PoolRoute, TrafficSubject, Variant
from argosy.store import FleetDocument, Store, StoreConfig

FLEET, POOL = "demo", "big-pool"
STABLE, CANDIDATE = "5" * 64, "c" * 64
LABELS = {STABLE: STABLE[:12], CANDIDATE: CANDIDATE[:12]}
CHAT = "/v1/chat/completions"
PREVIEW = "/admin/routing/preview"
TOKENS = list(range(100, 112))
ROUTE = PoolRoute(
    pool=POOL,
    version=1,
    stable=STABLE,
    variants=(Variant(digest=CANDIDATE, share=0.5),),
    salt="salt",
)
AS_CANDIDATE = {"x-argosy-version": "candidate"}


def body(user: str = "", **fields: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": "big", "messages": messages, "max_tokens": 12, "user": user, **fields}


@dataclass
class TwoVersions:
    """A gateway in front of one replica of each version, and what a controller or an operator does."""

    config: GatewayConfig
    store: Store
    engines: dict[str, FakeEngine]
    replicas: dict[str, ReplicaConfig]
    cutter: StreamCutter
    candidate_proxy: contextlib.AsyncExitStack

    @contextlib.asynccontextmanager
    async def run_gateway(self) -> AsyncIterator[httpx2.AsyncClient]:
        async with run_gateway_server(self.config) as (_, client):
            yield client

    async def publish(self, version: int, route: PoolRoute | None, *others: str) -> PoolsStatus:
        """Publish the replica of the route's stable version and of other versions."""
        stable = STABLE if route is None else route.stable
        replicas = {digest: [self.replicas[digest]] for digest in others}
        pools = FleetPools(
            fleet=FLEET,
            version=version,
            models=[ModelConfig(name="big", replicas=[self.replicas[stable]])],
            versions=()
            if route is None
            else [PublishedVersions(model="big", route=route, replicas=replicas)],
        )
        (gateway,) = self.store.gateways.list_running()
        return await GatewayPoolsClient().publish(gateway, pools)

    async def wait_until_ready(self, num_replicas: int) -> PoolsStatus:
        (gateway,) = self.store.gateways.list_running()
        while True:
            status = await GatewayPoolsClient().read_status(gateway)
            ready = [each for each in status.replicas if each.status == ReplicaStatus.READY]
            if len(ready) == num_replicas:
                return status
            await asyncio.sleep(0)

    def write_route(self, route: PoolRoute | None) -> None:
        document = (
            None if route is None else FleetDocument(route.version, msgspec.json.encode(route))
        )
        name, previous = ROUTE_PREFIX + POOL, self.store.fleets.read_documents(FLEET)
        after = previous[name].version if name in previous else 0
        assert self.store.fleets.replace_document(FLEET, name, document, after=after)


@pytest.fixture
async def versions(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[TwoVersions]:
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    config = GatewayConfig(
        port=0,
        fleet=FLEET,
        store=StoreConfig(url=url),
        pools_file=str(tmp_path / "state" / "pools.json"),
    )
    engines = {
        digest: FakeEngine(
            tokenizer, lambda _: Script(list(TOKENS), finish="length"), arithmetic=arithmetic()
        )
        for digest in (STABLE, CANDIDATE)
    }
    cutter, proxy, replicas = StreamCutter(), contextlib.AsyncExitStack(), {}
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))  # pytest's own may be too long
        for digest, engine in engines.items():
            socket = folder / f"{digest[0]}.sock"
            await stack.enter_async_context(
                serve(engine, msgspec.structs.replace(CONFIG, uds=str(socket)))
            )
            is_candidate = digest == CANDIDATE
            proxied = await (proxy if is_candidate else stack).enter_async_context(
                cutting_proxy(socket, cutter if is_candidate else StreamCutter())
            )
            replicas[digest] = ReplicaConfig(
                name=f"big-{digest[0]}", url=proxied, model=MODEL, kind="argosy", max_requests=2
            )
        store = open_migrated_store(url)
        stack.callback(store.close)
        await stack.enter_async_context(proxy)
        yield TwoVersions(config, store, engines, replicas, cutter, proxy)


def contents(response: httpx2.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream without what differs between requests."""
    chunks = [msgspec.json.decode(data) for data in events(response.content)[:-1]]
    return [chunk["choices"][0]["delta"] for chunk in chunks]


async def test_route_divides_users_and_stable_version_completes_streams_of_a_lost_replica(
    versions: TwoVersions,
) -> None:
    async with versions.run_gateway() as client:
        assert (await versions.publish(1, None)).routes == {}
        await versions.wait_until_ready(1)
        assert "x-argosy-version" not in (await client.post(CHAT, json=body())).headers
        await versions.publish(2, ROUTE, CANDIDATE)
        status = await versions.wait_until_ready(2)
        assert status.routes == {POOL: 1}
        for number in range(12):
            subject = TrafficSubject(tenant="", user=f"user-{number}")
            chosen = ROUTE.select_version(subject).digest
            previewed = (await client.post(PREVIEW, json={"request": body(subject.user)})).json()
            assert previewed["version"] == LABELS[chosen]
            assert previewed["replica"] == f"big-{chosen[0]}"
            assert "50 % of the users" in previewed["route_reason"]
            response = await client.post(CHAT, json=body(subject.user))
            assert response.headers["x-argosy-version"] == LABELS[chosen]
        assert all(engine.requests for engine in versions.engines.values())
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["big"]
        assert status.demand is not None
        assert [model.model for model in status.demand.models] == ["big"]

        expected = await client.post(CHAT, json=body(stream=True))
        versions.cutter.events_left = 5
        streamed = await client.post(CHAT, json=body(stream=True), headers=AS_CANDIDATE)
        assert streamed.headers["x-argosy-version"] == LABELS[CANDIDATE]
        assert contents(streamed) == contents(expected)
        identifier = streamed.headers["x-argosy-request"]
        explained = (await client.get(f"/admin/requests/{identifier}")).json()
        assert [attempt["replica"] for attempt in explained["attempts"]] == ["big-c", "big-5"]
        assert explained["version"] == LABELS[STABLE]
        assert f"version {LABELS[STABLE]} took over" in explained["route_reason"]

        await versions.candidate_proxy.aclose()
        dead = await client.post(CHAT, json=body(), headers=AS_CANDIDATE)
        assert dead.headers["x-argosy-version"] == LABELS[STABLE]
        metrics = (await client.get("/metrics")).text
        assert f'argosy_route_version{{pool="{POOL}"}} 1.0' in metrics
        served = f'argosy_version_requests_total{{model="big",version="{LABELS[CANDIDATE]}"}}'
        assert served in metrics


async def test_rollback_needs_no_controller_and_moves_what_waits(versions: TwoVersions) -> None:
    candidate = versions.engines[CANDIDATE]
    candidate.script = lambda _: Script(list(TOKENS), finish="length", pause_after=3)
    async with versions.run_gateway() as client:
        await versions.publish(1, ROUTE, CANDIDATE)
        await versions.wait_until_ready(2)
        requests = [
            asyncio.create_task(client.post(CHAT, json=body(), headers=AS_CANDIDATE))
            for _ in range(5)
        ]
        await until(lambda: len(candidate.requests) == 2)  # the others wait for their slots
        rolled_back = ROUTE.roll_back("errors", at=1.0)
        versions.write_route(rolled_back)
        done, running = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 3:
            done, running = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result().headers["x-argosy-version"] for task in done} == {LABELS[STABLE]}
        candidate.may_continue.set()
        for task in running:
            assert (await task).headers["x-argosy-version"] == LABELS[CANDIDATE]
        assert (await versions.publish(2, ROUTE, CANDIDATE)).routes == {POOL: 2}
    versions.write_route(None)  # so that only the copy on disk has it
    async with versions.run_gateway() as client:
        await versions.wait_until_ready(2)
        response = await client.post(CHAT, json=body(), headers=AS_CANDIDATE)
        assert response.headers["x-argosy-version"] == LABELS[STABLE]

        promoted = PoolRoute(pool=POOL, version=7, stable=CANDIDATE, rollout="next")
        versions.write_route(promoted)
        while response.headers["x-argosy-version"] != LABELS[CANDIDATE]:
            response = await client.post(CHAT, json=body())
        status = await versions.publish(3, promoted)
        assert status.routes == {POOL: 7}
        assert [each.replica for each in status.replicas] == ["big-c"]
        response = await client.post(CHAT, json=body())
        assert response.headers["x-argosy-version"] == LABELS[CANDIDATE]
