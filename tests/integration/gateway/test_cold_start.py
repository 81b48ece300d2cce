"""Requests for a model that is scaled to zero: what clients receive until the controller publishes a replica."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.gateway_client import BODIES, CHAT, COMPLETION, run_gateway_server
from tests.support.waiting import until

from argosy.deployment import ColdStartConfig, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway import FleetPools, GatewayPoolsClient, ModelStartup
from argosy.policy import ReplicaStatus
from argosy.store import GatewayRecord, StoreConfig, open_store

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
PROMPT = {"messages": [{"role": "user", "content": "Hi"}]}
STREAMS = {
    CHAT: BODIES[CHAT],
    COMPLETION: BODIES[COMPLETION],
    MESSAGES: {"model": "big", "max_tokens": 5, **PROMPT},
    RESPONSES: {"model": "big", "input": "Hi", "store": False},
    "/api/chat": {"model": "big", **PROMPT},
}
HEARTBEATS = {
    CHAT: '"object":"chat.completion.chunk"',
    COMPLETION: '"object":"text_completion"',
    MESSAGES: "event: ping",
    RESPONSES: "event: response.in_progress",
    "/api/chat": '"done":false',
}


def pools(
    version: int, *replicas: ReplicaConfig, fallback: str = "", **startup: object
) -> FleetPools:
    model = ModelConfig(name="big", replicas=list(replicas))
    models = [model]
    if fallback:
        other = ModelConfig(name="other", replicas=[ReplicaConfig(url=fallback, kind="openai")])
        models = [msgspec.structs.replace(model, fallback_models=("other",)), other]
    startups = {"big": msgspec.convert(startup, ModelStartup)} if startup else {}
    return FleetPools(fleet="demo", epoch=1, version=version, models=models, startups=startups)


def find_gateway(config: GatewayConfig) -> GatewayRecord:
    assert config.store is not None
    store = open_store(config.store.url or "")
    (record,) = store.gateways.list_running()
    store.close()
    return record


async def answer(request: UpstreamRequest) -> None:
    delta = {"delta": {"content": "ok"}} if request.is_chat else {"text": "ok"}
    chunk = {"model": "big", "choices": [{"index": 0, **delta, "finish_reason": "stop"}]}
    request.start_stream()
    request.send_chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    request.end_stream(tokens=1)


async def test_clients_learn_how_far_the_start_is(tmp_path: Path) -> None:
    config = GatewayConfig(
        port=0,
        fleet="demo",
        store=StoreConfig(url=f"sqlite:///{tmp_path / 'argosy.db'}"),
        pools_file=str(tmp_path / "pools.json"),
        early_stream_start_s=0.05,
        cold_start=ColdStartConfig(
            non_streaming_hold_s=0.05, comment_interval_s=0.1, event_interval_s=0.1
        ),
    )
    controller = GatewayPoolsClient()
    async with fake_upstream(answer) as replica, run_gateway_server(config) as (_, client):
        gateway = find_gateway(config)
        await controller.publish(gateway, pools(1, state="stopped", expected_s=400.0))
        refused = await client.post(CHAT, json=BODIES[CHAT])
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "55")
        assert refused.headers["x-should-retry"] == "false", "retries would end before the start"

        starting: dict[str, Any] = {
            "state": "starting",
            "expected_s": 100.0,
            "started_at": time.time() - 41.0,
        }
        await controller.publish(gateway, pools(2, **starting))
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["big"]
        assert (await client.get("/ready")).status_code == 200
        for path in (CHAT, MESSAGES):
            refused = await client.post(path, json=STREAMS[path])
            error = refused.json()["error"]
            assert refused.status_code == 503
            assert error["state"] == "starting"
            assert 0.41 <= error["progress"] < 0.9
            assert 10 < error["eta_s"] <= 59
            assert "x-should-retry" not in refused.headers
        demand = (await controller.read_status(gateway)).demand
        assert demand is not None
        assert demand.models[0].queued_requests == 0

        received = dict.fromkeys(STREAMS, "")

        async def read(path: str) -> None:
            body = STREAMS[path] | {"stream": True}
            async with client.stream("POST", path, json=body) as response:
                assert response.status_code == 200
                async for text in response.aiter_text():
                    received[path] += text

        readers = [asyncio.create_task(read(path)) for path in STREAMS]
        await until(lambda: all(received[path].count(HEARTBEATS[path]) > 1 for path in STREAMS))
        demand = (await controller.read_status(gateway)).demand
        assert demand is not None
        assert demand.models[0].queued_requests == demand.models[0].active_requests == len(STREAMS)
        await controller.publish(
            gateway, pools(3, ReplicaConfig(name="r", url=replica.url, kind="openai"))
        )
        await asyncio.gather(*readers)
    for path, text in received.items():
        assert "ok" in text, path
        assert not any(line.startswith("id:") for line in text.splitlines())
        if path != "/api/chat":
            assert re.search(r"^: argosy starting \d\d % eta \d\ds$", text, re.MULTILINE)
    assert received[RESPONSES].count("event: response.created") == 1
    assert received[RESPONSES].index("response.created") < received[RESPONSES].index("in_progress")


async def test_fallback_starts_the_model_and_a_failing_start_ends_streams_with_an_error(
    tmp_path: Path,
) -> None:
    config = GatewayConfig(
        port=0,
        fleet="demo",
        store=StoreConfig(url=f"sqlite:///{tmp_path / 'argosy.db'}"),
        pools_file=str(tmp_path / "pools.json"),
        early_stream_start_s=0.05,
    )
    controller = GatewayPoolsClient()
    async with fake_upstream(answer) as replica, run_gateway_server(config) as (_, client):
        gateway = find_gateway(config)
        await controller.publish(gateway, pools(1, fallback=replica.url, state="stopped"))
        status = await controller.read_status(gateway)
        while [each.status for each in status.replicas] != [ReplicaStatus.READY]:
            status = await controller.read_status(gateway)
        answered = await client.post(CHAT, json=STREAMS[CHAT] | {"stream": True})
        assert answered.headers["x-argosy-model"] == "other"
        demand = (await controller.read_status(gateway)).demand
        while demand is None or not any(demand.models[0].arrived):  # a second has to end
            demand = (await controller.read_status(gateway)).demand
        await controller.publish(gateway, pools(2, state="starting"))
        async with client.stream("POST", CHAT, json=STREAMS[CHAT] | {"stream": True}) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith(":")
            await controller.publish(gateway, pools(3, state="failing"))
            rest = [line async for line in lines]
    (data,) = (line.removeprefix("data: ") for line in rest if line.startswith("data: "))
    error = json.loads(data)["error"]
    assert error["code"] == "no_replica"
    assert "do not start" in error["message"]
