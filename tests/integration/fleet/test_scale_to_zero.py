"""A model that is scaled to zero: its first request starts it, and clients wait for it in the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace
from tests.support.controlled_fleet import Fleet, build_fleet, declare
from tests.support.gateway_client import BODIES, CHAT
from tests.support.waiting import until

from argosy.deployment import ColdStartConfig

ROOT = Path(__file__).parents[3]
MODEL = "chat"
BODY = BODIES[CHAT] | {"model": MODEL, "max_tokens": 4}
NUM_CLIENTS = 6
GATED_REPLICA = 'while [ ! -e "$0" ]; do sleep 0.05; done; exec argosy replica "$@"'
"""Replica that starts once a file exists."""
COLD_START = ColdStartConfig(non_streaming_hold_s=300.0)
LIMITS: dict[str, Any] = {"replicas": None, "min_replicas": 0, "max_replicas": 1}


async def count_queued(client: httpx2.AsyncClient) -> int:
    metrics = (await client.get("/metrics")).text
    line = next(line for line in metrics.splitlines() if "gateway_queue_depth{" in line)
    return int(float(line.rpartition(" ")[2]))


def run_gateway(
    fleet: Fleet, cold_start: ColdStartConfig
) -> contextlib.AbstractAsyncContextManager[httpx2.AsyncClient]:
    return fleet.run_gateway(None, cold_start=cold_start, early_stream_start_s=0.1)


async def test_a_request_starts_a_replica_that_the_next_controller_keeps_until_it_is_idle(
    fleet: Fleet,
) -> None:
    def apply(**changes: object) -> None:
        autoscaling = {"mode": "on", "tokens_per_s": 100.0} | changes
        fleet.apply(declare(warm_up=False, autoscaling=autoscaling, **LIMITS))

    def reasons() -> str:
        return "\n".join(event.reason for event in fleet.events("scaling_decision"))

    apply(mode="advisory")
    first = fleet.start_controller("first")
    hasty = {"x-argosy-deadline": "5"}
    async with run_gateway(fleet, COLD_START) as client:
        while (await client.post(CHAT, json=BODY, headers=hasty)).status_code != 503:
            pass  # the controller has published nothing yet
        await until(lambda: "Advisory only, the count stays at 0. Scale from 0 to 1" in reasons())
        assert fleet.status.replicas == []

        apply()
        await until(lambda: fleet.status.pools[0].desired == 0)
        refused = await client.post(CHAT, json=BODY, headers=hasty)
        while refused.json()["error"]["code"] != "model_starting":
            refused = await client.post(CHAT, json=BODY, headers=hasty)
        pids = await fleet.as_declared("chat-1-0")  # although no client waits

        fleet.start_controller("second")
        first.cancel()
        await until(lambda: fleet.status.leader == "second")
        assert await fleet.as_declared("chat-1-0") == pids
        apply(scale_to_zero_after_s=0.5)
        await fleet.as_declared()
        assert "Scale from 1 to 0: it has had no request" in reasons()
        assert (await client.get("/v1/models")).json()["data"]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("cold_start", "read_timeout_s", "event_timeout_s"),
    [
        (replace(COLD_START, comment_interval_s=1.0, event_interval_s=1.0), 4.0, 4.0),
        (COLD_START, 600.0, 120.0),
    ],
    ids=["short", "defaults"],
)
async def test_clients_of_all_kinds_wait_for_a_model_that_is_scaled_to_zero(
    fleet: Fleet, cold_start: ColdStartConfig, read_timeout_s: float, event_timeout_s: float
) -> None:
    gate = fleet.folder / "gate"
    command = ["sh", "-c", GATED_REPLICA, str(gate), "{model}", "--served-model-name", MODEL]
    pool: dict[str, object] = {"name": "chat", "model": MODEL, "engine": "scripted", **LIMITS}
    pool["autoscaling"] = {"mode": "on", "tokens_per_s": 100.0, "scale_to_zero_after_s": 1.0}
    arguments = [*command, "--host", "{host}", "--port", "{port}"]
    fleet.apply(build_fleet(arguments, pool, ready_path="/ready", kind="argosy"))
    first = fleet.start_controller("first")
    async with run_gateway(fleet, cold_start) as client:
        while not (await client.get("/v1/models")).json()["data"]:
            pass  # the controller has published nothing yet
        assert (await client.get("/ready")).status_code == 200
        assert fleet.status.replicas == []

        hasty = {"x-argosy-deadline": "5"}
        refused = await client.post(CHAT, json=BODY, headers=hasty)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "55")
        error = refused.json()["error"]
        assert (error["code"], error["state"], error["eta_s"]) == (
            "model_starting",
            "stopped",
            None,
        )
        await until(lambda: len(fleet.status.replicas) == 1)  # although the client has left

        clients = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.waiting_clients", str(client.base_url), MODEL),
            *(str(read_timeout_s), str(event_timeout_s)),
            cwd=ROOT,
            env=os.environ | {"LANGSMITH_TRACING": "false"},
            stdout=asyncio.subprocess.PIPE,
        )
        lines: list[str] = []
        waiting_since = float("inf")
        async with client.stream("POST", CHAT, json=BODY | {"stream": True}) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                if not gate.exists() and await count_queued(client) > NUM_CLIENTS:
                    waiting_since = min(waiting_since, time.monotonic())
                    if time.monotonic() - waiting_since > event_timeout_s + 1.0:
                        gate.touch()
        assert ": argosy starting" in lines
        assert lines[-2] == "data: [DONE]"
        assert not any(line.startswith("id:") for line in lines)
        output, _ = await clients.communicate()
        texts = json.loads(output)
        assert len(texts) == NUM_CLIENTS
        assert all(texts.values()), texts

        # The next controller continues with what the first one knew, until the pool is idle.
        fleet.start_controller("second")
        first.cancel()
        await until(lambda: fleet.status.leader == "second")
        await until(lambda: not fleet.status.replicas and fleet.status.is_as_declared)
        gate.unlink()
        refused = await client.post(CHAT, json=BODY, headers=hasty)
        error = refused.json()["error"]
        assert error["state"] == "stopped"
        assert 0 < min(error["eta_s"], 55) == int(refused.headers["retry-after"])
        decisions = [event.reason for event in fleet.events("scaling_decision")]
        assert any(reason.startswith("Scale from 1 to 0: it has had") for reason in decisions)
        starts = fleet.events("replica_start")
        assert [event.epoch for event in starts][:1] == [1]
