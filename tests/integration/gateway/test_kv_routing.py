"""A gateway knows what is evicted, lost or computed for others on two real replicas, as soon as it happens."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.support.gateway_harness import Running, Watching, front
from tests.support.replica_servers import MODEL, Served, completion, real_engine, serve
from tests.support.waiting import until

from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.gateway import ReplicaConfig
from argosy.gateway.pool.pool import RoutingDecision
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.policy import BLOCK_BYTES, EstimatedPrefixIndex, EventPrefixIndex

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKS = 96


@pytest.fixture(name="story")
def a_story(request: pytest.FixtureRequest) -> str:
    """A prompt that no other test has; as JSON it is a whole number of blocks of text."""
    text = f"{request.node.name}: " + "Once upon a time there was a king who had a daughter. " * 30
    return text[: 5 * BLOCK_BYTES - 2]


class Pair:
    """Two replicas of the bundled model and a gateway that takes turns with them."""

    def __init__(
        self, engines: list[EngineClient], servers: list[Served], running: Running, watch: Watching
    ) -> None:
        self.engines = engines
        self.servers = servers
        self.running = running
        self._watch = watch

    async def ask(self, prompt: str, **extra: str) -> RoutingDecision:
        """Ask through the gateway; how that was routed."""
        body = completion(prompt, model="big", max_tokens=1, **extra)
        answer = await self.running.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        picked = self._watch.left[-1].decision
        assert picked is not None
        return picked

    async def uncached(self, prompt: str, **extra: str) -> list[float]:
        """The part of the prompt that each replica would have to compute, as the explanation has it; it is asked."""
        rates = [replica.load.prefill_tokens_per_s for replica in self.running.replicas]
        await self.ask(prompt, **extra)
        context = self._watch.left[-1]
        told = self.running.traces.find(context.trace.response_id)
        assert told is not None
        candidates = {one["replica"]: one for one in told.to_dict()["attempts"][0]["candidates"]}
        seconds = [candidates[replica.name]["prefill_s"] for replica in self.running.replicas]
        return [
            round(s * rate / context.fields.estimated_prompt_tokens, 2)
            for s, rate in zip(seconds, rates, strict=True)
        ]

    async def elsewhere(self, number: int, prompt: str) -> None:
        """Ask one replica without the gateway."""
        body = completion(prompt, max_tokens=1)
        answer = await self.servers[number].client.post("/v1/completions", json=body)
        assert answer.status_code == 200

    async def told(self) -> None:
        """Wait until the gateway knows what the replicas hold."""
        for engine, replica in zip(self.engines, self.running.replicas, strict=True):

            def same(engine: EngineClient = engine, replica: ReplicaEndpoint = replica) -> bool:
                index = replica.prefix_index
                return (
                    isinstance(index, EventPrefixIndex)
                    and index.blocks == engine.kv_cache_view.block_names
                )

            await until(same)


@pytest_asyncio.fixture(name="pair", scope="module", loop_scope="module")
async def a_pair() -> AsyncIterator[Pair]:
    engines = [real_engine(BLOCKS) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serve(engine)) for engine in engines]
        watch = Watching()
        behind = [ReplicaConfig(url=one.url, model=MODEL, kind="argosy") for one in served]
        running = await stack.enter_async_context(front([watch], *behind))
        pair = Pair(engines, served, running, watch)
        await pair.told()
        yield pair


async def test_what_was_evicted_is_known_to_be_gone(pair: Pair, story: str) -> None:
    first = await pair.ask(story)
    warm = pair.running.replicas.index(first.replica)
    believed = EstimatedPrefixIndex()
    believed.on_prompt_sent(first.block_keys)
    await pair.told()
    parts = await pair.uncached(story)
    assert parts[warm] == 0.0
    assert parts[1 - warm] == 1.0
    for number in range(6):
        await pair.elsewhere(warm, f"{number}: " + "Something else was told. " * 60)
    await pair.told()
    parts = await pair.uncached(story)
    assert parts[warm] == 1.0
    assert len(believed.match_prefix(first.block_keys)) == len(
        first.block_keys
    )  # what it would have gone by


async def test_what_came_there_for_others_is_known(pair: Pair, story: str) -> None:
    first = await pair.ask(story)
    other = 1 - pair.running.replicas.index(first.replica)
    await pair.elsewhere(other, story)
    await pair.told()
    assert await pair.uncached(story) == [0.0, 0.0]


async def test_a_part_that_is_left_counts_as_a_part(pair: Pair, story: str) -> None:
    first = await pair.ask(story)
    other = 1 - pair.running.replicas.index(first.replica)
    await pair.elsewhere(other, story[: len(story) // 2])
    await pair.told()
    assert 0.4 < (await pair.uncached(story))[other] < 0.8


async def test_a_core_that_was_started_anew_is_known_to_be_cold(pair: Pair, story: str) -> None:
    first = await pair.ask(story)
    warm = pair.running.replicas.index(first.replica)
    await pair.told()
    engine = pair.engines[warm]
    assert engine.core_pid is not None
    os.kill(engine.core_pid, signal.SIGKILL)
    await until(lambda: engine.restarts_total == 1 and engine.state == "ready")
    await pair.told()
    assert (await pair.uncached(story))[warm] == 1.0
    await pair.ask(story)
    await pair.told()
    assert await pair.uncached(story) == [0.0, 0.0]


async def test_salted_prompts_are_found_by_nobody_else(pair: Pair, story: str) -> None:
    for _ in range(2):
        await pair.ask(story)
    await pair.told()
    assert await pair.uncached(story, cache_salt="mine") == [1.0, 1.0]
    await pair.told()
    assert sorted(await pair.uncached(story, cache_salt="mine"))[1] == 1.0
    assert await pair.uncached(story) == [0.0, 0.0]
