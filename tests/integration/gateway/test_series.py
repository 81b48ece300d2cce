"""Time series of gateways: they equal the metrics, are merged over gateways, and show each caller only its own."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import re
import time
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.backend_formats import Vllm
from tests.support.fake_backend import serve_backends
from tests.support.gateway_client import BODIES, COMPLETION, replica_config, run_gateway_server
from tests.support.gateway_processes import open_organisation

from argosy.deployment import GatewayConfig, ModelConfig, SeriesConfig
from argosy.gateway.series_queries import SeriesAnswer
from argosy.store import GatewayRecord, StoreConfig

BODY = BODIES[COMPLETION]
STREAM = BODY | {"stream": True}


async def get_status(client: httpx2.AsyncClient, key: str = "", **parameters: Any) -> int:  # noqa: ANN401 - of the query
    response = await client.get("/admin/series", params=parameters, headers=_bearer(key))
    return response.status_code


async def query(client: httpx2.AsyncClient, key: str = "", **parameters: Any) -> SeriesAnswer:  # noqa: ANN401 - of the query
    response = await client.get("/admin/series", params=parameters, headers=_bearer(key))
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=SeriesAnswer)


async def query_until(
    client: httpx2.AsyncClient,
    expected: dict[str, float],
    key: str = "",
    **parameters: Any,  # noqa: ANN401 - of the query
) -> SeriesAnswer:
    """Query until the sums over the range are as expected, because the current second must end first."""
    metrics = ",".join(expected)
    while True:
        answer = await query(client, key, metrics=metrics, **parameters)
        if {name: total(answer, name) for name in expected} == expected:
            return answer
        await asyncio.sleep(0.1)


def total(answer: SeriesAnswer, metric: str) -> float:
    return sum((value for value in answer.metrics[metric] if value is not None), 0.0)


def metric_sum(exposition: str, name: str, *labels: str) -> float:
    """Return the sum of a metric's samples with all these labels."""
    lines = re.findall(rf"^argosy_gateway_{name}{{(.*)}} (.*)$", exposition, re.MULTILINE)
    return sum(float(value) for found, value in lines if all(label in found for label in labels))


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def test_series_equal_metrics_and_outlive_the_process(tmp_path: Path) -> None:
    since: dict[str, Any] = {"from": int(time.time()) - 1}
    file = tmp_path / "series" / "gateway.sqlite"
    async with serve_backends(backend := Vllm()):
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name="big", replicas=[replica_config(backend, name="r1")])],
            series=SeriesConfig(file=str(file)),
        )
        async with run_gateway_server(config) as (_, client):
            await asyncio.gather(*(client.post(COMPLETION, json=STREAM) for _ in range(3)))
            await client.post(COMPLETION, json=BODY)
            await client.post(COMPLETION, json=BODY | {"prompt": []})
            exposition = (await client.get("/metrics")).text
            expected = {
                "requests": metric_sum(exposition, "requests_total"),
                "refused": metric_sum(exposition, "requests_total", 'status="refused"'),
                "input_tokens": metric_sum(exposition, "tokens_total", 'kind="input"'),
                "cached_tokens": metric_sum(exposition, "tokens_total", 'kind="cached"'),
                "output_tokens": metric_sum(exposition, "tokens_total", 'kind="output"'),
            }
            assert expected["requests"] >= 4
            for scope in ("fleet", "model:big"):
                await query_until(client, expected, scope=scope, **since)
            del expected["refused"]
            await query_until(client, expected, scope="replica:r1")
            gauges = "running,queued,replicas_ready,ttft_p95_s,itl_p50_s,e2e_p99_s,queue_p50_s"
            answer = await query(client, scope="model:big", metrics=gauges)
            assert answer.step_s == 1
            assert answer.metrics["replicas_ready"][-1] == 1
            assert 0 < max(v for v in answer.metrics["ttft_p95_s"] if v is not None) < 30
            assert answer.metrics["running"][0] is None  # before the start
            assert await get_status(client, metrics="no_such_metric") == 400
            assert await get_status(client, metrics="requests", scope="pool:big") == 400
        async with run_gateway_server(config) as (_, client):
            answer = await query(client, metrics="requests,ttft_p50_s", **since)
            while not total(answer, "requests"):  # until the file is open
                await asyncio.sleep(0.1)
                answer = await query(client, metrics="requests,ttft_p50_s", **since)
            assert total(answer, "ttft_p50_s") > 0


async def test_series_are_merged_over_gateways_and_scoped_by_organisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.gateway.series_queries.PEERS_REFRESH_S", 0.2)
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    async with contextlib.AsyncExitStack() as stack:
        accounts = stack.enter_context(open_organisation(url))
        store = accounts.store
        shop = accounts.project("shop")
        key, own_viewer = accounts.key(shop), accounts.key(shop, "viewer", role="viewer")
        viewer = accounts.key(shop, "all", role="viewer", scope="gateway")
        stranger = store.accounts.create_organisation("other", actor="test").id
        strange_project = store.accounts.create_project(stranger, "theirs", actor="test").id
        await stack.enter_async_context(serve_backends(backend := Vllm()))
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name="big", replicas=[replica_config(backend)])],
            store=StoreConfig(url=url),
        )
        (_, one), (_, two) = [
            await stack.enter_async_context(run_gateway_server(config)) for _ in range(2)
        ]
        for client, count in ((one, 2), (two, 3)):
            for _ in range(count):
                response = await client.post(COMPLETION, json=STREAM, headers=_bearer(key))
                assert response.status_code == 200, response.text
        for client in (one, two):
            merged = await query_until(client, {"requests": 5}, viewer, scope="model:big")
            assert merged.partial == []
        tenant = {"scope": f"tenant:{shop}", "step": 10}
        assert await get_status(one, own_viewer, metrics="requests", **tenant) == 200
        for scope, status in (
            ("fleet", 403),
            ("model:big", 403),
            (f"tenant:{strange_project}", 404),
            (f"tenant:{stranger}", 404),
        ):
            assert await get_status(one, own_viewer, metrics="requests", scope=scope) == status
            assert await get_status(one, viewer, metrics="requests", scope=scope) == 200
            assert await get_status(one, key, metrics="requests", scope=scope) == 403
        store.gateways.record_heartbeat(
            GatewayRecord(id="silent", url="http://127.0.0.1:9", secret="0", certificate="")
        )
        answer = merged
        while not answer.partial:  # until the list of gateways is refreshed
            await asyncio.sleep(0.1)
            answer = await query(one, viewer, metrics="requests")
        assert answer.partial == ["silent"]
        exported = await one.get(
            "/admin/series.csv", params={"metrics": "requests"}, headers=_bearer(viewer)
        )
        head, *rows = csv.reader(io.StringIO(exported.text))
        assert head == ["time", "scope", "requests"]
        assert sum(float(value) for _, _, value in rows if value) == 5
