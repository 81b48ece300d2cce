"""Measurements of versions by a gateway in front of replicas, as the controller reads them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.fake_upstream import (
    UpstreamRequest,
    fake_upstream,
    listening,
    respond_with_tokens,
)
from tests.support.gateway_client import (
    BODIES,
    CHAT,
    COMPLETION,
    QUICK_TIMEOUTS,
    run_gateway_server,
)
from tests.support.native_upstream import NativeScript, NativeUpstream
from tests.support.waiting import until

from argosy.deployment import BackendKind, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway import (
    FleetPools,
    GatewayPoolsClient,
    GatewayServer,
    OtherFleetError,
    OutcomeQuery,
    OutcomeReport,
    PublishedVersions,
)
from argosy.policy.rollout import EVENTS, Comparison, Metric, OutcomeStatus
from argosy.policy.traffic import PoolRoute, ShadowCopy, Variant
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
        case "slow":
            await asyncio.sleep(0.1)
            await respond_with_tokens(request)
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

    def __init__(
        self, config: GatewayConfig, server: GatewayServer, client: httpx2.AsyncClient
    ) -> None:
        assert config.store is not None
        assert config.store.url is not None
        self.store = open_store(config.store.url)
        (self.record,) = self.store.gateways.list_running()
        self.controller = GatewayPoolsClient()
        self.server = server
        self.client = client
        self._version = 0

    async def publish(
        self,
        urls: dict[str, str],
        route: PoolRoute,
        comparison: Comparison | None = None,
        kind: BackendKind = "openai",
    ) -> None:
        self._version += 1
        replicas = {
            digest: [ReplicaConfig(name=f"big-{digest}", url=url, kind=kind)]
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

        if kind == "argosy":
            for replica in self.server.replicas:
                replica.health.on_reported_state("ready", 0.0)  # fakes do not report it

    async def complete(self, prompt: str, user: str = "ann", **fields: object) -> httpx2.Response:
        body: dict[str, Any] = {"model": "big", "prompt": prompt, "user": user, "max_tokens": 3}
        return await self.client.post(COMPLETION, json=body | {"stream": True} | fields)

    async def chat(self) -> None:
        body = BODIES[CHAT] | {"stream": True, "temperature": 0}
        assert (await self.client.post(CHAT, json=body)).status_code == 200

    async def count(self, metric: str) -> float:
        """Return the value of a metric; 0 if it does not exist yet."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(metric)), 0.0)

    async def wait_for_count(self, metric: str, value: float) -> None:
        count = await self.count(metric)
        while count < value:
            count = await self.count(metric)

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
    async with run_gateway_server(config) as (server, client):
        running = MeasuredFleet(config, server, client)
        yield running
        running.store.close()


async def test_controller_reads_how_requests_of_the_stable_version_ended(
    fleet: MeasuredFleet,
) -> None:
    async with fake_upstream(respond) as replica:
        await fleet.publish({"old": replica.url}, PoolRoute(pool="big", version=1, stable="old"))
        for prompt in ("answer", "slow", "refuse", "filter", "fail"):
            await fleet.complete(prompt)
        await fleet.complete("answer", stream=False)
        with pytest.raises(httpx2.TimeoutException):
            await fleet.client.post(
                COMPLETION,
                json={"model": "big", "prompt": "hang", "max_tokens": 3, "stream": True},
                timeout=0.2,
            )
        report = await fleet.read()
        while len(report.history) < 7:
            report = await fleet.read()
    answered, slow, *others, cancelled = report.history
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
    assert slow.ttft_s is not None
    assert slow.ttft_s >= 0.09
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
        users = itertools.count()
        while (await fleet.controller.read_status(fleet.record)).routes["big"] == 1:
            await asyncio.gather(*(fleet.complete("answer", f"u{next(users)}") for _ in range(4)))
        assert {(await fleet.complete("answer", f"u{n}")).status_code for n in range(20)} == {200}
    # The gateway follows its route at once, and stores it as soon as it can.
    await until(lambda: fleet.store.fleets.read_documents(FLEET)["route/big"].version > 1)
    stored = fleet.store.fleets.read_documents(FLEET)["route/big"]
    rolled_back = msgspec.json.decode(stored.content, type=PoolRoute)
    assert (rolled_back.version, rolled_back.variants) == (2, ())
    assert await fleet.count('argosy_gateway_rollbacks_total{model="big"}') == 1


SHADOW_COMPARISON = Comparison(rollout="r1", candidate="new", step=0, share=0.1, num_gate_starts=1)


def shadow_route(max_requests_per_s: float) -> PoolRoute:
    shadow = ShadowCopy(
        pool="big", digest="new", fraction=1.0, max_requests_per_s=max_requests_per_s
    )
    return PoolRoute(pool="big", version=1, stable="old", rollout="r1", shadow=shadow)


async def test_copies_are_compared_and_never_awaited_or_billed(fleet: MeasuredFleet) -> None:
    short, long = (NativeScript(deltas=[{"content": "x"}] * number) for number in (2, 3))
    stable, candidate = NativeUpstream(native_script=short), NativeUpstream(native_script=short)
    has_hung = asyncio.Event()

    async def hang(request: UpstreamRequest) -> None:
        request.start_stream()
        has_hung.set()
        await asyncio.sleep(60)

    route = shadow_route(max_requests_per_s=4.0)
    comparison = SHADOW_COMPARISON
    async with listening(stable), listening(candidate):
        urls = {"old": stable.url, "new": candidate.url}
        await fleet.publish(urls, route, comparison, "argosy")
        copies, answers = 'argosy_shadow_requests_total{model="big"', "argosy_shadow_answers_total"
        for number in range(2):
            await fleet.chat()
            await fleet.wait_for_count(f'{answers}{{equal="true"', number + 1)
        candidate.native_script = long
        await fleet.chat()
        await fleet.wait_for_count(f'{answers}{{equal="false"', 1)
        candidate.script = hang
        await fleet.chat()
        await has_hung.wait()
        num_requests = 4
        while not await fleet.count(f'{copies},outcome="capped"'):
            await fleet.chat()
            num_requests += 1
        num_hung = num_requests - 4
        ended = msgspec.structs.replace(route, version=2, shadow=None)
        await fleet.publish(urls, ended, None, "argosy")
        await fleet.wait_for_count(f'{copies},outcome="cancelled"', num_hung)
        await fleet.chat()
        assert await fleet.count(f'{copies},outcome="completed"') == 3
    report = await fleet.read()
    (batch,) = report.batches
    assert (batch.stable_requests, batch.candidate_requests) == (3 + num_hung, 3), (
        "copies that hung were cancelled"
    )
    assert (report.compared_answers, report.equal_answers) == (3, 2)
    num_requests += 1
    assert len(report.history) == num_requests
    assert await fleet.count('argosy_gateway_requests_total{model="big"') == num_requests

    def list_usage() -> list[int]:
        pages = fleet.store.ledger.iter_records()
        return [record.output_tokens for page in pages for record in page]

    await until(lambda: len(list_usage()) >= num_requests)
    assert list_usage() == [short.num_tokens] * num_requests


async def test_copy_that_fails_is_an_error_of_its_version_only(fleet: MeasuredFleet) -> None:
    route = shadow_route(max_requests_per_s=100.0)
    async with fake_upstream() as stable, fake_upstream(fail) as candidate:
        urls = {"old": stable.url, "new": candidate.url}
        await fleet.publish(urls, route, SHADOW_COMPARISON)
        await until(lambda: all(each.health.is_schedulable for each in fleet.server.replicas))
        for number in range(6):
            assert (await fleet.complete("answer")).status_code == 200
            await fleet.wait_for_count(
                'argosy_shadow_requests_total{model="big",outcome="failed"', number + 1
            )
        assert len(stable.requests) == 6
        await fleet.publish(urls, route, None)
    (batch,) = (await fleet.read()).batches
    assert (batch.stable_requests, batch.candidate_requests) == (6, 6)
    (errors,) = [cell for cell in batch.cells if EVENTS[cell.event].metric is Metric.ERRORS]
    assert (errors.stable_events, errors.candidate_events) == (0, 6)
