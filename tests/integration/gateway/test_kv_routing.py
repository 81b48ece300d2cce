"""Routing by KV events of two real replicas: evicted, lost and externally computed blocks are known immediately."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tests.support.gateway_harness import GatewayHarness, RecordingFilter, run_gateway
from tests.support.placed_requests import RoutedRequest, last_decision
from tests.support.replica_servers import (
    MODEL,
    RunningReplica,
    bundled_model_engine,
    completion,
    serve,
)
from tests.support.waiting import until

from argosy.deployment import ReplicaConfig
from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.policy import BLOCK_BYTES, EventPrefixIndex

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKS = 96


@pytest.fixture(name="story")
def make_story(request: pytest.FixtureRequest) -> str:
    """A prompt that no other test sends. Its JSON is a whole number of text blocks."""
    text = f"{request.node.name}: " + "Once upon a time there was a king who had a daughter. " * 30
    return text[: 5 * BLOCK_BYTES - 2]


class ReplicaPair:
    """Two replicas of the bundled model behind a gateway with round-robin routing."""

    def __init__(
        self,
        engines: list[EngineClient],
        servers: list[RunningReplica],
        gateway: GatewayHarness,
        recorder: RecordingFilter,
    ) -> None:
        self.engines = engines
        self.servers = servers
        self.gateway = gateway
        self._recorder = recorder

    async def send(self, prompt: str, **extra: str) -> RoutedRequest:
        """Send a prompt through the gateway and return the routing decision."""
        body = completion(prompt, model="big", max_tokens=1, **extra)
        response = await self.gateway.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return last_decision(self._recorder.completed[-1])

    async def preview(self, prompt: str) -> dict[str, Any]:
        """Return the preview of a prompt."""
        body = {"request": completion(prompt, model="big", max_tokens=1)}
        response = await self.gateway.client.post("/admin/routing/preview", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def uncached_shares(self, prompt: str, **extra: str) -> list[float]:
        """Send a prompt, and return the share of it that each replica would have to compute according to the trace."""
        rates = [replica.load.prefill_tokens_per_s for replica in self.gateway.replicas]
        await self.send(prompt, **extra)
        context = self._recorder.completed[-1]
        trace = self.gateway.traces.find(context.trace.response_id)
        assert trace is not None
        candidates = {
            candidate["replica"]: candidate
            for candidate in trace.to_dict()["attempts"][0]["candidates"]
        }
        seconds = [candidates[replica.name]["prefill_s"] for replica in self.gateway.replicas]
        return [
            round(seconds_needed * rate / context.fields.estimated_prompt_tokens, 2)
            for seconds_needed, rate in zip(seconds, rates, strict=True)
        ]

    async def send_directly(self, number: int, prompt: str) -> None:
        """Send a prompt to one replica directly."""
        body = completion(prompt, max_tokens=1)
        response = await self.servers[number].client.post("/v1/completions", json=body)
        assert response.status_code == 200

    async def wait_until_synced(self) -> None:
        """Wait until the gateway knows the blocks of all replicas."""
        for engine, replica in zip(self.engines, self.gateway.replicas, strict=True):

            def is_synced(
                engine: EngineClient = engine, replica: ReplicaEndpoint = replica
            ) -> bool:
                index = replica.prefix_index
                return (
                    isinstance(index, EventPrefixIndex)
                    and index.blocks == engine.kv_cache_view.block_names
                )

            await until(is_synced)


@pytest_asyncio.fixture(name="pair", scope="module", loop_scope="module")
async def make_pair() -> AsyncIterator[ReplicaPair]:
    engines = [bundled_model_engine(BLOCKS) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serve(engine)) for engine in engines]
        recorder = RecordingFilter()
        replica_configs = [
            ReplicaConfig(url=server.url, model=MODEL, kind="argosy") for server in served
        ]
        gateway = await stack.enter_async_context(run_gateway([recorder], *replica_configs))
        pair = ReplicaPair(engines, served, gateway, recorder)
        await pair.wait_until_synced()
        yield pair


async def test_evicted_blocks_are_known(pair: ReplicaPair, story: str) -> None:
    first = await pair.send(story)
    warm = pair.gateway.replicas.index(first.replica)
    await pair.wait_until_synced()
    shares = await pair.uncached_shares(story)
    assert shares[warm] == 0.0
    assert shares[1 - warm] == 1.0
    for number in range(6):
        await pair.send_directly(warm, f"{number}: " + "Something else was told. " * 60)
    await pair.wait_until_synced()
    shares = await pair.uncached_shares(story)
    assert shares[warm] == 1.0


async def test_part_of_a_prompt_computed_for_other_clients_is_known(
    pair: ReplicaPair, story: str
) -> None:
    first = await pair.send(story)
    other = 1 - pair.gateway.replicas.index(first.replica)
    await pair.send_directly(other, story[: len(story) // 2])
    await pair.wait_until_synced()
    assert 0.4 < (await pair.uncached_shares(story))[other] < 0.8


async def test_restarted_engine_core_has_empty_cache(pair: ReplicaPair, story: str) -> None:
    first = await pair.send(story)
    warm = pair.gateway.replicas.index(first.replica)
    await pair.wait_until_synced()
    engine = pair.engines[warm]
    assert engine.core_pid is not None
    os.kill(engine.core_pid, signal.SIGKILL)
    await until(lambda: engine.restarts_total == 1 and engine.state == "ready")
    await pair.wait_until_synced()
    assert (await pair.uncached_shares(story))[warm] == 1.0
    await pair.send(story)
    await pair.wait_until_synced()
    assert await pair.uncached_shares(story) == [0.0, 0.0]


async def test_salted_prompts_match_only_their_salt(pair: ReplicaPair, story: str) -> None:
    for _ in range(2):
        await pair.send(story)
    await pair.wait_until_synced()
    assert await pair.uncached_shares(story, cache_salt="mine") == [1.0, 1.0]
    await pair.wait_until_synced()
    assert sorted(await pair.uncached_shares(story, cache_salt="mine"))[1] == 1.0
    assert await pair.uncached_shares(story) == [0.0, 0.0]


async def test_preview_is_what_the_request_then_gets(pair: ReplicaPair, story: str) -> None:
    prompts = (f"{story[:-1]}!", story, "Hi.", f"{story[:-1]}!", story, story)
    for prompt in prompts:
        await pair.wait_until_synced()
        previews = [await pair.preview(prompt) for _ in range(3)]
        assert previews[0]["outcome"] == "placed"
        decision = await pair.send(prompt)
        for preview in previews:
            assert preview["replica"] == decision.replica.name
            uncached = {each["replica"]: each["uncached_tokens"] for each in preview["candidates"]}
            assert uncached[decision.replica.name] == decision.uncached_tokens
    assert previews[0]["candidates"][0]["cached_tokens"] > 0


async def test_prefix_map_shows_shared_prefixes_and_who_has_them(
    pair: ReplicaPair, story: str
) -> None:
    first = await pair.send(story)
    await pair.send(story[: 3 * BLOCK_BYTES] + "?" * 2 * BLOCK_BYTES)
    await pair.wait_until_synced()
    response = await pair.gateway.client.get("/admin/routing/prefixes", params={"model": "big"})
    assert response.status_code == 200, response.text
    (found,) = response.json()["data"]
    (shared,) = [
        each for each in found["prefixes"] if (each["parent"], each["tokens"]) == (None, 192)
    ]
    ends = [each for each in found["prefixes"] if each["parent"] == shared["id"]]
    assert (shared["start_tokens"], shared["requests"]) == (0, 2)
    assert first.block_keys[2].hex()[:12] not in response.text
    assert shared["holders"] == 2
    assert [(end["parent"], end["tokens"], end["holders"]) for end in ends] == [
        (shared["id"], 128, 1)
    ] * 2
    assert {name for end in ends for name in end["cached_tokens"]} == {
        replica.name for replica in pair.gateway.replicas
    }
    assert any(first.replica.name in end["cached_tokens"] for end in ends)
    assert {each["source"] for each in found["replicas"]} == {"events"}
    assert story[:20] not in response.text
