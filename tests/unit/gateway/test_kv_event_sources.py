"""Where servers say that they publish KV cache events."""

from __future__ import annotations

import json

import msgspec
import pytest

from argosy.gateway.backends.kv_event_sources import (
    KvEventAddress,
    KvEventPorts,
    parse_sglang_info,
    parse_vllm_sources,
)
from argosy.protocol import parse_endpoint


def vllm(*publishers: dict[str, object]) -> bytes:
    return json.dumps(dict(enumerate(publishers))).encode()


def test_vllm_names_its_addresses() -> None:
    one: dict[str, object] = {"endpoint": "tcp://*:5557", "publisher": "zmq", "topic": ""}
    assert parse_vllm_sources(vllm(one)) == KvEventPorts(5557)
    assert parse_vllm_sources(vllm(one | {"replay_endpoint": "tcp://*:5558"})) == KvEventPorts(
        5557, 5558
    )
    for others in ([], [one, one], [one | {"endpoint": "ipc:///tmp/kv"}]):
        assert parse_vllm_sources(vllm(*others)) is None


def test_sglang_names_its_port() -> None:
    told = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 1}
    assert parse_sglang_info(
        json.dumps({"page_size": 64, "kv_events": told}).encode()
    ) == KvEventPorts(5557)
    for others in (None, told | {"dp_size": 2}):
        assert parse_sglang_info(json.dumps({"kv_events": others}).encode()) is None


@pytest.mark.parametrize("body", [b"", b"[]", b'{"0": 1}', b'{"0": {"endpoint": "tcp://x:y"}}'])
def test_what_is_none_is_refused(body: bytes) -> None:
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
def test_the_host_is_the_servers_own(url: str, host: str) -> None:
    address = KvEventPorts(5557, 5558).to_address(parse_endpoint(url))
    assert (address.endpoint, address.replay) == (f"tcp://{host}:5557", f"tcp://{host}:5558")
    assert KvEventPorts(5557).to_address(parse_endpoint(url)).replay is None


@pytest.mark.parametrize(("address", "host"), [("10.0.0.7", "10.0.0.7"), ("fd00::7", "[fd00::7]")])
def test_one_of_several_addresses_is_its_own(address: str, host: str) -> None:
    server = msgspec.structs.replace(parse_endpoint("http://pods.test:8000"), address=address)
    assert KvEventPorts(5557).to_address(server).endpoint == f"tcp://{host}:5557"


def test_a_configured_address_is_as_it_is_or_of_each_server() -> None:
    server = msgspec.structs.replace(parse_endpoint("http://pods.test:8000"), address="fd00::7")
    for one in (
        KvEventAddress(endpoint="tcp://gpu7:5557", replay="tcp://gpu7:5558"),
        KvEventAddress(endpoint="tcp://gpu7:5557"),
        KvEventAddress(endpoint="ipc:///run/kv", replay="ipc:///run/replay"),
    ):
        assert one.resolve_host(server) == one
        assert not one.has_wildcard_host
    own = KvEventAddress(endpoint="tcp://*:5557", replay="tcp://*:5558")
    assert own.resolve_host(server) == KvEventAddress(
        endpoint="tcp://[fd00::7]:5557", replay="tcp://[fd00::7]:5558"
    )
    assert own.has_wildcard_host
    assert not KvEventAddress(endpoint="tcp://*:5557", replay="tcp://gpu7:5558").has_wildcard_host
