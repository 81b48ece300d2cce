"""Addresses of KV event publishers, as engines report them or settings name them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from argosy.deployment import KvEventAddress, load_config
from argosy.gateway.backends.backend_adapter import (
    KvEventPorts,
    parse_sglang_info,
    parse_vllm_sources,
)
from argosy.protocol import parse_endpoint


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
