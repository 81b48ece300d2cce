"""Pools that the controller of a fleet publishes: authenticated, in order, and kept for times without a controller."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.fake_engine import FakeEngine, constant_script, reply_script
from tests.support.fake_upstream import fake_upstream
from tests.support.gateway_client import BODIES, COMPLETION, run_gateway_server
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import until

from argosy.deployment import (
    GatewayConfig,
    ModelConfig,
    ReplicaConfig,
    RouteConfig,
    SleepConfig,
    load_config,
)
from argosy.engine.serving.text import Tokenizer
from argosy.fleet.control.gateway_publisher import GatewayPublisher
from argosy.gateway import FleetPools, GatewayPoolsClient, OtherFleetError
from argosy.policy import ReplicaStatus
from argosy.protocol import ApiError
from argosy.store import FleetEvent, GatewayRecord, ReplicaLogRun, StoreConfig, open_store

FLEET = "demo"
DESIRED = 'argosy_desired_replicas{pool="big-pool"} 3'
BODY = BODIES[COMPLETION] | {"max_tokens": 3}


@pytest.fixture
def config(tmp_path: Path) -> GatewayConfig:
    return GatewayConfig(
        port=0,
        fleet=FLEET,
        store=StoreConfig(url=f"sqlite:///{tmp_path / 'argosy.db'}"),
        pools_file=str(tmp_path / "state" / "pools.json"),
    )


def find_gateway(config: GatewayConfig) -> GatewayRecord:
    assert config.store is not None
    assert config.store.url is not None
    store = open_store(config.store.url)
    (record,) = store.gateways.list_running()
    store.close()
    return record


async def first_tick(client: httpx2.AsyncClient) -> dict[str, Any]:
    """Return the readings that the header of the console shows."""
    async with client.stream(
        "GET", "/console/events", headers={"sec-fetch-site": "same-origin"}
    ) as stream:
        lines = stream.aiter_lines()
        while await anext(lines) != "event: tick":
            pass
        tick: dict[str, Any] = msgspec.json.decode((await anext(lines)).removeprefix("data: "))
        return tick


def pools(url: str, version: int, epoch: int = 1, **fields: object) -> FleetPools:
    model = ModelConfig(
        name="big",
        aliases=("large",),
        replicas=[ReplicaConfig(name=f"big-1-{version}", url=url, kind="openai")],
    )
    return msgspec.structs.replace(
        FleetPools(
            fleet=FLEET,
            epoch=epoch,
            version=version,
            models=[model],
            routes=[RouteConfig(model="big", headers={"x-none": "*"}, target_model="large")],
        ),
        **fields,
    )


class LaterModel(ModelConfig, frozen=True, kw_only=True):
    """A model with a setting of a later version."""

    colour: str = "blue"


class LaterRoute(RouteConfig, frozen=True, kw_only=True):
    """A route with a condition of a later version."""

    weekday: int = 1


def damage(config: GatewayConfig) -> None:
    Path(config.pools_file or "").write_bytes(b"{broken")


def add_later_setting(config: GatewayConfig) -> None:
    path = Path(config.pools_file or "")
    saved = msgspec.json.decode(path.read_bytes())
    saved["models"][0]["colour"] = "blue"
    path.write_bytes(msgspec.json.encode(saved))


async def status_of(client: httpx2.AsyncClient, **fields: object) -> int:
    return (await client.post(COMPLETION, json=BODY | fields)).status_code


async def test_gateway_serves_what_the_controller_publishes_and_remembers_it(
    config: GatewayConfig,
) -> None:
    controller = GatewayPoolsClient()
    async with fake_upstream() as replica:
        async with run_gateway_server(config) as (_, client):
            assert await status_of(client) == 404
            assert (await client.get("/ready")).status_code == 503
            gateway = find_gateway(config)
            published = await controller.publish(
                gateway,
                pools(
                    *(replica.url, 2),
                    desired_replicas={"big-pool": 3},
                    serving_replicas={"big": 3},
                    pool_models={"big-pool": "big"},
                ),
            )
            assert (published.epoch, published.version) == (1, 2)
            assert DESIRED in (await client.get("/metrics")).text
            assert await status_of(client) == 200
            assert (await first_tick(client))["missing_replicas"] == 2

            (routed,) = (await controller.read_status(gateway)).replicas
            while routed.status != ReplicaStatus.READY:
                (routed,) = (await controller.read_status(gateway)).replicas
            assert (routed.model, routed.replica) == ("big", "big-1-2")
            demand = (await controller.read_status(gateway)).demand
            while demand is None or not sum(demand.models[0].served):  # a second has to end
                demand = (await controller.read_status(gateway)).demand
            query = "/admin/series?scope=model:big&metrics=replicas_desired"
            series = (await client.get(query)).json()
            while 3.0 not in series["metrics"]["replicas_desired"]:  # a second has to end
                series = (await client.get(query)).json()
            (model,) = demand.models
            prompt_tokens = sum(model.arrived) - 2 * BODY["max_tokens"]
            assert prompt_tokens <= sum(model.served) <= sum(model.arrived)
            assert (model.model, model.queued_requests, model.queued_tokens) == ("big", 0, 0)
            for outdated in (pools(replica.url, 1), pools(replica.url, 9, epoch=0)):
                with pytest.raises(ApiError) as refusal:
                    await controller.publish(gateway, outdated)
                assert refusal.value.status == 409
            await controller.publish(gateway, pools("http://127.0.0.1:9", 2))  # the same version
            assert await status_of(client) == 200
            later = pools(replica.url, 3)
            later_model = LaterModel(**msgspec.structs.asdict(later.models[0]))
            other_model = ModelConfig(name="empty")
            routes = [LaterRoute(model="big", target_model="empty"), *later.routes]
            await controller.publish(
                gateway,
                msgspec.structs.replace(later, models=[later_model, other_model], routes=routes),
            )
            assert await status_of(client) == 200, "the route with an unknown condition is left out"
        async with run_gateway_server(config) as (_, client):
            assert await status_of(client) == 200, "without a controller"
            assert DESIRED not in (await client.get("/metrics")).text, "the number is old"
            await controller.publish(find_gateway(config), pools(replica.url, 1, epoch=2))
        add_later_setting(config)
        async with run_gateway_server(config) as (_, client):
            assert await status_of(client) == 200, "after a later version of the gateway"
        damage(config)
        async with run_gateway_server(config) as (_, client):
            assert await status_of(client) == 404


async def test_only_the_controller_of_the_fleet_publishes(config: GatewayConfig) -> None:
    async with run_gateway_server(config) as (_, client):
        gateway = find_gateway(config)
        assert (await client.put("/peer/pools", json={})).status_code == 404
        guessed = msgspec.structs.replace(gateway, secret="guess")
        for record, version, error in (
            (guessed, pools("http://127.0.0.1:9", 1), OtherFleetError),
            (gateway, pools("http://127.0.0.1:9", 1, fleet="other"), OtherFleetError),
            (gateway, pools("nonsense", 1), ApiError),
        ):
            with pytest.raises(error):
                await GatewayPoolsClient().publish(record, version)
        assert (await client.get("/v1/models")).json()["data"] == []


async def test_fleets_on_one_store_do_not_wait_for_each_other(
    config: GatewayConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.fleet.control.gateway_publisher.POLL_INTERVAL_S", 0.01)
    with contextlib.closing(open_store(config.store.url)) as store:  # type: ignore[union-attr, arg-type]
        num_rounds = 0
        list_running = store.gateways.list_running

        def count_rounds() -> list[GatewayRecord]:
            nonlocal num_rounds
            num_rounds += 1
            return list_running()

        monkeypatch.setattr(store.gateways, "list_running", count_rounds)
        publishers = [GatewayPublisher(store.gateways, asyncio.Event()) for _ in range(2)]
        async with run_gateway_server(config):
            for publisher, fleet in zip(publishers, (FLEET, "other"), strict=True):
                publisher.publish(pools("http://127.0.0.1:9", 1, fleet=fleet))
            tasks = [asyncio.create_task(publisher.run()) for publisher in publishers]
            await until(lambda: publishers[0].statuses and num_rounds > 4)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    ours, other = publishers
    assert not ours.is_routed("big-1-1"), "its gateway cannot reach it"
    assert other.is_routed("big-1-1"), "no gateway of this fleet exists"


async def test_replica_that_sleeps_is_routed_and_wakes_up(
    config: GatewayConfig, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.fleet.control.gateway_publisher.POLL_INTERVAL_S", 0.01)
    engine = FakeEngine(tokenizer, constant_script(reply_script(tokenizer, "Hello.")))
    with contextlib.closing(open_store(config.store.url)) as store:  # type: ignore[union-attr, arg-type]
        publisher = GatewayPublisher(store.gateways, asyncio.Event())
        async with serve(engine) as running, run_gateway_server(config) as (_, client):
            replica = ReplicaConfig(name="big-1-1", url=running.url, model=MODEL, kind="argosy")
            sleeps = ModelConfig(name="big", replicas=[replica], sleep=SleepConfig(after_s=0.0))
            publisher.publish(pools("", 1, models=[sleeps], routes=[]))
            task = asyncio.create_task(publisher.run())

            def is_asleep() -> bool:
                view = publisher.worst_view("big-1-1")
                return view is not None and view.status is ReplicaStatus.SLEEPING

            await until(is_asleep)
            assert publisher.is_routed("big-1-1")
            assert await status_of(client, model="big") == 200
            await until(is_asleep)
            task.cancel()


async def test_gateway_lists_and_awaits_events_of_its_fleet(config: GatewayConfig) -> None:
    assert config.store is not None
    assert config.store.url is not None
    store = open_store(config.store.url)
    async with run_gateway_server(config) as (_, client):
        lease = store.fleets.acquire_lease("a", store.fleets.read_lease(FLEET))
        assert lease is not None
        store.fleets.append_events(lease, [FleetEvent(kind="replica_start", replica="big-1-0")])
        listed = (await client.get("/admin/events")).json()
        assert [event["replica"] for event in listed["data"]] == ["big-1-0"]
        waiting = asyncio.create_task(
            client.get("/admin/events", params={"after": listed["last"], "wait_s": 60})
        )
        store.fleets.append_events(lease, [FleetEvent(kind="replica_stop")])
        assert [event["number"] for event in (await waiting).json()["data"]] == [2]
    store.close()
    async with run_gateway_server(msgspec.structs.replace(config, fleet=None)) as (_, client):
        assert (await client.get("/admin/events")).status_code == 404
        unknown = await client.get("/admin/replicas/log", params={"replica": "big-1-0"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


async def test_gateway_shows_logs_of_replicas_that_are_gone(config: GatewayConfig) -> None:
    assert config.store is not None
    assert config.store.url is not None
    store = open_store(config.store.url)
    run = ReplicaLogRun(
        started_at=1.5, attempt=1, exited_at=2.5, exit_status=1, reason="it failed", read_at=3.0
    )
    log = b"10 %\r20 %\rloaded\r\n\x1b[31m<b>red</b>\x1b[0m \x1b]0;title\x07\xff\n" + b"x" * 3000
    async with run_gateway_server(config) as (_, client):
        lease = store.fleets.acquire_lease("a", store.fleets.read_lease(FLEET))
        assert lease is not None
        store.replica_logs.save(lease, "big-1-0", run, b"older")
        latest = msgspec.structs.replace(run, started_at=9.25, attempt=2)
        store.replica_logs.save(lease, "big-1-0", latest, log)
        first = {"replica": "big-1-0"}
        shown = (await client.get("/admin/replicas/log", params=first)).json()
        assert (shown["run"]["reason"], shown["run"]["exit_status"]) == ("it failed", 1)
        assert shown["lines"][:2] == ["loaded", "<b>red</b> \x1b]0;title\x07\ufffd"]
        assert shown["lines"][2] == "x" * 2000 + " [1000 more characters]"
        assert [each["started_at"] for each in shown["runs"]] == [9.25, 1.5]
        wanted = first | {"level": "error", "format": "text"}
        selected = (await client.get("/admin/replicas/log", params=wanted)).json()
        assert selected["lines"][1] == "<b>red</b> \\x1b]0;title\\x07\ufffd"
        older = await client.get("/admin/replicas/log", params=first | {"started_at": 1.5})
        assert older.json()["lines"] == ["older"]
        missing = await client.get("/admin/replicas/log", params=first | {"started_at": 3})
        assert missing.status_code == 404
        (read,) = store.audit_log.list_entries(action_prefix="content.read")
        assert (read.subject, read.actor) == ("replica_log:big-1-0", "local")
        (gateway,) = store.gateways.list_running()
        status = await GatewayPoolsClient().read_status(gateway)
        assert status.watched_logs == ["big-1-0"]
    store.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "no model"), ("fleet: demo", "Add `store`"), ("fleet: Ab\nstore: {}", "fleet")],
)
def test_incomplete_settings_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(path)
