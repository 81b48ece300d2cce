"""The whole replica: HTTP server, engine process and the bundled model, through the OpenAI SDK."""

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
    Served,
    chat,
    completion,
    events,
    real_engine,
    serve,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real() -> AsyncIterator[Served]:
    async with serve(real_engine()) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(real: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="unused") as client:
        yield client


async def post(real: Served, path: str, body: object) -> dict[str, Any]:
    answer = await real.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def nothing_runs(real: Served) -> None:
    """Wait until the core has given every block back."""
    while True:
        load = (await real.client.get("/load")).json()
        if not load["server_load"] + load["running"] + load["waiting"]:
            assert load["kv_blocks_used"] == 0
            return


async def test_stream_is_the_whole_answer(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.chat.completions.create(
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
    assert text == whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_seed_repeats_and_choices_differ(sdk: openai.AsyncOpenAI) -> None:
    async def texts(n: int) -> list[str]:
        answer = await sdk.completions.create(
            model=MODEL, prompt="Tell me", max_tokens=8, seed=7, n=n, temperature=1.5
        )
        return [choice.text for choice in answer.choices]

    three = await texts(3)
    assert three == await texts(3)
    assert await texts(1) == three[:1]
    assert len(set(three)) > 1


async def test_resume_at_every_token_gives_the_same_text(real: Served) -> None:
    body = chat(seed=11, max_tokens=12, return_token_ids=True, ignore_eos=True)
    whole = (await post(real, "/v1/chat/completions", body))["choices"][0]
    for cut in range(1, 12):
        resume = {"token_ids": whole["token_ids"][:cut]}
        rest = (await post(real, "/v1/chat/completions", body | {"resume": resume}))["choices"][0]
        assert rest["token_ids"] == whole["token_ids"][cut:], cut
        assert whole["message"]["content"].endswith(rest["message"]["content"])


async def test_stop_string(real: Served) -> None:
    body = chat(temperature=0, max_tokens=30)
    text = (await post(real, "/v1/chat/completions", body))["choices"][0]["message"]["content"]
    stop = text[5:9]
    choice = (await post(real, "/v1/chat/completions", body | {"stop": stop}))["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert choice["stop_reason"] == stop
    await nothing_runs(real)


async def test_scoring_agrees_with_generation(real: Served) -> None:
    """The log-probabilities of generated tokens are those of the same tokens as an echoed prompt."""
    body = completion("The cat", temperature=0, max_tokens=5, logprobs=1, return_token_ids=True)
    made = (await post(real, "/v1/completions", body))["choices"][0]
    prompt = made["prompt_token_ids"] + made["token_ids"]
    score = completion(prompt, max_tokens=0, echo=True, logprobs=1)
    scored = (await post(real, "/v1/completions", score))["choices"][0]["logprobs"]
    assert scored["tokens"][-5:] == made["logprobs"]["tokens"]
    for told, generated in zip(
        scored["token_logprobs"][-5:], made["logprobs"]["token_logprobs"], strict=True
    ):
        assert told == pytest.approx(generated, abs=0.1)  # bfloat16


async def test_shared_prefix_is_cached(real: Served) -> None:
    prompt = "Tell me about the cat. " * 20
    for _ in range(2):
        answer = await post(real, "/v1/completions", completion(prompt, max_tokens=1))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    other = completion(prompt, max_tokens=1, cache_salt="other")
    salted = await post(real, "/v1/completions", other)
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_disconnect_frees_the_blocks(real: Served) -> None:
    body = chat(stream=True, ignore_eos=True, max_tokens=1500, n=4)
    async with real.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        await anext(answer.aiter_bytes())
    await nothing_runs(real)


async def test_many_at_once(real: Served) -> None:
    bodies = [chat(f"Say {i}", max_tokens=6, stream=bool(i % 2)) for i in range(24)]
    answers = await asyncio.gather(
        *(real.client.post("/v1/chat/completions", json=body) for body in bodies)
    )
    assert {answer.status_code for answer in answers} == {200}
    for body, answer in zip(bodies, answers, strict=True):
        if body["stream"]:
            assert events(answer.content)[-1] == b"[DONE]"
        else:
            assert json.loads(answer.content)["choices"]
    await nothing_runs(real)


async def test_timeout_returns_what_there_is(real: Served) -> None:
    body = chat(ignore_eos=True, max_tokens=1900, n=32, timeout_s=1.0)
    answer = await real.client.post("/v1/chat/completions", json=body)
    if answer.status_code == 408:  # this machine is too slow for a single token in that time
        assert answer.json()["error"]["code"] == "timeout"
    else:
        reasons = {choice["finish_reason"] for choice in answer.json()["choices"]}
        assert "timeout" in reasons
        assert answer.json()["usage"]["completion_tokens"] < 32 * 1900
    await nothing_runs(real)


async def test_metrics_after_all_that(real: Served) -> None:
    text = (await real.client.get("/metrics")).text
    shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = f'{{model="{MODEL}"}}'
    assert float(shown["argosy_generation_tokens_total" + label]) > 0
    assert float(shown["argosy_prefix_hit_tokens_total" + label]) > 0
    assert float(shown["argosy_step_tokens_count" + label]) > 0
    assert float(shown["argosy_request_prefill_seconds_count" + label]) > 0
