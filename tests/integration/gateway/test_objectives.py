"""Service level objectives of a gateway: what counts, and what the store knows after the gateway has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import httpx2
from tests.support.fake_upstream import (
    FakeUpstream,
    UpstreamRequest,
    fake_upstream,
    respond_429,
    respond_500,
    respond_with_text,
    respond_with_tokens,
)
from tests.support.gateway_client import QUICK_TIMEOUTS, run_gateway_server
from tests.support.gateway_processes import open_organisation
from tests.support.migrated_store import open_migrated_store

from argosy.alerting import ObjectiveAlerts
from argosy.deployment import (
    GatewayConfig,
    LatencyTarget,
    ModelConfig,
    ObjectiveReader,
    ObjectivesConfig,
    QueueConfig,
    ReplicaConfig,
    SloConfig,
)
from argosy.policy.objectives import HOUR_S, SLOT_S, HourCounts, Objective
from argosy.store import ObjectiveHour, Store, StoreConfig

START = 1_764_230_000 // HOUR_S * HOUR_S

SLOS = (
    SloConfig(name="answers", model="big", availability="99.9%"),
    SloConfig(name="tokens", itl=LatencyTarget(below_s=1e-9, share="95%")),
    SloConfig(name="others", model="small", availability="99%"),
)


async def answer(request: UpstreamRequest) -> None:
    scripts = {"full": respond_429, "broken": respond_500, "stream": respond_with_tokens}
    await scripts.get(request.body["prompt"], respond_with_text)(request)


def build_config(upstream: FakeUpstream, url: str, *slos: SloConfig) -> GatewayConfig:
    model = ModelConfig(name="big", replicas=[ReplicaConfig(url=upstream.url, model="rough")])
    return GatewayConfig(
        port=0,
        models=[model],
        timeouts=QUICK_TIMEOUTS,
        queue=QueueConfig(timeout_s=0.3),
        store=StoreConfig(url=url),
        objectives=ObjectivesConfig(slos=slos),
        max_failed_attempts=1,
    )


@contextlib.asynccontextmanager
async def run_gateway_with_objectives(
    upstream: FakeUpstream, url: str, key: str
) -> AsyncIterator[httpx2.AsyncClient]:
    async with run_gateway_server(build_config(upstream, url, *SLOS)) as (_, client):
        client.headers["authorization"] = f"Bearer {key}"
        yield client


async def complete(client: httpx2.AsyncClient, prompt: str, **headers: str) -> httpx2.Response:
    body = {"model": "big", "prompt": prompt, "max_tokens": 4, "stream": prompt == "stream"}
    return await client.post("/v1/completions", json=body, headers=headers)


async def test_counts_by_error_code_and_keeps_the_budget(tmp_path: Path) -> None:
    """An overloaded model burns the budget, a tenant at its own limit does not, and another gateway knows both."""
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    with open_organisation(url) as accounts:
        project, limited = accounts.project("all"), accounts.project("limited")
        accounts.limit(limited, "requests", 1, "day")
        key, limited_key = (
            accounts.key(project, role="admin", scope="gateway"),
            accounts.key(limited),
        )
        async with fake_upstream(answer) as upstream:
            async with run_gateway_with_objectives(upstream, url, key) as client:
                codes = [
                    (await complete(client, prompt)).json()["error"]["code"]
                    for prompt in ("full", "broken")
                ]
                assert codes == ["overloaded", "upstream_failed"]
                assert (await complete(client, "good")).is_success
                assert (await complete(client, "stream")).is_success
                headers = {"authorization": f"Bearer {limited_key}"}
                assert (await complete(client, "good", **headers)).is_success
                own_limit = await complete(client, "good", **headers)
                assert own_limit.json()["error"]["code"] == "rate_limit_exceeded"
                metrics = (await client.get("/metrics")).text
            async with run_gateway_with_objectives(upstream, url, key) as client:
                listed = (await client.get("/admin/objectives")).json()["data"]
                details = (await client.get("/admin/objectives/answers")).json()
                unknown = await client.get("/admin/objectives/none")
        by_name = {each["name"]: each for each in listed}
        assert {name: (each["requests"], each["misses"]) for name, each in by_name.items()} == {
            "answers": (5, 2),
            "tokens": (3, 3),
            "others": (0, 0),
        }
        assert unknown.status_code == 404
        assert details["causes"] == {"overloaded": 1, "upstream_failed": 1}
        assert details["tenants"] == {project: 2}
        assert len(details["recent"]) == 2
        assert 'argosy_objective_requests_total{objective="answers"} 5' in metrics
        assert 'argosy_objective_misses_total{code="overloaded",objective="answers"} 1' in metrics
        assert 'argosy_objective_misses_total{code="no_replica",objective="others"} 0' in metrics


class CountingGateway:
    """Writes counts as a gateway does, without waiting for time to pass."""

    def __init__(self, store: Store, objective: Objective) -> None:
        self._hours = store.objective_hours
        self._id = objective.id

    def write(self, name: str, start: int, end: int, misses: int, *, stops: bool = True) -> None:
        """Write 20 requests with `misses` misses for each slot, by a process that stops then or goes on."""
        rows = []
        for hour in range(start - start % HOUR_S, end, HOUR_S):
            slots = [
                (slot - hour) // SLOT_S
                for slot in range(max(start, hour), min(end, hour + HOUR_S), SLOT_S)
            ]
            process = f"{name}-{start}"  # each process has an id of its own
            counts = HourCounts(slots, [20] * len(slots), [misses] * len(slots))
            is_last = [int(stops and hour + slot * SLOT_S + SLOT_S == end) for slot in slots]
            reports = HourCounts(slots, [1] * len(slots), is_last)
            rows += [
                ObjectiveHour(hour=hour, objective=self._id, gateway=process, counts=counts),
                ObjectiveHour(hour=hour, objective="", gateway=process, counts=reports),
            ]
        self._hours.write("", rows)


async def read_states(alerts: ObjectiveAlerts, now: float) -> dict[str, bool | None]:
    return {each.name: each.is_firing for each in await alerts.read(now)}


async def test_alerts_fire_and_keep_their_state_without_reports(tmp_path: Path) -> None:
    """An outage of a minute pages. Then a gateway is silent, the clock steps, and the controller restarts."""
    quiet = {"BudgetBurnsFast": False, "BudgetBurnsSlowly": False, "ObjectiveOutage": False}
    unknown: dict[str, bool | None] = dict.fromkeys(quiet)
    (objective,) = SLOS[0].build_objectives()
    with closing(open_migrated_store(f"sqlite:///{tmp_path}/store.db")) as store:

        def start_controller() -> ObjectiveAlerts:
            reader = ObjectiveReader(store.objective_hours, "")
            return ObjectiveAlerts(reader, lambda: [objective])

        gateway, alerts = CountingGateway(store, objective), start_controller()
        now = START + 7 * HOUR_S
        gateway.write("a", START, now, 0, stops=False)
        calm = await read_states(alerts, now + 5)
        assert calm == quiet | {"ObjectivesUnknown": False}
        gateway.write("a", START, now, 0)
        gateway.write("a", now, now + 60, 20)
        gateway.write("b", now, now + 60, 20, stops=False)
        firing = await read_states(alerts, now + 65)
        assert firing == calm | {"BudgetBurnsFast": True, "BudgetBurnsSlowly": True}
        assert await read_states(start_controller(), now + 65) == firing
        gateway.write("a", now + 60, now + 120, 20, stops=False)
        silent = await read_states(alerts, now + 125)
        assert silent == unknown | {"ObjectivesUnknown": False}
        later = await read_states(alerts, now + 3665)
        assert later == unknown | {"ObjectivesUnknown": False}
        for elapsed_s in range(10, 400, 10):
            last = await read_states(alerts, now + 3665 + elapsed_s)
        assert last == unknown | {"ObjectivesUnknown": True}


async def test_reload_counts_for_other_objectives(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    async with fake_upstream(answer) as upstream:
        after = build_config(upstream, url, *SLOS[2:])
        before = build_config(upstream, url, SLOS[0])
        async with run_gateway_server(before, load_config=lambda: after) as (server, client):

            async def names() -> list[str]:
                listed = (await client.get("/admin/objectives")).json()["data"]
                return [each["name"] for each in listed]

            assert await names() == ["answers"]
            server.reload()
            while await names() != ["others"]:  # noqa: ASYNC110 - a reload has no event
                await asyncio.sleep(0.02)
