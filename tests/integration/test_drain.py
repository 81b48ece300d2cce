"""Graceful shutdown: SIGTERM and `/drain` reject new requests and finish running ones within a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx2
import msgspec
import pytest
from tests.integration.conftest import REPLY
from tests.support.fake_engine import FakeEngine, constant_script, reply_script
from tests.support.fake_replica import REPLY as PROCESS_REPLY
from tests.support.replica_servers import CONFIG, RunningReplica, chat, events, replica_process

from argosy.engine import ReplicaServerConfig
from argosy.engine.serving.text import Tokenizer


def drain_config(deadline_s: float) -> ReplicaServerConfig:
    return msgspec.structs.replace(CONFIG, drain_deadline_s=deadline_s)


@contextlib.asynccontextmanager
async def open_stream(
    client: httpx2.AsyncClient, prompt: str
) -> AsyncIterator[Callable[[], Awaitable[list[bytes]]]]:
    """Start a stream and wait for its first bytes. Yield a function that reads the rest and returns all events."""
    body = chat(prompt, stream=True)
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        pieces = response.aiter_bytes()
        first = await anext(pieces)

        async def read_rest() -> list[bytes]:
            return events(first + b"".join([piece async for piece in pieces]))

        yield read_rest


async def wait_not_ready(client: httpx2.AsyncClient) -> None:
    while (await client.get("/ready")).status_code == 200:
        pass


async def test_sigterm_finishes_running_stream_and_exits_0() -> None:
    async with replica_process(drain_config(30)) as (process, client):
        async with open_stream(client, "please wait") as read_rest:
            process.send_signal(signal.SIGTERM)
            await wait_not_ready(client)
            rejected = await client.post("/v1/chat/completions", json=chat())
            assert rejected.status_code == 503
            assert rejected.json()["error"]["code"] == "draining"
            assert rejected.headers["retry-after"] == "1"
            assert (await client.get("/health")).status_code == 200
            process.send_signal(signal.SIGUSR1)
            *chunks, last = await read_rest()
        assert last == b"[DONE]"
        texts = [json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(texts) == PROCESS_REPLY
        assert await process.wait() == 0


async def test_drain_deadline_ends_stream_with_error_event() -> None:
    async with replica_process(drain_config(0.2)) as (process, client):
        async with open_stream(client, "stay forever") as read_rest:
            process.send_signal(signal.SIGTERM)
            *_, last = await read_rest()
        assert json.loads(last)["error"]["code"] == "draining"
        assert await process.wait() == 0


async def test_second_signal_ends_stream_at_once() -> None:
    async with replica_process(drain_config(600)) as (process, client):
        async with open_stream(client, "stay forever") as read_rest:
            process.send_signal(signal.SIGTERM)
            await wait_not_ready(client)
            process.send_signal(signal.SIGINT)
            *_, last = await read_rest()
        assert json.loads(last)["error"]["code"] == "draining"
        assert await process.wait() == 0


async def test_sigterm_stops_idle_replica_at_once() -> None:
    async with replica_process(drain_config(600)) as (process, client):
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_drain_endpoint_rejects_new_and_finishes_running(
    replica_server: RunningReplica, engine: FakeEngine, tokenizer: Tokenizer, stream: bool
) -> None:
    reply = reply_script(tokenizer, REPLY)
    reply.pause_after = 2
    engine.script = constant_script(reply)
    body = chat(stream=stream)
    running = asyncio.create_task(replica_server.client.post("/v1/chat/completions", json=body))
    await engine.paused.wait()
    assert (await replica_server.client.post("/drain")).json() == {"status": "draining"}
    rejected = await replica_server.client.post("/v1/completions", json=chat())
    assert rejected.status_code == 503
    assert rejected.headers["retry-after-ms"] == "1000"
    assert (await replica_server.client.get("/ready")).json()["error"]["code"] == "draining"
    assert (await replica_server.client.get("/load")).json()["state"] == "draining"
    engine.may_continue.set()
    assert (await running).status_code == 200


async def test_undrain_accepts_requests_again(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    client = replica_server.client
    await client.post("/drain", json={"deadline_s": 600})
    assert (await client.post("/undrain")).json() == {"status": "ready"}
    assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
    assert not engine.aborted
    replica_server.replica.is_stopping = True
    await client.post("/drain")
    refused = await client.post("/undrain")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


@pytest.mark.parametrize(
    ("path", "headers", "body", "expected"),
    [
        ("/drain", {"origin": "https://elsewhere.example"}, b"", (403, "origin_not_allowed")),
        ("/drain", {"origin": "http://localhost:3000"}, b"", (403, "origin_not_allowed")),
        ("/drain", {"sec-fetch-site": "cross-site"}, b"", (403, "origin_not_allowed")),
        ("/drain", {"content-type": "text/plain"}, b"{}", (415, "unsupported_media_type")),
        ("/drain", {}, b"{}", (415, "unsupported_media_type")),
        ("/undrain", {"origin": "http://localhost:3000"}, b"", (403, "origin_not_allowed")),
    ],
)
async def test_state_changes_reject_web_pages(
    replica_server: RunningReplica,
    path: str,
    headers: dict[str, str],
    body: bytes,
    expected: tuple[int, str],
) -> None:
    rejected = await replica_server.client.post(path, headers=headers, content=body)
    assert (rejected.status_code, rejected.json()["error"]["code"]) == expected
    assert (await replica_server.client.get("/ready")).status_code == 200


async def test_drain_endpoint_deadline_ends_running_request(
    replica_server: RunningReplica, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    reply = reply_script(tokenizer, REPLY)
    reply.pause_after = 0
    engine.script = constant_script(reply)
    running = asyncio.create_task(replica_server.client.post("/v1/chat/completions", json=chat()))
    await engine.paused.wait()
    await replica_server.client.post("/drain", json={"deadline_s": 0})
    response = await running
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "draining"
    await engine.wait_idle()
    assert engine.aborted
