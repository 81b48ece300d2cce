"""Going away gracefully: SIGTERM and `/drain` refuse the new, finish the running, and keep the deadline."""

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
from tests.support.fake_engine import FakeEngine, always, says
from tests.support.fake_replica import REPLY as PROCESS_REPLY
from tests.support.replica_servers import CONFIG, Served, chat, events, replica_process

from argosy.engine.serving.api_server.replica_server_config import ReplicaServerConfig
from argosy.engine.serving.text.tokenizer import Tokenizer


def draining(deadline_s: float) -> ReplicaServerConfig:
    return msgspec.structs.replace(CONFIG, drain_deadline_s=deadline_s)


@contextlib.asynccontextmanager
async def begun(
    client: httpx2.AsyncClient, prompt: str
) -> AsyncIterator[Callable[[], Awaitable[list[bytes]]]]:
    """A stream whose first bytes are there; what is yielded reads it to its end and gives its events."""
    body = chat(prompt, stream=True)
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        pieces = answer.aiter_bytes()
        first = await anext(pieces)

        async def to_the_end() -> list[bytes]:
            return events(first + b"".join([piece async for piece in pieces]))

        yield to_the_end


async def no_longer_ready(client: httpx2.AsyncClient) -> None:
    while (await client.get("/ready")).status_code == 200:
        pass


async def test_sigterm_finishes_what_runs_and_exits_0() -> None:
    async with replica_process(draining(30)) as (process, client):
        async with begun(client, "please wait") as to_the_end:
            process.send_signal(signal.SIGTERM)
            await no_longer_ready(client)
            refused = await client.post("/v1/chat/completions", json=chat())
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert refused.headers["retry-after"] == "1"
            assert (await client.get("/health")).status_code == 200
            process.send_signal(signal.SIGUSR1)
            *chunks, last = await to_the_end()
        assert last == b"[DONE]"
        texts = [json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(texts) == PROCESS_REPLY
        assert await process.wait() == 0


async def test_deadline_ends_the_rest_with_an_error_event() -> None:
    async with replica_process(draining(0.2)) as (process, client):
        async with begun(client, "stay forever") as to_the_end:
            process.send_signal(signal.SIGTERM)
            *_, last = await to_the_end()
        assert json.loads(last)["error"]["code"] == "draining"
        assert await process.wait() == 0


async def test_second_signal_is_immediate() -> None:
    async with replica_process(draining(600)) as (process, client):
        async with begun(client, "stay forever") as to_the_end:
            process.send_signal(signal.SIGTERM)
            await no_longer_ready(client)
            process.send_signal(signal.SIGINT)
            *_, last = await to_the_end()
        assert json.loads(last)["error"]["code"] == "draining"
        assert await process.wait() == 0


async def test_idle_replica_leaves_at_once() -> None:
    async with replica_process(draining(600)) as (process, client):
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_drain_endpoint(
    served: Served, engine: FakeEngine, tokenizer: Tokenizer, stream: bool
) -> None:
    reply = says(tokenizer, REPLY)
    reply.pause_after = 2
    engine.script = always(reply)
    body = chat(stream=stream)
    running = asyncio.create_task(served.client.post("/v1/chat/completions", json=body))
    await engine.paused.wait()
    assert (await served.client.post("/drain")).json() == {"status": "draining"}
    refused = await served.client.post("/v1/completions", json=chat())
    assert refused.status_code == 503
    assert refused.headers["retry-after-ms"] == "1000"
    assert (await served.client.get("/ready")).json()["error"]["code"] == "draining"
    assert (await served.client.get("/load")).json()["state"] == "draining"
    engine.go_on.set()
    assert (await running).status_code == 200


async def test_no_web_page_drains_a_replica(served: Served) -> None:
    page = {"origin": "https://elsewhere.example", "content-type": "text/plain"}
    refused = await served.client.post("/drain", headers=page)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert (await served.client.get("/ready")).status_code == 200


async def test_drain_endpoint_with_a_deadline(
    served: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    reply = says(tokenizer, REPLY)
    reply.pause_after = 0
    engine.script = always(reply)
    running = asyncio.create_task(served.client.post("/v1/chat/completions", json=chat()))
    await engine.paused.wait()
    await served.client.post("/drain", json={"deadline_s": 0})
    ended = await running
    assert ended.status_code == 503
    assert ended.json()["error"]["code"] == "draining"
    await engine.nothing_runs()
    assert engine.aborted
