"""A client whose machine vanishes in the middle of its answer: nobody goes on working for it."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

import httpx2
import pytest
from tests.integration.gateway.test_upstream import falls_silent
from tests.support.gateway_processes import MODEL, gateways, tenants
from tests.support.scripted_server import Asked, rough_server

from argosy.gateway import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.store import StoreConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="others have no such timeouts")


async def begins(asked: Asked) -> None:
    """A stream that never gets on, or an answer that never comes."""
    if asked.body.get("stream"):
        asked.stream()
        asked.say(" one")
    await asyncio.Event().wait()


def asks(url: httpx2.URL, key: str, *, stream: bool) -> socket.socket:
    """A client that has sent its request."""
    content = json.dumps({"model": MODEL, "prompt": "Say", "max_tokens": 9, "stream": stream})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    client = socket.create_connection((url.host, url.port or 0))
    client.sendall(f"{head}content-length: {len(content)}\r\n\r\n{content}".encode())
    return client


@pytest.mark.parametrize("stream", [False, True])
async def test_its_request_ends(tmp_path: Path, stream: bool) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    async with rough_server(begins) as server:
        replicas = [ReplicaConfig(url=server.url, kind="openai", model="rough")]
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name=MODEL, replicas=replicas)],
            store=StoreConfig(url=url),
            slow_reader_timeout_s=0.5,
            sse_keepalive_interval_s=0.5,
        )
        with tenants(url) as store:
            key = store.key(store.project("web"))
            async with gateways(config, tmp_path) as (gateway,):
                with asks(httpx2.URL(gateway.url), key, stream=stream) as client:
                    while not server.asked:  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.01)
                    falls_silent(client)
                    (row,) = await store.settled(1)
                await gateway.stop()
    assert row.status == "cancelled"
