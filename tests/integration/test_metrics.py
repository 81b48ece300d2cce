"""Replica `/metrics` after real requests: counts, labels, promtool, vLLM's metric names."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.fake_engine import FakeEngine, Script, constant_script
from tests.support.replica_servers import CONFIG, MODEL, RunningReplica, chat, completion, serve
from tests.support.services import find_program
from tests.support.waiting import until

from argosy.telemetry import ReplicaMetrics


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def value(text: str, name: str, **labels: str) -> float:
    """Return the sum of the samples with these labels."""
    found = [v for n, have, v in samples(text) if n == name and labels.items() <= have.items()]
    assert found, f"{name} {labels} is missing"
    return sum(found)


async def send_requests(replica_server: RunningReplica) -> None:
    for body in (chat(), chat(stream=True), chat(n=2, max_tokens=3)):
        response = await replica_server.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
    rejected = await replica_server.client.post("/v1/completions", json=completion(temperature=-1))
    assert rejected.status_code == 400


async def test_requests_are_counted(replica_server: RunningReplica) -> None:
    await send_requests(replica_server)
    text = (await replica_server.client.get("/metrics")).text
    assert value(text, "argosy_sequences_finished_total", finish_reason="stop", model=MODEL) == 2
    assert value(text, "argosy_sequences_finished_total", finish_reason="length") == 2
    assert value(text, "argosy_requests_rejected_total", status="400") == 1
    assert value(text, "argosy_time_to_first_token_seconds_count") == 4
    assert value(text, "argosy_request_queue_seconds_count") == 4
    assert value(text, "argosy_request_duration_seconds_count") == 4
    assert value(text, "argosy_request_generation_tokens_sum") > 6
    assert value(text, "argosy_inter_token_latency_seconds_count") > 4
    chats = value(text, "argosy_http_requests_total", route="/v1/chat/completions", status="200")
    assert chats == 3
    assert value(text, "argosy_ready") == 1
    assert value(text, "argosy_kv_blocks", state="free") > 0


async def test_concurrent_scrapes_share_one_exposition(
    replica_server: RunningReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Separate expositions for each scrape would delay all other requests by seconds."""
    expositions, may_finish = 0, threading.Event()
    original = ReplicaMetrics.exposition

    def count_exposition(metrics: ReplicaMetrics) -> bytes:
        nonlocal expositions
        expositions += 1
        assert may_finish.wait(30)
        return original(metrics)

    monkeypatch.setattr(ReplicaMetrics, "exposition", count_exposition)
    address = replica_server.url.removeprefix("http://").split(":")
    clients = [await asyncio.open_connection(*address) for _ in range(20)]
    for _, writer in clients:
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (await replica_server.client.get("/health")).status_code == 200
    await until(lambda: expositions > 0)
    may_finish.set()
    bodies = {(await reader.read()).partition(b"\r\n\r\n")[2] for reader, _ in clients}
    for _, writer in clients:
        writer.close()
    assert len(bodies) == expositions == 1
    await replica_server.client.get("/metrics")
    assert expositions == 2


async def test_route_labels_are_bounded(replica_server: RunningReplica) -> None:
    for path in ("/v1/models/a", "/v1/models/b", "/nowhere/1", "/nowhere/2"):
        await replica_server.client.get(path)
    text = (await replica_server.client.get("/metrics")).text
    routes = {
        labels["route"] for n, labels, _ in samples(text) if n == "argosy_http_requests_total"
    }
    assert routes == {"/v1/models/{model}", "other"}


async def test_aborts_are_counted_by_reason(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    engine.script = constant_script(Script([100, 101, 102], pause_after=2))
    request = asyncio.create_task(replica_server.client.post("/v1/chat/completions", json=chat()))
    await engine.paused.wait()
    request.cancel()
    await replica_server.replica.wait_drained()
    text = (await replica_server.client.get("/metrics")).text
    assert value(text, "argosy_requests_aborted_total", reason="client_closed_request") == 1
    assert value(text, "argosy_sequences_finished_total", finish_reason="cancelled") == 1


async def test_replica_metrics_pass_promtool(replica_server: RunningReplica) -> None:
    promtool = find_program("promtool", "prometheus")
    await send_requests(replica_server)
    exposition = (await replica_server.client.get("/metrics")).content
    done = await asyncio.to_thread(
        subprocess.run,
        [promtool, "check", "metrics"],
        input=exposition,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr.strip(), done.stderr.decode()


async def test_vllm_metric_names_need_setting(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    assert "vllm:" not in (await replica_server.client.get("/metrics")).text
    async with serve(engine, msgspec.structs.replace(CONFIG, vllm_metrics=True)) as other:
        await send_requests(other)
        text = (await other.client.get("/metrics")).text
    labels = {"model_name": MODEL, "engine": "0"}
    assert value(text, "vllm:request_success_total", finished_reason="stop", **labels) == 2
    assert value(text, "vllm:time_to_first_token_seconds_count", **labels) == 4
    assert value(text, "vllm:e2e_request_latency_seconds_count", **labels) == 4
    assert value(text, "vllm:iteration_tokens_total_count", **labels) > 0
    assert value(text, "vllm:num_requests_running", **labels) >= 0
    assert value(text, "vllm:kv_cache_usage_perc", **labels) >= 0
    config = {"block_size": "16", "num_gpu_blocks": "1024"}
    assert value(text, "vllm:cache_config_info", **config) == 1
    types = {f.name: f.type for f in text_string_to_metric_families(text)}
    assert types["vllm:prompt_tokens"] == "counter"
    assert types["vllm:e2e_request_latency_seconds"] == "histogram"
    own = value(text, "argosy_generation_tokens_total")
    assert value(text, "vllm:generation_tokens_total", **labels) == own
