"""Replicas that serve different models under one name never resume each other's responses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from tests.support.cutting_proxy import StreamCutter, cutting_proxy
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import GatewayHarness, RecordingFilter, run_gateway
from tests.support.replica_servers import CONFIG, MODEL, events, serve

from argosy.engine.serving.core_messages import EngineRequest
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import ReplicaConfig

CHAT = "/v1/chat/completions"
OLD, NEW = list(range(100, 106)), list(range(200, 206))
BODY: dict[str, Any] = {
    "model": "big",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 6,
    "return_token_ids": True,
}


@dataclass
class MarkCutter(StreamCutter):
    """Cuts the first stream before the marker, and drops everything that follows from that replica."""

    marker: bytes = b": argosy 0 103"
    has_cut: bool = False

    def truncate(self, data: bytes) -> bytes | None:
        if self.has_cut:
            return b""
        self.has_cut = self.marker in data
        return data[: data.index(self.marker)] if self.has_cut else None


def script(tokens: list[int], request: EngineRequest) -> Script:
    del request
    return Script(list(tokens), finish="length")


@asynccontextmanager
async def run_pool(
    tokenizer: Tokenizer, *digests: str
) -> AsyncIterator[tuple[GatewayHarness, RecordingFilter]]:
    """Run replicas whose models have these digests. The first replica fails during its first response."""
    recorder, cutter = RecordingFilter(), MarkCutter()
    async with AsyncExitStack() as stack:
        replica_configs = []
        for number, digest in enumerate(digests):
            tokens = OLD if digest == digests[0] else NEW
            engine = FakeEngine(tokenizer, partial(script, tokens), digest=digest)
            folder = stack.enter_context(TemporaryDirectory())
            socket = Path(folder) / "replica.sock"
            config = msgspec.structs.replace(CONFIG, uds=str(socket))
            await stack.enter_async_context(serve(engine, config))
            url = await stack.enter_async_context(
                cutting_proxy(socket, cutter if not number else StreamCutter())
            )
            replica_configs.append(ReplicaConfig(url=url, model=MODEL, name=f"r{number}"))
        yield await stack.enter_async_context(run_gateway([recorder], *replica_configs)), recorder


def token_ids(content: bytes) -> list[int]:
    chunks = [json.loads(data) for data in events(content) if b'"choices"' in data]
    return [
        token_id
        for chunk in chunks
        for choice in chunk["choices"]
        for token_id in choice.get("token_ids", ())
    ]


async def test_replica_with_other_model_does_not_resume_stream(tokenizer: Tokenizer) -> None:
    async with run_pool(tokenizer, "aa", "bb") as (gateway, recorder):
        cut_response = await gateway.client.post(CHAT, json=BODY | {"stream": True})
        *_, last = events(cut_response.content)
        assert json.loads(last)["error"]["code"] == "upstream_failed"
        assert token_ids(cut_response.content) == OLD[:3]
        assert [context.status for context in recorder.completed] == ["failed"]
        complete = await gateway.client.post(CHAT, json=BODY | {"stream": True})
        assert token_ids(complete.content) == NEW


@pytest.mark.parametrize("digests", [("aa", "aa"), ("aa", "bb", "aa"), ("", "")])
async def test_replica_with_same_model_resumes_stream(
    tokenizer: Tokenizer, digests: tuple[str, ...]
) -> None:
    async with run_pool(tokenizer, *digests) as (gateway, recorder):
        cut_response = await gateway.client.post(CHAT, json=BODY | {"stream": True})
        assert token_ids(cut_response.content) == OLD
        assert events(cut_response.content)[-1] == b"[DONE]"
        assert [context.status for context in recorder.completed] == ["completed"]


async def test_whole_response_restarts_on_replica_with_other_model(tokenizer: Tokenizer) -> None:
    async with run_pool(tokenizer, "aa", "bb") as (gateway, recorder):
        cut_response = (await gateway.client.post(CHAT, json=BODY)).json()
        complete = (await gateway.client.post(CHAT, json=BODY)).json()
        assert cut_response["choices"] == complete["choices"]
        assert cut_response["choices"][0]["token_ids"] == NEW
        assert cut_response["usage"] == complete["usage"]
        assert [context.status for context in recorder.completed] == ["completed"] * 2
        assert recorder.completed[0].delivered.output_tokens == len(NEW)


async def test_invalid_digest_is_not_sent_to_other_replicas(tokenizer: Tokenizer) -> None:
    """A replica that received the invalid digest would refuse to resume, or reject every request."""
    async with run_pool(tokenizer, "no digest", "none either") as (gateway, _):
        cut_response = await gateway.client.post(CHAT, json=BODY | {"stream": True})
        assert token_ids(cut_response.content) == OLD[:3] + NEW[3:]
