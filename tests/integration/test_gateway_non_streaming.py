"""Whole answers come through the gateway as a replica would have given them, and survive the replica."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import Watching, front
from tests.support.replica_servers import (
    MODEL,
    Served,
    chat,
    completion,
    events,
    real_engine,
    serve,
)

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import ReplicaConfig

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", chat(seed=3, max_tokens=14, temperature=1.3)),
    "log-probabilities": (
        "/v1/chat/completions",
        chat(seed=5, max_tokens=8, logprobs=True, top_logprobs=2, return_token_ids=True),
    ),
    "two choices": ("/v1/chat/completions", chat(seed=8, max_tokens=6, n=2)),
    "echo": (
        "/v1/completions",
        completion("The cat", max_tokens=8, echo=True, logprobs=1, temperature=0),
    ),
    "two prompts": (
        "/v1/completions",
        completion(["The cat", "Once"], seed=2, max_tokens=5, return_token_ids=True, logprobs=0),
    ),
    "stop string": ("/v1/completions", completion("The cat", seed=9, max_tokens=30, stop=["e"])),
    "only the prompt": (
        "/v1/completions",
        completion("The cat", max_tokens=0, echo=True, logprobs=1),
    ),
    "prompt's log-probabilities": (
        "/v1/completions",
        completion("The cat", max_tokens=2, seed=1, prompt_logprobs=1),
    ),
    "stream options": (
        "/v1/completions",
        completion(
            "The cat",
            seed=9,
            max_tokens=4,
            prompt_logprobs=None,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
    ),
    "no such stream options": ("/v1/completions", completion("A", stream_options={"x": 1})),
    "no such temperature": ("/v1/completions", completion("The cat", temperature=-1)),
}


@pytest_asyncio.fixture
async def real() -> AsyncIterator[Served]:
    async with serve(real_engine()) as served:
        yield served


def anonymous(text: str) -> str:
    """Without what differs from answer to answer."""
    text = re.sub(r'"id":"[^"]*"', '"id":""', text)
    text = re.sub(r'"request_id":"[^"]*"', '"request_id":""', text)
    text = re.sub(r'"cached_tokens":\d+', "", text)
    return re.sub(r'"created":\d+', '"created":0', text)


async def test_whole_answers_are_the_replicas_own_byte_for_byte(real: Served) -> None:
    watching = Watching()
    behind = ReplicaConfig(url=real.url, model=MODEL)
    async with front([watching], behind) as running:
        for kind, (path, body) in BODIES.items():
            own = await real.client.post(path, json=body)
            ours = await running.client.post(path, json=body | {"model": "big"})
            assert ours.status_code == own.status_code, kind
            assert anonymous(ours.text) == anonymous(own.text), kind
            if own.status_code == 200:
                used = own.json()["usage"]
                delivered = watching.left[-1].delivered
                assert delivered.output_tokens == used["completion_tokens"], kind
                assert delivered.prompt_tokens == used["prompt_tokens"], kind


async def test_a_whole_answer_is_carried_on_elsewhere(tokenizer: Tokenizer) -> None:
    tokens = list(range(100, 120))
    broken = FakeEngine(tokenizer, lambda _: Script(tokens[:7], crash=RuntimeError("gone")))
    good = FakeEngine(tokenizer, lambda _: Script(tokens, finish="length"))
    watching = Watching()
    async with (
        serve(broken) as one,
        serve(good) as two,
        front(
            [watching],
            ReplicaConfig(url=one.url, model=MODEL),
            ReplicaConfig(url=two.url, model=MODEL),
        ) as running,
    ):
        body = completion("Once", max_tokens=20, return_token_ids=True) | {"model": "big"}
        for _ in range(2):  # one of them begins at the broken one
            answer = await running.client.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["token_ids"] == tokens
            assert answer.json()["usage"]["completion_tokens"] == 20
        traces = [running.traces.find(context.response_id) for context in watching.left]
    assert max(len(trace.attempts) for trace in traces if trace) == 2
    assert any(request.resumed_tokens == tokens[:7] for request in good.requests)


async def test_a_resumed_stream_is_carried_on_after_what_its_client_had(
    tokenizer: Tokenizer,
) -> None:
    tokens = list(range(100, 120))
    broken = FakeEngine(tokenizer, lambda _: Script(tokens[:9], crash=RuntimeError("gone")))
    good = FakeEngine(tokenizer, lambda _: Script(tokens, finish="length"))
    async with (
        serve(broken) as one,
        serve(good) as two,
        front(
            [],
            ReplicaConfig(url=one.url, model=MODEL),
            ReplicaConfig(url=two.url, model=MODEL),
        ) as running,
    ):
        body = completion("Once", max_tokens=20, stream=True, return_token_ids=True)
        body |= {"model": "big", "resume": {"token_ids": tokens[:4]}}
        for _ in range(2):  # one of them begins at the broken one
            answer = await running.client.post("/v1/completions", json=body)
            *chunks, done = events(answer.content)
            assert done == b"[DONE]"
            told = [json.loads(chunk)["choices"][0]["token_ids"] for chunk in chunks]
            assert [one for ids in told for one in ids] == tokens[4:]
        asked = chat(max_tokens=20, stream=True)
        asked |= {"model": "big", "resume": {"token_ids": tokens[:4]}}
        for _ in range(2):
            answer = await running.client.post("/v1/chat/completions", json=asked)
            deltas = [json.loads(one)["choices"][0]["delta"] for one in events(answer.content)[:-1]]
            assert ["role" in delta for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert any(request.resumed_tokens == tokens[:9] for request in good.requests)
