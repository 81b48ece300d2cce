"""Parsed output through the gateway: equal to the replica's own response, also after a failover at any token."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.integration.test_parsed_output import CASES, text_processing
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import GatewayHarness, RecordingFilter, run_gateway
from tests.support.replica_servers import MODEL, RunningReplica, serve

from argosy.deployment import ReplicaConfig
from argosy.engine import EngineRequest

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Weather?"}]
NUM_CUTS = 6
"""Positions at which a stream is cut in each case, spread over its tokens."""


class Fleet:
    """Two replicas with the same scripted output. The next request may lose its first replica."""

    output = ""
    crash_after: int | None = None
    gateway: GatewayHarness
    replica: RunningReplica
    recorder: RecordingFilter

    def script(self, request: EngineRequest) -> Script:
        tokenizer = text_processing().tokenizer
        end = tokenizer.eos_token_ids[0]
        tokens = [*tokenizer.encode(self.output, add_special_tokens=False), end]
        crash_after, self.crash_after = self.crash_after, None
        if crash_after is not None and not request.resumed_tokens:
            return Script(tokens[:crash_after], crash=RuntimeError("gone"))
        return Script(tokens, stop_token=end)

    async def send(self, client: Any, model: str, **body: Any) -> str:  # noqa: ANN401 - HTTP client
        response = await client.post(CHAT, json={"model": model, "messages": MESSAGES, **body})
        assert response.status_code == 200, response.text
        return normalize(response.text)

    async def proxied(self, **body: Any) -> str:  # noqa: ANN401 - any JSON
        return await self.send(self.gateway.client, "big", **body)


@contextlib.asynccontextmanager
async def run_fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    fleet.recorder = RecordingFilter()
    engines = [
        FakeEngine(text_processing().tokenizer, fleet.script, max_model_len=2048) for _ in range(2)
    ]
    async with (
        serve(engines[0], load_text=text_processing) as fleet.replica,
        serve(engines[1], load_text=text_processing) as other,
        run_gateway(
            [fleet.recorder],
            *(ReplicaConfig(url=one.url, model=MODEL) for one in (fleet.replica, other)),
        ) as fleet.gateway,
    ):
        yield fleet


def normalize(text: str) -> str:
    """Replace ids, times and cache counts, which differ between requests, and sort events by choice."""
    events = text.split("\n\n")
    events.sort(key=lambda event: '"choices":[{"index":1' in event and "data: " in event)
    text = "\n\n".join(events)
    text = re.sub(r'"(chatcmpl-|call_)[0-9a-f]*"', r'"\1"', text)
    text = re.sub(r'"model":"[^"]*"', '"model":""', text)
    return re.sub(r'"(created|cached_tokens)":\d+', "", text)


@pytest.mark.parametrize("name", CASES)
async def test_whole_response_equals_replica_response(name: str) -> None:
    output, body = CASES[name]
    async with run_fleet() as fleet:
        fleet.output = output
        direct = await fleet.send(fleet.replica.client, MODEL, seed=1, **body)
        assert await fleet.proxied(seed=1, **body) == direct
        (context,) = fleet.recorder.completed
        assert f'"completion_tokens":{context.delivered.output_tokens},' in direct


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stream", [True, False])
async def test_replica_lost_at_any_token_changes_nothing(name: str, *, stream: bool) -> None:
    output, body = CASES[name]
    if stream:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with run_fleet() as fleet:
        fleet.output = output
        undisturbed = await fleet.proxied(**body)
        (context,) = fleet.recorder.completed
        num_tokens = context.delivered.output_tokens // context.fields.choice_count
        for cut in sorted({num_tokens * part // NUM_CUTS for part in range(NUM_CUTS)}):
            fleet.crash_after = cut
            assert await fleet.proxied(**body) == undisturbed
            assert fleet.crash_after is None
    counts = {context.delivered.output_tokens for context in fleet.recorder.completed}
    assert len(counts) == 1
