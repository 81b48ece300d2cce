"""Replicas that have other models under one name: none goes on with what another one began."""

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
from tests.support.cutting_proxy import Knife, proxied
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import Running, Watching, front
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
class Once(Knife):
    """Cuts the first stream that has the mark, before it; nothing comes of its server any more."""

    mark: bytes = b": argosy 0 103"
    gone: bool = False

    def cut(self, data: bytes) -> bytes | None:
        if self.gone:
            return b""
        self.gone = self.mark in data
        return data[: data.index(self.mark)] if self.gone else None


def script(tokens: list[int], request: EngineRequest) -> Script:
    del request
    return Script(list(tokens), finish="length")


@asynccontextmanager
async def pool(tokenizer: Tokenizer, *digests: str) -> AsyncIterator[tuple[Running, Watching]]:
    """Replicas of models with these digests, asked in this order; the first one dies in its first answer."""
    watching, knife = Watching(), Once()
    async with AsyncExitStack() as stack:
        behind = []
        for number, digest in enumerate(digests):
            tokens = OLD if digest == digests[0] else NEW
            engine = FakeEngine(tokenizer, partial(script, tokens), digest=digest)
            folder = stack.enter_context(TemporaryDirectory())
            socket = Path(folder) / "replica.sock"
            config = msgspec.structs.replace(CONFIG, uds=str(socket))
            await stack.enter_async_context(serve(engine, config))
            url = await stack.enter_async_context(proxied(socket, knife if not number else Knife()))
            behind.append(ReplicaConfig(url=url, model=MODEL, name=f"r{number}"))
        yield await stack.enter_async_context(front([watching], *behind)), watching


def told_ids(content: bytes) -> list[int]:
    chunks = [json.loads(told) for told in events(content) if b'"choices"' in told]
    return [
        id_ for chunk in chunks for each in chunk["choices"] for id_ in each.get("token_ids", ())
    ]


async def test_another_model_of_the_name_does_not_go_on_with_a_stream(tokenizer: Tokenizer) -> None:
    async with pool(tokenizer, "aa", "bb") as (running, watching):
        hurt = await running.client.post(CHAT, json=BODY | {"stream": True})
        *_, last = events(hurt.content)
        assert json.loads(last)["error"]["code"] == "upstream_failed"
        assert told_ids(hurt.content) == OLD[:3]
        assert [context.status for context in watching.left] == ["failed"]
        calm = await running.client.post(CHAT, json=BODY | {"stream": True})
        assert told_ids(calm.content) == NEW


@pytest.mark.parametrize("digests", [("aa", "aa"), ("aa", "bb", "aa"), ("", "")])
async def test_one_that_has_the_same_goes_on(
    tokenizer: Tokenizer, digests: tuple[str, ...]
) -> None:
    async with pool(tokenizer, *digests) as (running, watching):
        hurt = await running.client.post(CHAT, json=BODY | {"stream": True})
        assert told_ids(hurt.content) == OLD
        assert events(hurt.content)[-1] == b"[DONE]"
        assert [context.status for context in watching.left] == ["completed"]


async def test_a_whole_answer_is_begun_anew_there(tokenizer: Tokenizer) -> None:
    async with pool(tokenizer, "aa", "bb") as (running, watching):
        hurt = (await running.client.post(CHAT, json=BODY)).json()
        calm = (await running.client.post(CHAT, json=BODY)).json()
        assert hurt["choices"] == calm["choices"]
        assert hurt["choices"][0]["token_ids"] == NEW
        assert hurt["usage"] == calm["usage"]
        assert [context.status for context in watching.left] == ["completed"] * 2
        assert watching.left[0].delivered.output_tokens == len(NEW)


async def test_a_digest_that_is_none_is_told_to_nobody(tokenizer: Tokenizer) -> None:
    """Who would be told it would refuse to go on, or all that it is asked."""
    async with pool(tokenizer, "no digest", "none either") as (running, _):
        hurt = await running.client.post(CHAT, json=BODY | {"stream": True})
        assert told_ids(hurt.content) == OLD[:3] + NEW[3:]
