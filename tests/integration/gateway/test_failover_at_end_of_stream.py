"""A replica of ours that is lost when all of an answer was told but its end: nobody has to be asked for that."""

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
from tests.support.cutting_proxy import Knife, proxied
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import Running, Watching, front
from tests.support.replica_servers import CONFIG, MODEL, completion, events, serve

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import ReplicaConfig

TOKENS = list(range(100, 106))
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: completion("Once"),
}

USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


@dataclass
class Before(Knife):
    """Cuts the next stream that has these bytes before them, and nothing comes of its server any more."""

    mark: bytes | None = None
    gone: bool = False

    def cut(self, data: bytes) -> bytes | None:
        if self.gone:
            return b""
        if self.mark is None or self.mark not in data:
            return None
        self.gone = True
        return data[: data.index(self.mark)]


@asynccontextmanager
async def behind_a_knife(
    tokenizer: Tokenizer, watching: Watching
) -> AsyncIterator[tuple[Running, Before]]:
    """One replica, and a knife between."""
    engine, knife = FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length")), Before()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())  # pytest's own may be too long
        config = msgspec.structs.replace(CONFIG, uds=str(Path(folder) / "replica.sock"))
        await stack.enter_async_context(serve(engine, config))
        assert config.uds is not None
        url = await stack.enter_async_context(proxied(Path(config.uds), knife))
        running = await stack.enter_async_context(
            front([watching], ReplicaConfig(url=url, model=MODEL))
        )
        yield running, knife


def without_identity(content: bytes) -> list[dict[str, Any]]:
    chunks: list[dict[str, Any]] = [json.loads(told) for told in events(content)[:-1]]
    assert len({(chunk.pop("id"), chunk.pop("created")) for chunk in chunks}) == 1
    return chunks


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
@pytest.mark.parametrize(
    ("asks", "mark"),
    [
        ({}, b"data: [DONE]"),
        (USAGE, b"data: [DONE]"),
        (USAGE, b'"choices":[]'),
        (USAGE | {"n": 2}, b'"choices":[]'),
    ],
    ids=["end", "end after usage", "usage", "usage of two"],
)
async def test_a_stream_is_whole_though_its_replica_is_lost_before_the_end(
    tokenizer: Tokenizer, path: str, asks: dict[str, Any], mark: bytes
) -> None:
    watching = Watching()
    body = BODIES[path] | asks | {"model": "big", "max_tokens": 6, "stream": True}
    async with behind_a_knife(tokenizer, watching) as (running, knife):
        calm = await running.client.post(path, json=body)
        knife.mark = mark
        hurt = await running.client.post(path, json=body)
        assert knife.gone
        assert without_identity(hurt.content) == without_identity(calm.content)
        assert events(hurt.content)[-1] == b"[DONE]"
    assert [context.status for context in watching.left] == ["completed"] * 2


async def test_a_whole_answer_is_too(tokenizer: Tokenizer) -> None:
    watching = Watching()
    body = BODIES[CHATS] | {"model": "big", "max_tokens": 6}
    async with behind_a_knife(tokenizer, watching) as (running, knife):
        calm = await running.client.post(CHATS, json=body)
        knife.mark = b"data: [DONE]"
        hurt = await running.client.post(CHATS, json=body)
        assert knife.gone
        for name in ("choices", "usage"):
            assert hurt.json()[name] == calm.json()[name]
