"""Reports of engines: their kind, their load, and the publishers of their KV events."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from argosy.deployment import KvEventAddress, load_config
from argosy.gateway.backends import DetectedBackend, LoadReport, detect_backend
from argosy.gateway.backends.backend_adapter import (
    KvEventPorts,
    parse_sglang_info,
    parse_vllm_sources,
)
from argosy.gateway.backends.load_parsers import (
    SGLANG_METRICS,
    parse_lmdeploy_metrics,
    parse_metric_values,
    parse_sglang_loads,
    parse_tensorrt_iterations,
    parse_vllm_metrics,
)
from argosy.protocol import parse_endpoint

INFO = {"model_id": "m", "max_total_tokens": 9, "max_concurrent_requests": 9}


def model_list(*owners: str) -> tuple[int, object]:
    return 200, {"data": [{"id": f"m{at}", "owned_by": owner} for at, owner in enumerate(owners)]}


@pytest.mark.parametrize(
    ("responses", "kind"),
    [
        ({"/v1/models": model_list("vllm")}, "vllm"),
        ({"/v1/models": model_list("someone", "sglang")}, "sglang"),
        ({"/v1/models": model_list("tensorrt_llm")}, "tensorrt-llm"),
        ({"/v1/models": model_list("lmdeploy")}, "lmdeploy"),
        ({"/v1/models": model_list("llamacpp")}, "llama.cpp"),
        ({"/v1/models": model_list("argosy"), "/load": (200, {})}, "argosy"),
        ({"/v1/models": model_list("argosy"), "/load": (503, {})}, "argosy"),
        ({"/v1/models": model_list("argosy")}, "openai"),  # another gateway
        ({"/v1/models": model_list("m"), "/info": (200, INFO)}, "tgi"),
        ({"/v1/models": model_list("m"), "/info": (200, {"model_id": "m"})}, "openai"),
        ({"/v1/models": model_list("m"), "/info": (200, "nothing of the kind")}, "openai"),
        ({"/v1/models": (200, "no list")}, "openai"),
        ({"/v1/models": (200, {"data": [7]})}, "openai"),
        ({"/v1/models": (401, {})}, "openai"),
        ({}, "openai"),
        ({"/v1/models": (503, {})}, None),
        ({"/v1/models": (429, {})}, None),
    ],
)
async def test_backend_kind_is_detected(
    responses: dict[str, tuple[int, object]], kind: str | None
) -> None:
    async def fetch(path: bytes) -> tuple[int, bytes]:
        status, content = responses.get(path.decode(), (404, {}))
        return status, json.dumps(content).encode()

    detected = await detect_backend(fetch)
    assert (None if detected is None else detected.kind) == kind


async def test_context_length_of_models_is_detected() -> None:
    async def fetch(path: bytes) -> tuple[int, bytes]:
        del path
        models = [{"id": "a", "owned_by": "vllm", "max_model_len": 64}, {"id": "b"}]
        models.append({"id": "c", "max_model_len": 0})
        return 200, json.dumps({"data": models}).encode()

    assert await detect_backend(fetch) == DetectedBackend("vllm", {"a": 64, "b": None, "c": None})


@pytest.mark.parametrize("path", [b"/v1/models", b"/info"])
async def test_response_that_is_not_utf8_is_generic_backend(path: bytes) -> None:
    async def fetch(requested: bytes) -> tuple[int, bytes]:
        return 200, b'{"data": [{"id": "\xff"}], "\xff": 1}' if requested == path else b"{}"

    assert await detect_backend(fetch) == DetectedBackend("openai", {})


def test_metric_values_ignore_labels_and_skip_invalid_lines() -> None:
    text = b"""# HELP a_b {x} 7
a_b 1
a_b{l="x} y 5"} 2 1700000000000
a_b{l="z"} NaN
a_bc 9
a_b
a_b{l="q"} zwei
c 3
"""
    assert parse_metric_values(text, {b"a_b", b"missing"}) == {b"a_b": [1.0, 2.0]}


def test_lmdeploy_counts_requests_waiting_in_api_server() -> None:
    text = b"lmdeploy:num_requests_running{} 4.0\nlmdeploy:num_requests_waiting{} 2.0\n"
    assert parse_lmdeploy_metrics(text).waiting == 2
    assert parse_lmdeploy_metrics(text + b"lmdeploy:num_api_requests_waiting{} 3.0\n").waiting == 5


def test_kv_capacity_is_parsed_where_engine_reports_it() -> None:
    vllm = b"""vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_running{engine="1"} 2.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{engine="1",num_gpu_blocks="50",block_size="32"} 1.0
"""
    assert parse_vllm_metrics(vllm) == LoadReport(running=3, waiting=0, kv_capacity_tokens=3200)
    unknown = vllm.replace(b'"100"', b'"None"').replace(b'"50"', b'"None"')
    assert parse_vllm_metrics(unknown).kv_capacity_tokens is None
    sglang = b"sglang:num_running_reqs{} 1\nsglang:max_total_num_tokens{} 4096.0\n"
    assert SGLANG_METRICS(sglang).kv_capacity_tokens == 4096
    ranks = [{"num_running_reqs": 1, "max_total_num_tokens": size} for size in (4096, 2048)]
    assert parse_sglang_loads(json.dumps({"loads": ranks}).encode()).kv_capacity_tokens == 6144
    kv = {"usedNumBlocks": 1, "maxNumBlocks": 4, "tokensPerBlock": 32}
    assert (
        parse_tensorrt_iterations(json.dumps([{"kvCacheStats": kv}]).encode()).kv_capacity_tokens
        == 128
    )


def format_vllm_info(*publishers: dict[str, object]) -> bytes:
    return json.dumps(dict(enumerate(publishers))).encode()


def test_vllm_ports_are_parsed() -> None:
    publisher: dict[str, object] = {"endpoint": "tcp://*:5557", "publisher": "zmq", "topic": ""}
    assert parse_vllm_sources(format_vllm_info(publisher)) == KvEventPorts(5557)
    assert parse_vllm_sources(
        format_vllm_info(publisher | {"replay_endpoint": "tcp://*:5558"})
    ) == KvEventPorts(5557, 5558)
    for unsupported in ([], [publisher, publisher], [publisher | {"endpoint": "ipc:///tmp/kv"}]):
        assert parse_vllm_sources(format_vllm_info(*unsupported)) is None


def test_sglang_port_is_parsed() -> None:
    publisher = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 1}
    info = json.dumps({"page_size": 64, "kv_events": publisher}).encode()
    assert parse_sglang_info(info) == KvEventPorts(5557)
    for unsupported in (None, publisher | {"dp_size": 2}):
        assert parse_sglang_info(json.dumps({"kv_events": unsupported}).encode()) is None


@pytest.mark.parametrize("body", [b"", b"[]", b'{"0": 1}', b'{"0": {"endpoint": "tcp://x:y"}}'])
def test_invalid_vllm_response_is_rejected(body: bytes) -> None:
    with pytest.raises((ValueError, msgspec.DecodeError)):
        parse_vllm_sources(body)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://10.0.0.5:8000", "10.0.0.5"),
        ("http://[::1]:8000", "[::1]"),
        ("unix:/run/vllm.sock", "127.0.0.1"),
    ],
)
def test_host_is_taken_from_replica_url(url: str, host: str) -> None:
    address = KvEventPorts(5557, 5558).to_address(parse_endpoint(url))
    assert (address.endpoint, address.replay) == (f"tcp://{host}:5557", f"tcp://{host}:5558")
    assert KvEventPorts(5557).to_address(parse_endpoint(url)).replay is None


@pytest.mark.parametrize(("address", "host"), [("10.0.0.7", "10.0.0.7"), ("fd00::7", "[fd00::7]")])
def test_host_is_taken_from_resolved_address(address: str, host: str) -> None:
    server = msgspec.structs.replace(parse_endpoint("http://pods.test:8000"), address=address)
    assert KvEventPorts(5557).to_address(server).endpoint == f"tcp://{host}:5557"


def test_wildcard_host_in_settings_is_resolved_per_replica() -> None:
    server = msgspec.structs.replace(parse_endpoint("http://pods.test:8000"), address="fd00::7")
    for address in (
        KvEventAddress(endpoint="tcp://gpu7:5557", replay="tcp://gpu7:5558"),
        KvEventAddress(endpoint="tcp://gpu7:5557"),
        KvEventAddress(endpoint="ipc:///run/kv", replay="ipc:///run/replay"),
    ):
        assert address.resolve_host(server) == address
        assert not address.has_wildcard_host
    wildcard = KvEventAddress(endpoint="tcp://*:5557", replay="tcp://*:5558")
    assert wildcard.resolve_host(server) == KvEventAddress(
        endpoint="tcp://[fd00::7]:5557", replay="tcp://[fd00::7]:5558"
    )
    assert wildcard.has_wildcard_host
    assert not KvEventAddress(endpoint="tcp://*:5557", replay="tcp://gpu7:5558").has_wildcard_host


@pytest.mark.parametrize("kind", ["vllm", "auto", "openai"])
def test_kv_events_setting_requires_publishing_engine(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    replica = f"{{url: 'http://a:1', kind: {kind}, kv_events: {{endpoint: 'tcp://a:5557'}}}}"
    path.write_text(f"models: [{{name: m, replicas: [{replica}]}}]")
    if kind == "openai":
        with pytest.raises(
            ValueError, match=r"kv_events is only supported for kind vllm or sglang\. Remove it"
        ):
            load_config(path)
    else:
        (replica_config,) = load_config(path).models[0].replicas
        assert replica_config.kv_events == KvEventAddress(endpoint="tcp://a:5557")
