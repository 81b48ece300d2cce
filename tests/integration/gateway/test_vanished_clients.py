"""A client whose machine is lost during its response is disconnected, and its request is cancelled."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

import httpx2
import pytest
from tests.integration.gateway.test_upstream import drop_packets
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.gateway_processes import MODEL, gateways, open_organisation
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.store import StoreConfig

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems have no such timeouts"
)


async def respond_partially(request: UpstreamRequest) -> None:
    """Start a stream that stalls, or never respond."""
    if request.body.get("stream"):
        request.start_stream()
        request.send_text(" one")
    await asyncio.Event().wait()


def send_request(url: httpx2.URL, key: str, *, stream: bool) -> socket.socket:
    """Connect a client that has sent its request."""
    content = json.dumps({"model": MODEL, "prompt": "Say", "max_tokens": 9, "stream": stream})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    client = socket.create_connection((url.host, url.port or 0))
    client.sendall(f"{head}content-length: {len(content)}\r\n\r\n{content}".encode())
    return client


@pytest.mark.parametrize("stream", [False, True])
async def test_request_of_lost_client_is_cancelled(tmp_path: Path, stream: bool) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    async with fake_upstream(respond_partially) as server:
        replicas = [ReplicaConfig(url=server.url, kind="openai", model="rough")]
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name=MODEL, replicas=replicas)],
            store=StoreConfig(url=url),
            slow_reader_timeout_s=0.5,
            sse_keepalive_interval_s=0.5,
        )
        with open_organisation(url) as store:
            key = store.key(store.project("web"))
            async with gateways(config, tmp_path) as (gateway,):
                with send_request(httpx2.URL(gateway.url), key, stream=stream) as client:
                    await until(lambda: server.requests)
                    drop_packets(client)
                    (row,) = await store.wait_for_rows(1)
                await gateway.stop()
    assert row.status == "cancelled"
