"""Non-streamed responses equal the replica's own, and survive the failure of a replica."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import RecordingFilter, run_gateway
from tests.support.replica_servers import (
    MODEL,
    RunningReplica,
    bundled_model_engine,
    chat,
    completion,
    events,
    serve,
)

from argosy.deployment import ReplicaConfig
from argosy.engine.serving.text import Tokenizer

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
    "unknown fields": (
        "/v1/completions",
        completion("A", seed=1, stream_options={"x": 1}, future_field=1),
    ),
    "no such constraint": ("/v1/completions", completion("A", guided_new="x")),
    "no possible token": (
        "/v1/completions",
        completion("A", structured_outputs={"choice": ["yes"]}, allowed_token_ids=[50]),
    ),
    "no such temperature": ("/v1/completions", completion("The cat", temperature=-1)),
}


@pytest_asyncio.fixture
async def real_replica() -> AsyncIterator[RunningReplica]:
    async with serve(bundled_model_engine()) as replica_server:
        yield replica_server


def normalize(text: str) -> str:
    """Remove ids, timestamps and cache counts, which differ between responses."""
    text = re.sub(r'"id":"[^"]*"', '"id":""', text)
    text = re.sub(r'"request_id":"[^"]*"', '"request_id":""', text)
    text = re.sub(r'"cached_tokens":\d+', "", text)
    return re.sub(r'"created":\d+', '"created":0', text)


async def test_non_streamed_response_equals_replica_response(real_replica: RunningReplica) -> None:
    recorder = RecordingFilter()
    replica = ReplicaConfig(url=real_replica.url, model=MODEL)
    async with run_gateway([recorder], replica) as running:
        for kind, (path, body) in BODIES.items():
            direct = await real_replica.client.post(path, json=body)
            proxied = await running.client.post(path, json=body | {"model": "big"})
            assert proxied.status_code == direct.status_code, kind
            assert normalize(proxied.text) == normalize(direct.text), kind
            if direct.status_code == 200:
                usage = direct.json()["usage"]
                delivered = recorder.completed[-1].delivered
                assert delivered.output_tokens == usage["completion_tokens"], kind
                assert delivered.prompt_tokens == usage["prompt_tokens"], kind


async def test_non_streamed_response_resumes_on_other_replica(tokenizer: Tokenizer) -> None:
    tokens = list(range(100, 120))
    failing_engine = FakeEngine(tokenizer, lambda _: Script(tokens[:7], crash=RuntimeError("gone")))
    working_engine = FakeEngine(tokenizer, lambda _: Script(tokens, finish="length"))
    recorder = RecordingFilter()
    async with (
        serve(failing_engine) as one,
        serve(working_engine) as two,
        run_gateway(
            [recorder],
            ReplicaConfig(url=one.url, model=MODEL),
            ReplicaConfig(url=two.url, model=MODEL),
        ) as running,
    ):
        body = completion("Once", max_tokens=20, return_token_ids=True) | {"model": "big"}
        for _ in range(2):  # one of the two starts on the failing replica
            response = await running.client.post("/v1/completions", json=body)
            assert response.json()["choices"][0]["token_ids"] == tokens
            assert response.json()["usage"]["completion_tokens"] == 20
        traces = [running.traces.find(context.response_id) for context in recorder.completed]
    assert max(len(trace.attempts) for trace in traces if trace) == 2
    assert any(request.resumed_tokens == tokens[:7] for request in working_engine.requests)


async def test_stream_resumed_by_client_resumes_on_other_replica(
    tokenizer: Tokenizer,
) -> None:
    tokens = list(range(100, 120))
    failing_engine = FakeEngine(tokenizer, lambda _: Script(tokens[:9], crash=RuntimeError("gone")))
    working_engine = FakeEngine(tokenizer, lambda _: Script(tokens, finish="length"))
    async with (
        serve(failing_engine) as one,
        serve(working_engine) as two,
        run_gateway(
            [],
            ReplicaConfig(url=one.url, model=MODEL),
            ReplicaConfig(url=two.url, model=MODEL),
        ) as running,
    ):
        body = completion("Once", max_tokens=20, stream=True, return_token_ids=True)
        body |= {"model": "big", "resume": {"token_ids": tokens[:4]}}
        for _ in range(2):  # one of the two starts on the failing replica
            response = await running.client.post("/v1/completions", json=body)
            *chunks, done = events(response.content)
            assert done == b"[DONE]"
            token_ids = [json.loads(chunk)["choices"][0]["token_ids"] for chunk in chunks]
            assert [token for ids in token_ids for token in ids] == tokens[4:]
        chat_body = chat(max_tokens=20, stream=True)
        chat_body |= {"model": "big", "resume": {"token_ids": tokens[:4]}}
        for _ in range(2):
            response = await running.client.post("/v1/chat/completions", json=chat_body)
            deltas = [
                json.loads(one)["choices"][0]["delta"] for one in events(response.content)[:-1]
            ]
            assert ["role" in delta for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert any(request.resumed_tokens == tokens[:9] for request in working_engine.requests)
