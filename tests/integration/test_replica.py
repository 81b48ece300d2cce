"""Complete replica (HTTP server, engine process, bundled model) through the OpenAI SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from tests.support.replica_servers import (
    MODEL,
    RunningReplica,
    bundled_model_engine,
    chat,
    completion,
    events,
    serve,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real_replica() -> AsyncIterator[RunningReplica]:
    async with serve(bundled_model_engine()) as replica_server:
        yield replica_server


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(real_replica: RunningReplica) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{real_replica.url}/v1", api_key="unused") as client:
        yield client


async def post(real_replica: RunningReplica, path: str, body: object) -> dict[str, Any]:
    response = await real_replica.client.post(path, json=body)
    assert response.status_code == 200, response.text
    parsed: dict[str, Any] = response.json()
    return parsed


async def wait_idle(real_replica: RunningReplica) -> None:
    """Wait until no request runs, and check that every KV block is free."""
    while True:
        load = (await real_replica.client.get("/load")).json()
        if not load["server_load"] + load["running"] + load["waiting"]:
            assert load["kv_blocks_used"] == 0
            return


async def test_stream_equals_non_streamed_response(sdk: openai.AsyncOpenAI) -> None:
    complete = await sdk.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=24
    )
    stream = await sdk.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == complete.choices[0].message.content
    assert text
    assert complete.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == complete.usage.completion_tokens


async def test_resume_after_every_token_equals_whole_output(real_replica: RunningReplica) -> None:
    body = chat(seed=11, max_tokens=12, return_token_ids=True, ignore_eos=True)
    complete = (await post(real_replica, "/v1/chat/completions", body))["choices"][0]
    for cut in range(1, 12):
        resume = {"token_ids": complete["token_ids"][:cut]}
        rest = (await post(real_replica, "/v1/chat/completions", body | {"resume": resume}))[
            "choices"
        ][0]
        assert rest["token_ids"] == complete["token_ids"][cut:], cut
        assert complete["message"]["content"].endswith(rest["message"]["content"])


async def test_echoed_logprobs_equal_generated_logprobs(real_replica: RunningReplica) -> None:
    """Generated tokens have the same log-probabilities when they are an echoed prompt."""
    body = completion("The cat", temperature=0, max_tokens=5, logprobs=1, return_token_ids=True)
    made = (await post(real_replica, "/v1/completions", body))["choices"][0]
    prompt = made["prompt_token_ids"] + made["token_ids"]
    score = completion(prompt, max_tokens=0, echo=True, logprobs=1)
    scored = (await post(real_replica, "/v1/completions", score))["choices"][0]["logprobs"]
    assert scored["tokens"][-5:] == made["logprobs"]["tokens"]
    for echoed, generated in zip(
        scored["token_logprobs"][-5:], made["logprobs"]["token_logprobs"], strict=True
    ):
        assert echoed == pytest.approx(generated, abs=0.1)  # bfloat16


async def test_shared_prefix_is_cached(real_replica: RunningReplica) -> None:
    prompt = "Tell me about the cat. " * 20
    for _ in range(2):
        response = await post(real_replica, "/v1/completions", completion(prompt, max_tokens=1))
    assert response["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    other = completion(prompt, max_tokens=1, cache_salt="other")
    salted = await post(real_replica, "/v1/completions", other)
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_disconnect_frees_kv_blocks(real_replica: RunningReplica) -> None:
    body = chat(stream=True, ignore_eos=True, max_tokens=1500, n=4)
    async with real_replica.client.stream("POST", "/v1/chat/completions", json=body) as response:
        await anext(response.aiter_bytes())
    await wait_idle(real_replica)


async def test_concurrent_requests_all_complete(real_replica: RunningReplica) -> None:
    bodies = [chat(f"Say {i}", max_tokens=6, stream=bool(i % 2)) for i in range(24)]
    answers = await asyncio.gather(
        *(real_replica.client.post("/v1/chat/completions", json=body) for body in bodies)
    )
    assert {response.status_code for response in answers} == {200}
    for body, response in zip(bodies, answers, strict=True):
        if body["stream"]:
            assert events(response.content)[-1] == b"[DONE]"
        else:
            assert json.loads(response.content)["choices"]
    await wait_idle(real_replica)


async def test_timeout_returns_partial_output(real_replica: RunningReplica) -> None:
    body = chat(ignore_eos=True, max_tokens=1900, n=32, timeout_s=1.0)
    response = await real_replica.client.post("/v1/chat/completions", json=body)
    if response.status_code == 408:  # a slow machine generates no token in that time
        assert response.json()["error"]["code"] == "timeout"
    else:
        choices = response.json()["choices"]
        assert ("length", "deadline") in {(c["finish_reason"], c["stop_reason"]) for c in choices}
        assert response.json()["usage"]["completion_tokens"] < 32 * 1900
    await wait_idle(real_replica)


async def test_metrics_count_real_engine_work(real_replica: RunningReplica) -> None:
    text = (await real_replica.client.get("/metrics")).text
    shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = f'{{model="{MODEL}"}}'
    assert float(shown["argosy_generation_tokens_total" + label]) > 0
    assert float(shown["argosy_prefix_hit_tokens_total" + label]) > 0
    assert float(shown["argosy_step_tokens_count" + label]) > 0
    assert float(shown["argosy_request_prefill_seconds_count" + label]) > 0
