"""Long streams that hold every slot pause for others, and lose no token and no cent by it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_engine import MAX_SEQS, FakeEngine, Script, arithmetic
from tests.support.gateway_harness import RecordingFilter, run_gateway
from tests.support.metered_gateway import (
    CHATS,
    COMPLETIONS,
    PRICE,
    MeteredGateway,
    run_gateway_before,
)
from tests.support.replica_servers import MODEL, bundled_model_engine, events, serve
from tests.support.waiting import until

from argosy.deployment import GivingWayConfig, ReplicaConfig
from argosy.engine import EngineRequest
from argosy.engine.serving.text import Tokenizer
from argosy.telemetry import CoreStats

TOKENS = list(range(100, 140))
BEGUN = 5
"""Tokens after which a long stream waits for the test."""
SHORT = 3
SLOTS = 2
NUM_LONG, NUM_SHORT = 8, 6
IMPATIENT = GivingWayConfig(standard_after_s=0.05, min_slice_s=0.05, max_paused_share=1.0)
BODY: dict[str, Any] = {
    "model": "big",
    "messages": [{"role": "user", "content": "Hi"}],
    "return_token_ids": True,
    "stream": True,
}


def pause_long_streams(request: EngineRequest) -> Script:
    is_long = request.params.max_tokens == len(TOKENS)
    return Script(list(TOKENS), finish="length", pause_after=BEGUN if is_long else None)


async def read_tokens(gateway: MeteredGateway, max_tokens: int, priority: int) -> list[int]:
    """Return the token ids of a complete stream."""
    body = BODY | {"max_tokens": max_tokens, "priority": priority}
    response = await gateway.running.client.post(CHATS, json=body)
    assert response.status_code == 200, response.text
    *chunks, last = events(response.content)
    assert last == b"[DONE]", last
    return [
        token_id
        for chunk in map(json.loads, chunks)
        for choice in chunk["choices"]
        for token_id in choice.get("token_ids", ())
    ]


@pytest.mark.parametrize("is_replica_lost", [False, True])
async def test_long_streams_of_a_lower_tier_give_way_and_complete(
    tokenizer: Tokenizer, tmp_path: Path, *, is_replica_lost: bool
) -> None:
    engines = [FakeEngine(tokenizer, pause_long_streams, arithmetic=arithmetic()) for _ in range(2)]
    async with contextlib.AsyncExitStack() as other, contextlib.AsyncExitStack() as stack:
        running = [
            await each.enter_async_context(serve(engine))
            for each, engine in zip((stack, other), engines, strict=True)
        ]
        configs = [ReplicaConfig(url=each.url, model=MODEL, max_requests=SLOTS) for each in running]
        gateway = await other.enter_async_context(
            run_gateway_before(tmp_path, *configs, giving_way=IMPATIENT)
        )
        long = [
            asyncio.create_task(read_tokens(gateway, len(TOKENS), priority=1))
            for _ in range(NUM_LONG)
        ]
        await until(lambda: all(engine.paused.is_set() for engine in engines))
        short = await asyncio.gather(
            *(read_tokens(gateway, SHORT, priority=0) for _ in range(NUM_SHORT))
        )
        assert short == [TOKENS[:SHORT]] * NUM_SHORT
        assert not any(each.done() for each in long)
        if is_replica_lost:
            await stack.aclose()
        for engine in engines:
            engine.may_continue.set()
        assert await asyncio.gather(*long) == [TOKENS] * NUM_LONG
        assert await gateway.metric_sum("pauses_total") >= 1
        records = gateway.usage_records()
        explanations = [gateway.trace_dict(record) for record in records]
    outputs = sorted(record.output_tokens for record in records)
    assert outputs == [SHORT] * NUM_SHORT + [len(TOKENS)] * NUM_LONG
    for record in records:
        uncached = record.input_tokens - record.cached_tokens
        assert record.nano_dollars == (
            uncached * PRICE.input
            + record.cached_tokens * PRICE.cached_input
            + record.output_tokens * PRICE.output
        )
    assert len({record.input_tokens for record in records}) == 1
    pauses = [pause for each in explanations for pause in each.get("pauses", ())]
    assert pauses
    assert all(pause["paused_ms"] <= pause["resumed_ms"] for pause in pauses)


@pytest.mark.parametrize("kind", ["off", "stream", "unanswered"])
async def test_one_slot_goes_to_another_tenant_unless_switched_off(
    tokenizer: Tokenizer, tmp_path: Path, kind: str
) -> None:
    begun = 0 if kind == "unanswered" else BEGUN

    def pause_long(request: EngineRequest) -> Script:
        is_long = request.params.max_tokens == len(TOKENS)
        return Script(list(TOKENS), finish="length", pause_after=begun if is_long else None)

    engine = FakeEngine(tokenizer, pause_long, arithmetic=arithmetic())
    is_enabled = kind != "off"
    settings = GivingWayConfig(enabled=is_enabled, standard_after_s=0.05, min_slice_s=0.05)
    async with (
        serve(engine) as running,
        run_gateway_before(
            tmp_path,
            ReplicaConfig(url=running.url, model=MODEL, max_requests=1),
            giving_way=settings,
        ) as gateway,
    ):
        long = asyncio.create_task(read_tokens(gateway, len(TOKENS), priority=1))
        await engine.paused.wait()
        if kind == "unanswered":
            engine.stats = CoreStats(waiting=1)
            await gateway.running.probe()
        short = asyncio.create_task(read_tokens(gateway, SHORT, priority=0))
        if is_enabled:  # one slot for two tenants: the long stream is more than its share
            await short
        else:
            await gateway.running.wait_for_queued(1)
        engine.may_continue.set()
        assert [*await asyncio.gather(long, short)] == [TOKENS, TOKENS[:SHORT]]
        assert await gateway.metric_sum("pauses_total") == is_enabled


async def test_requests_of_one_tenant_leave_slots_and_cache_to_others() -> None:
    """Many choices, more than the queue of the replica holds, and more tokens than its KV cache holds."""
    engine = bundled_model_engine(blocks=160, max_seqs=MAX_SEQS)
    async with (
        serve(engine) as replica,
        run_gateway(
            [RecordingFilter(is_session_tenant=True)],
            ReplicaConfig(url=replica.url, model=MODEL),
            giving_way=IMPATIENT,
        ) as gateway,
    ):

        async def send(tenant: str, **fields: Any) -> int:  # noqa: ANN401 - fields of a request
            body = {"model": "big", "prompt": "Once upon a time", "session_id": tenant} | fields
            return (await gateway.client.post(COMPLETIONS, json=body)).status_code

        for count, choices, max_tokens in ((1, 64, 200), (8, 64, 200), (40, 1, 2400)):
            fields = {"n": choices, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
            flood = [asyncio.create_task(send("flood", **fields)) for _ in range(count)]
            await until(lambda: engine.stats.waiting >= 0.75 * MAX_SEQS)
            if choices > 1:
                await until(lambda: engine.stats.running == MAX_SEQS)
            await gateway.probe()
            calm = await asyncio.gather(*(send("calm", max_tokens=1) for _ in range(8)))
            assert calm == [200] * 8
            assert not all(each.done() for each in flood), "the flood goes on"
            for each in flood:
                each.cancel()
            await asyncio.wait(flood)
            await gateway.wait_until_idle()
            await until(lambda: not engine.in_flight)
