"""Measurements of versions by a gateway in front of replicas, as the controller reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.fake_upstream import UpstreamRequest, fake_upstream, respond_with_tokens
from tests.support.gateway_client import COMPLETION, QUICK_TIMEOUTS, run_gateway_server

from argosy.gateway import (
    FleetPools,
    GatewayConfig,
    GatewayPoolsClient,
    ModelConfig,
    OtherFleetError,
    OutcomeQuery,
    OutcomeReport,
    PublishedVersions,
    ReplicaConfig,
)
from argosy.policy.rollout import Comparison, OutcomeStatus
from argosy.policy.traffic import PoolRoute, Variant
from argosy.store import FleetDocument, GatewayRecord, StoreConfig, open_store

FLEET = "demo"


async def respond(request: UpstreamRequest) -> None:
    """Answer as the prompt says."""
    match request.body["prompt"]:
        case "refuse":
            request.send_json(400, {"error": {"message": "no", "code": "invalid"}})
        case "filter":
            request.start_stream()
            request.send_text("I", "content_filter")
            request.end_stream(tokens=1)
        case "fail":
            request.send_json(500, {"error": {"message": "broken"}})
        case "hang":
            request.start_stream()
            request.send_text("slow")
            await asyncio.sleep(60)
        case _:
            await respond_with_tokens(request)


async def fail(request: UpstreamRequest) -> None:
    request.send_json(500, {"error": {"message": "broken"}})


class MeasuredFleet:
    """Gateway of a fleet, and its controller, with a stable version and a candidate."""

    def __init__(self, config: GatewayConfig, client: httpx2.AsyncClient) -> None:
        assert config.store is not None
        assert config.store.url is not None
        self.store = open_store(config.store.url)
        (self.record,) = self.store.gateways.list_running()
        self.controller = GatewayPoolsClient()
        self.client = client
        self._version = 0

    async def publish(
        self, urls: dict[str, str], route: PoolRoute, comparison: Comparison | None = None
    ) -> None:
        self._version += 1
        replicas = {
            digest: [ReplicaConfig(name=f"big-{digest}", url=url, kind="openai")]
            for digest, url in urls.items()
        }
        stable = replicas.pop(route.stable)
        await self.controller.publish(
            self.record,
            FleetPools(
                fleet=FLEET,
                epoch=1,
                version=self._version,
                models=[ModelConfig(name="big", replicas=stable)],
                versions=[
                    PublishedVersions(
                        model="big", route=route, replicas=replicas, comparison=comparison
                    )
                ],
            ),
        )

    async def complete(self, prompt: str, user: str = "ann", **fields: object) -> httpx2.Response:
        body: dict[str, Any] = {"model": "big", "prompt": prompt, "user": user, "max_tokens": 3}
        return await self.client.post(COMPLETION, json=body | {"stream": True} | fields)

    async def read(self, record: GatewayRecord | None = None) -> OutcomeReport:
        query = OutcomeQuery(model="big", wants_history=True)
        return await self.controller.read_outcomes(record or self.record, query)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[MeasuredFleet]:
    config = GatewayConfig(
        port=0,
        fleet=FLEET,
        store=StoreConfig(url=f"sqlite:///{tmp_path / 'argosy.db'}"),
        pools_file=str(tmp_path / "pools.json"),
        timeouts=QUICK_TIMEOUTS,
    )
    async with run_gateway_server(config) as (_, client):
        running = MeasuredFleet(config, client)
        yield running
        running.store.close()


async def test_controller_reads_how_requests_of_the_stable_version_ended(
    fleet: MeasuredFleet,
) -> None:
    async with fake_upstream(respond) as replica:
        await fleet.publish({"old": replica.url}, PoolRoute(pool="big", version=1, stable="old"))
        for prompt in ("answer", "refuse", "filter", "fail"):
            await fleet.complete(prompt)
        await fleet.complete("answer", stream=False)
        with pytest.raises(httpx2.TimeoutException):
            await fleet.client.post(
                COMPLETION,
                json={"model": "big", "prompt": "hang", "max_tokens": 3, "stream": True},
                timeout=0.2,
            )
        report = await fleet.read()
        while len(report.history) < 6:
            report = await fleet.read()
    answered, *others, cancelled = report.history
    assert [each.status for each in (*others, cancelled)] == [
        OutcomeStatus.REFUSED,
        OutcomeStatus.REFUSED,
        OutcomeStatus.FAILED,
        OutcomeStatus.COMPLETED,
        OutcomeStatus.CANCELLED,
    ]
    assert (answered.status, answered.key) == (OutcomeStatus.COMPLETED, ("", "ann"))
    assert (answered.output_tokens, answered.in_flight) == (3, 1)
    assert answered.ttft_s is not None
    assert 0.0 < answered.ttft_s <= answered.age_s
    assert cancelled.ttft_s is not None
    assert others[-1].ttft_s is None, "a response in one piece"
    guessed = msgspec.structs.replace(fleet.record, secret="guess")
    with pytest.raises(OtherFleetError):
        await fleet.read(guessed)


async def test_gateway_rolls_a_failing_version_back_without_a_controller(
    fleet: MeasuredFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.gateway.fleet_pools.MAX_CONTROLLER_SILENCE_S", -1.0)
    route = PoolRoute(
        pool="big",
        version=1,
        stable="old",
        rollout="r1",
        variants=(Variant(digest="new", share=0.5),),
    )
    content = msgspec.json.encode(route)
    fleet.store.fleets.replace_document(FLEET, "route/big", FleetDocument(1, content), after=0)
    async with fake_upstream(respond) as stable, fake_upstream(fail) as candidate:
        await fleet.publish(
            {"old": stable.url, "new": candidate.url},
            route,
            Comparison(rollout="r1", candidate="new", step=0, share=0.5, num_gate_starts=1),
        )
        users = iter(range(1000))
        while (await fleet.controller.read_status(fleet.record)).routes["big"] == 1:
            await asyncio.gather(*(fleet.complete("answer", f"u{next(users)}") for _ in range(4)))
        assert {(await fleet.complete("answer", f"u{n}")).status_code for n in range(20)} == {200}
    stored = fleet.store.fleets.read_documents(FLEET)["route/big"]
    rolled_back = msgspec.json.decode(stored.content, type=PoolRoute)
    assert (rolled_back.version, rolled_back.variants) == (2, ())
    metrics = (await fleet.client.get("/metrics")).text
    assert 'argosy_gateway_rollbacks_total{model="big"} 1.0' in metrics
