"""Clients that read slowly get their complete response, and those whose machine is lost are disconnected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.integration.gateway.test_fast_path import decode_chunks, token_ids
from tests.integration.gateway.test_upstream import drop_packets
from tests.support.fake_engine import FakeEngine, Script
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.gateway_harness import RecordingFilter, run_gateway
from tests.support.gateway_processes import gateways, open_organisation
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig, Timeouts
from argosy.engine.serving.text import Tokenizer
from argosy.store import StoreConfig

LONG_TIMEOUTS = Timeouts(
    first_token_timeout_s=60.0, stream_idle_timeout_s=60.0, failover_timeout_s=60.0
)
TOKENS = [100 + number % 60 for number in range(3000)]
# Large events, so that the socket buffers between replica and client fill up.
BODY: dict[str, Any] = {
    "model": "big",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": len(TOKENS),
    "stream": True,
    "return_token_ids": True,
    "logprobs": True,
    "top_logprobs": 20,
}


def send_request(url: httpx2.URL, path: str, body: object, *headers: str) -> socket.socket:
    """Connect a client that has sent its request and reads nothing yet."""
    content = json.dumps(body).encode()
    length = f"content-length: {len(content)}"
    head = (f"POST {path} HTTP/1.1", "host: 127.0.0.1", *headers, length, "", "")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((url.host, url.port))
    client.sendall("\r\n".join(head).encode() + content)
    return client


def read_response(client: socket.socket) -> bytes:
    """Read the complete response."""
    with client:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


async def test_unsent_bytes_of_fast_path_precede_rest_of_stream(
    tokenizer: Tokenizer,
) -> None:
    engine = FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length", pause_after=20))
    engine.max_model_len = 100_000
    recorder = RecordingFilter()
    async with (
        serve(engine) as served,
        run_gateway(
            [recorder], ReplicaConfig(url=served.url, model=MODEL), timeouts=LONG_TIMEOUTS
        ) as gateway,
    ):
        client = send_request(
            gateway.client.base_url, "/v1/chat/completions", BODY, "connection: close"
        )
        await engine.paused.wait()
        await until(lambda: gateway.handlers.fast_path_streams == 1)
        engine.may_continue.set()
        await until(lambda: gateway.handlers.fast_path_streams == 0)
        assert not recorder.completed
        response = await asyncio.to_thread(read_response, client)
    assert token_ids(decode_chunks(response.partition(b"\r\n\r\n")[2])) == TOKENS
    (context,) = recorder.completed
    assert (context.status, context.delivered.output_tokens) == ("completed", len(TOKENS))


async def respond_partially(request: UpstreamRequest) -> None:
    """Start a stream that stalls, or never respond."""
    if request.body.get("stream"):
        request.start_stream()
        request.send_text(" one")
    await asyncio.Event().wait()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such timeouts")
async def test_requests_of_lost_clients_are_cancelled(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    async with fake_upstream(respond_partially) as server:
        replicas = [ReplicaConfig(url=server.url, kind="openai", model="rough")]
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name="big", replicas=replicas)],
            store=StoreConfig(url=url),
            slow_reader_timeout_s=0.5,
            sse_keepalive_interval_s=0.5,
        )
        with open_organisation(url) as store:
            key = store.key(store.project("web"))
            async with gateways(config, tmp_path) as (gateway,):
                body = {"model": "big", "prompt": "Say", "max_tokens": 9}
                with contextlib.ExitStack() as clients:
                    for number, stream in enumerate((False, True)):
                        client = send_request(
                            httpx2.URL(gateway.url),
                            "/v1/completions",
                            body | {"stream": stream},
                            f"authorization: Bearer {key}",
                        )
                        clients.enter_context(client)
                        await until(lambda: len(server.requests) > number)  # noqa: B023
                        drop_packets(client)
                    rows = await store.wait_for_rows(2)
                await gateway.stop()
    assert [row.status for row in rows] == ["cancelled"] * 2
