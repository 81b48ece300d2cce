"""Models that sleep: who is awake in too little memory, and what clients of a sleeping model receive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx2
import pytest
from tests.support.fake_engine import FakeEngine, constant_script, reply_script
from tests.support.gateway_client import CHAT, run_gateway_server
from tests.support.migrated_store import SQLITE, open_migrated_store
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import until

from argosy.deployment import (
    ColdStartConfig,
    GatewayConfig,
    ModelConfig,
    ReplicaConfig,
    SleepConfig,
)
from argosy.engine.serving.text import Tokenizer

AWAKE_BYTES = 2 << 20
MANAGER = "argosy.gateway.residency_manager"
REPLIES = [f"Hello there, I am number {number}." for number in range(5)]


@contextlib.asynccontextmanager
async def run_models(
    tokenizer: Tokenizer,
    count: int,
    sleep: SleepConfig | None,
    memory: int | None = None,
    **settings: Any,  # noqa: ANN401 - of the gateway
) -> AsyncIterator[tuple[list[FakeEngine], httpx2.AsyncClient]]:
    """Run a gateway with models `m0`, `m1`, ... of one replica each. The first answers for one that cannot."""
    async with contextlib.AsyncExitStack() as stack:
        engines, models = [], []
        for number in range(count):
            engine = FakeEngine(
                tokenizer, constant_script(reply_script(tokenizer, REPLIES[number]))
            )
            engine.awake_bytes = AWAKE_BYTES
            engines.append(engine)
            running = await stack.enter_async_context(serve(engine))
            replica = ReplicaConfig(url=running.url, model=MODEL, name=f"r{number}", kind="argosy")
            fallbacks = ("m0",) if number else ()
            models.append(
                ModelConfig(
                    name=f"m{number}", replicas=[replica], sleep=sleep, fallback_models=fallbacks
                )
            )
        config = GatewayConfig(port=0, models=models, model_memory=memory, **settings)
        _, client = await stack.enter_async_context(run_gateway_server(config))
        yield engines, client


async def ask(client: httpx2.AsyncClient, number: int, **fields: object) -> httpx2.Response:
    body = {"model": f"m{number}", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return await client.post(CHAT, json=body)


def count_awake(engines: list[FakeEngine]) -> int:
    return sum(not engine.sleep_level for engine in engines)


async def test_requests_wake_models_within_the_memory(tokenizer: Tokenizer) -> None:
    async with run_models(tokenizer, 5, SleepConfig(), 2 * AWAKE_BYTES) as (engines, client):
        await until(lambda: count_awake(engines) == 2)
        most_awake = 0
        for turn in range(3):
            numbers = [(turn + n) % 5 for n in range(5)] * 2
            answers = [asyncio.create_task(ask(client, number)) for number in numbers]
            while not all(answer.done() for answer in answers):
                most_awake = max(most_awake, count_awake(engines))
                await asyncio.sleep(0)
            replies = [each.result().json()["choices"][0]["message"] for each in answers]
            assert [reply["content"] for reply in replies] == [
                REPLIES[number] for number in numbers
            ]
        assert most_awake == 2
        views = (await client.get("/admin/replicas")).json()["data"]
        assert {view["status"] for view in views} == {"ready", "sleeping"}


async def test_idle_model_sleeps_at_its_level_and_streams_learn_of_its_waking(
    tokenizer: Tokenizer,
) -> None:
    notices = ColdStartConfig(comment_interval_s=0.05, event_interval_s=0.05)
    async with run_models(
        tokenizer,
        *(1, SleepConfig(after_s=0.2, level=2)),
        cold_start=notices,
        early_stream_start_s=0.05,
    ) as ((engine,), client):
        await until(lambda: engine.sleep_level == 2)
        may_wake = engine.may_wake = asyncio.Event()
        body = {"model": "m0", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        received = ""
        async with client.stream("POST", CHAT, json=body) as response:
            async for text in response.aiter_text():
                received += text
                if ": argosy starting" in received:
                    may_wake.set()
        assert '"content":"Hello' in received
        await until(lambda: engine.sleep_level == 2)


async def test_keep_alive_of_ollama_decides_for_operators(tokenizer: Tokenizer) -> None:
    """Two models in the memory of one: one that is pinned leaves none for the other, which is refused by name."""

    async def load(keep_alive: object, number: int = 0) -> httpx2.Response:
        body = {"model": f"m{number}", "keep_alive": keep_alive}
        return await client.post("/api/generate", json=body)

    async with run_models(tokenizer, 2, SleepConfig(), AWAKE_BYTES) as (engines, client):
        await until(lambda: count_awake(engines) == 1)
        await load(-1, 1)
        await until(lambda: engines[0].sleep_level)
        refused = await ask(client, 0)
        while refused.status_code == 200:
            refused = await ask(client, 0)
        assert refused.status_code == 503
        assert "'m0' needs 2 MiB of memory, of which model_memory leaves it 0 MiB" in refused.text
        await load("5m", 1)
        while (await ask(client, 0)).status_code != 200:
            pass
    async with run_models(tokenizer, 3, SleepConfig(), AWAKE_BYTES * 3 // 2) as (engines, client):
        for number, left in ((1, 1), (2, 0)):  # the second one does not fit beside the first
            await load(-1, number)
            while f"leaves it {left} MiB." not in (await ask(client, 0)).text:
                pass
    async with run_models(tokenizer, 2, SleepConfig()) as ((engine, other), client):
        assert (await load(0)).json()["done_reason"] == "unload"
        await until(lambda: engine.sleep_level)
        assert "x-argosy-ignored-fields" not in (await load("5m")).headers
        await until(lambda: not engine.sleep_level)
        assert not other.sleep_level
    async with run_models(tokenizer, 1, None) as (_, client):
        assert (await load(0)).headers["x-argosy-ignored-fields"] == "keep_alive"


async def test_model_that_does_not_fall_asleep_is_left_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the next attempt, a model that is larger than the memory answers."""
    monkeypatch.setattr(f"{MANAGER}.RETRY_INTERVAL_S", math.inf)
    monkeypatch.setattr(f"{MANAGER}.CHECK_INTERVAL_S", 0.001)
    refuse = AsyncMock(return_value=False)
    monkeypatch.setattr(FakeEngine, "set_sleep_level", refuse)
    async with run_models(tokenizer, 1, SleepConfig(), AWAKE_BYTES - 1) as (_, client):
        await until(lambda: refuse.await_count)
        while (await ask(client, 0)).status_code != 200:
            pass
        for _ in range(10):
            assert (await ask(client, 0)).status_code == 200
        assert refuse.await_count == 1


@pytest.mark.parametrize("level", [1, 2])
async def test_operator_puts_a_replica_to_sleep(tokenizer: Tokenizer, level: int) -> None:
    async with run_models(tokenizer, 1, None) as ((engine,), client):
        decide = partial(client.post, json={"replica": "r0", "reason": "test"})
        slept = await client.post("/admin/replicas/sleep", json={"replica": "r0", "level": level})
        (view,) = slept.json()["replicas"]
        assert (slept.status_code, view["status"], engine.sleep_level) == (200, "sleeping", level)
        waiting = asyncio.create_task(ask(client, 0))
        woken = await decide("/admin/replicas/wake")
        assert woken.json()["replicas"][0]["status"] == "ready"
        assert json.loads((await waiting).content)["choices"][0]["message"]["content"] == REPLIES[0]
        unknown = await client.post("/admin/replicas/wake", json={"replica": "r1"})
        assert unknown.status_code == 404


def test_sleep_by_hand_is_in_the_audit_log(tmp_path: Path) -> None:
    store = open_migrated_store(f"{SQLITE}{tmp_path}/argosy.db")
    for level, action in ((2, "replica.sleep"), (0, "replica.wake")):
        store.replica_settings.record_sleep("m0", "r0", level, "night", "key:1")
        entry = store.audit_log.list_entries(limit=1)[0]
        assert (entry.action, entry.actor, entry.subject) == (action, "key:1", "m0/r0")
        assert entry.details == {"model": "m0", "level": level, "reason": "night"}
    store.close()
