"""A slow client receives its complete response from the fast path and from the interpreter."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx2
from tests.integration.gateway.test_fast_path import decode_chunks, token_ids
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import RecordingFilter, run_gateway
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import until

from argosy.deployment import ReplicaConfig, Timeouts
from argosy.engine.serving.text import Tokenizer

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


def connect_slow_client(url: httpx2.URL) -> socket.socket:
    """Connect a client that has sent its request and reads nothing yet."""
    content = json.dumps(BODY).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    length = f"content-length: {len(content)}\r\n\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((url.host, url.port))
    client.sendall(head.encode() + length.encode() + content)
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
        client = connect_slow_client(gateway.client.base_url)
        await engine.paused.wait()
        await until(lambda: gateway.handlers.fast_path_streams == 1)
        engine.may_continue.set()
        await until(lambda: gateway.handlers.fast_path_streams == 0)
        assert not recorder.completed
        response = await asyncio.to_thread(read_response, client)
    assert token_ids(decode_chunks(response.partition(b"\r\n\r\n")[2])) == TOKENS
    (context,) = recorder.completed
    assert (context.status, context.delivered.output_tokens) == ("completed", len(TOKENS))
