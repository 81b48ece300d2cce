"""A client that is behind gets all of its answer, whichever way it came."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx2
from tests.integration.gateway.test_fast_path import dechunked, ids
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import Watching, front
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import until

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import ReplicaConfig, Timeouts

PATIENT = Timeouts(first_token_timeout_s=60.0, stream_idle_timeout_s=60.0, failover_timeout_s=60.0)
TOKENS = [100 + number % 60 for number in range(3000)]
# Much to send for each token, so that the sockets between fill.
CHAT: dict[str, Any] = {
    "model": "big",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": len(TOKENS),
    "stream": True,
    "return_token_ids": True,
    "logprobs": True,
    "top_logprobs": 20,
}


def asks(url: httpx2.URL) -> socket.socket:
    """A client that has sent its request, and reads nothing yet."""
    content = json.dumps(CHAT).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    length = f"content-length: {len(content)}\r\n\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((url.host, url.port))
    client.sendall(head.encode() + length.encode() + content)
    return client


def read(client: socket.socket) -> bytes:
    """All of its answer."""
    with client:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


async def test_what_the_fast_path_could_not_send_is_sent_before_the_rest(
    tokenizer: Tokenizer,
) -> None:
    engine = FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length", pause_after=20))
    engine.max_model_len = 100_000
    watching = Watching()
    async with (
        serve(engine) as served,
        front([watching], ReplicaConfig(url=served.url, model=MODEL), timeouts=PATIENT) as running,
    ):
        client = asks(running.client.base_url)
        await engine.paused.wait()
        await until(lambda: running.serving.fast_path_streams == 1)
        engine.go_on.set()
        await until(lambda: running.serving.fast_path_streams == 0)
        assert not watching.left
        answer = await asyncio.to_thread(read, client)
    assert ids(dechunked(answer.partition(b"\r\n\r\n")[2])) == TOKENS
    (context,) = watching.left
    assert (context.status, context.delivered.output_tokens) == ("completed", len(TOKENS))
