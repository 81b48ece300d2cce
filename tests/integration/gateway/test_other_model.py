"""Replicas with different models or arithmetics under one name never resume each other's responses."""

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
from structlog.testing import capture_logs
from tests.support.cutting_proxy import StreamCutter, cutting_proxy
from tests.support.fake_engine import FakeEngine, Script, arithmetic
from tests.support.gateway_harness import GatewayHarness, RecordingFilter, run_gateway
from tests.support.replica_servers import CONFIG, MODEL, events, serve

from argosy.deployment import ReplicaConfig
from argosy.engine import EngineRequest
from argosy.engine.serving.text import Tokenizer
from argosy.gateway.proxy.upstream_headers import parse_arithmetic_id

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


def script(tokens: list[int], pause_after: int | None, request: EngineRequest) -> Script:
    del request
    return Script(list(tokens), finish="length", pause_after=pause_after)


@asynccontextmanager
async def run_pool(
    tokenizer: Tokenizer, *digests: str, hedge_after_s: float | None = None
) -> AsyncIterator[tuple[GatewayHarness, RecordingFilter]]:
    """Run replicas whose arithmetics are quantized in these formats.

    The first replica fails during its first response. With `hedge_after_s` it never responds.
    """
    recorder, cutter = RecordingFilter(), MarkCutter()
    async with AsyncExitStack() as stack:
        replica_configs = []
        for number, digest in enumerate(digests):
            tokens = OLD if digest == digests[0] else NEW
            engine = FakeEngine(
                tokenizer,
                partial(script, tokens, None if number or hedge_after_s is None else 0),
                arithmetic=arithmetic(quantization=digest) if digest else None,
            )
            folder = stack.enter_context(TemporaryDirectory())
            socket = Path(folder) / "replica.sock"
            config = msgspec.structs.replace(CONFIG, uds=str(socket))
            await stack.enter_async_context(serve(engine, config))
            url = await stack.enter_async_context(
                cutting_proxy(socket, cutter if not number else StreamCutter())
            )
            replica_configs.append(ReplicaConfig(url=url, model=MODEL, name=f"r{number}"))
        yield (
            await stack.enter_async_context(
                run_gateway([recorder], *replica_configs, hedge_after_s=hedge_after_s)
            ),
            recorder,
        )


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


@pytest.mark.parametrize(
    ("header", "expected"), [(b"0" * 32, "0" * 32), (b"no digest", ""), (b"0" * 65, ""), (b"", "")]
)
def test_invalid_arithmetic_id_of_replica_counts_as_none(header: bytes, expected: str) -> None:
    """A replica that received an invalid id would refuse to resume, or reject every request."""
    assert parse_arithmetic_id({b"x-argosy-arithmetic-id": header}) == expected


async def test_mixed_pool_is_logged_and_counted(tokenizer: Tokenizer) -> None:
    with capture_logs() as logs:
        async with run_pool(tokenizer, "aa", "bb", "aa") as (gateway, _):
            groups = gateway.models.pools[0].group_by_arithmetic()
    assert sorted([replica.name for replica in group] for group in groups.values()) == [
        ["r0", "r2"],
        ["r1"],
    ]
    (warning,) = [each for each in logs if each["event"] == "pool_arithmetic_mixed"]
    assert warning["differs"] == {"quantization": ["aa", "bb"]}


async def test_hedge_goes_to_replica_with_same_arithmetic(tokenizer: Tokenizer) -> None:
    """Otherwise the output would depend on which replica is faster."""
    async with run_pool(tokenizer, "aa", "bb", "aa", hedge_after_s=0.001) as (gateway, recorder):
        response = await gateway.client.post(CHAT, json=BODY | {"stream": True})
    assert token_ids(response.content) == OLD
    attempts = recorder.completed[0].trace.attempts
    assert [(each.replica, each.is_hedge) for each in attempts] == [("r0", False), ("r2", True)]
