"""Failure of a replica after its last token: the gateway completes the response without another replica."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from tests.support.cutting_proxy import StreamCutter, cutting_proxy
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import GatewayHarness, RecordingFilter, run_gateway
from tests.support.replica_servers import CONFIG, MODEL, completion, events, serve

from argosy.deployment import ReplicaConfig
from argosy.engine.serving.text import Tokenizer

TOKENS = list(range(100, 106))
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: completion("Once"),
}

USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


@dataclass
class MarkCutter(StreamCutter):
    """Cuts the next stream before the marker, and drops everything that follows from the replica."""

    marker: bytes | None = None
    has_cut: bool = False

    def truncate(self, data: bytes) -> bytes | None:
        if self.has_cut:
            return b""
        if self.marker is None or self.marker not in data:
            return None
        self.has_cut = True
        return data[: data.index(self.marker)]


@asynccontextmanager
async def run_behind_cutter(
    tokenizer: Tokenizer, recorder: RecordingFilter
) -> AsyncIterator[tuple[GatewayHarness, MarkCutter]]:
    """Run a gateway in front of one replica, with a cutter in between."""
    engine, cutter = (
        FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length")),
        MarkCutter(),
    )
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())  # pytest's own may be too long
        config = msgspec.structs.replace(CONFIG, uds=str(Path(folder) / "replica.sock"))
        await stack.enter_async_context(serve(engine, config))
        assert config.uds is not None
        url = await stack.enter_async_context(cutting_proxy(Path(config.uds), cutter))
        gateway = await stack.enter_async_context(
            run_gateway([recorder], ReplicaConfig(url=url, model=MODEL))
        )
        yield gateway, cutter


def chunks_without_ids(content: bytes) -> list[dict[str, Any]]:
    chunks: list[dict[str, Any]] = [json.loads(data) for data in events(content)[:-1]]
    assert len({(chunk.pop("id"), chunk.pop("created")) for chunk in chunks}) == 1
    return chunks


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
@pytest.mark.parametrize(
    ("options", "marker"),
    [
        ({}, b"data: [DONE]"),
        (USAGE, b"data: [DONE]"),
        (USAGE, b'"choices":[]'),
        (USAGE | {"n": 2}, b'"choices":[]'),
    ],
    ids=["done", "done-after-usage", "usage", "usage-of-two-choices"],
)
async def test_stream_is_complete_if_replica_fails_before_its_end(
    tokenizer: Tokenizer, path: str, options: dict[str, Any], marker: bytes
) -> None:
    recorder = RecordingFilter()
    body = BODIES[path] | options | {"model": "big", "max_tokens": 6, "stream": True}
    async with run_behind_cutter(tokenizer, recorder) as (gateway, cutter):
        complete = await gateway.client.post(path, json=body)
        cutter.marker = marker
        cut_response = await gateway.client.post(path, json=body)
        assert cutter.has_cut
        assert chunks_without_ids(cut_response.content) == chunks_without_ids(complete.content)
        assert events(cut_response.content)[-1] == b"[DONE]"
    assert [context.status for context in recorder.completed] == ["completed"] * 2


async def test_whole_response_is_complete_if_replica_fails_before_its_end(
    tokenizer: Tokenizer,
) -> None:
    recorder = RecordingFilter()
    body = BODIES[CHATS] | {"model": "big", "max_tokens": 6}
    async with run_behind_cutter(tokenizer, recorder) as (gateway, cutter):
        complete = await gateway.client.post(CHATS, json=body)
        cutter.marker = b"data: [DONE]"
        cut_response = await gateway.client.post(CHATS, json=body)
        assert cutter.has_cut
        for name in ("choices", "usage"):
            assert cut_response.json()[name] == complete.json()[name]
