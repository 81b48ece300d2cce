"""The OpenAI SDKs as users run them: Python (sync and async) in here, JavaScript through node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from tests.integration.conftest import REPLY
from tests.support.fake_engine import FakeEngine, Script, always
from tests.support.javascript_sdk import javascript
from tests.support.replica_servers import MODEL, Served

from argosy.protocol import ApiError

HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def sdk(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="unused", max_retries=0
    ) as client:
        yield client


async def test_chat(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == REPLY
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer._request_id  # noqa: SLF001 - the SDK's public way to it


async def test_chat_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == REPLY
    assert chunks[-1].usage is not None


async def test_chat_stream_helper(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == REPLY
    assert final.choices[0].finish_reason == "stop"


async def test_an_answer_is_sent_back_as_the_helper_gave_it(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        said = (await stream.get_final_completion()).choices[0].message
    history: list[Any] = [*HELLO, said, *HELLO]
    answer = await sdk.chat.completions.create(model=MODEL, messages=history)
    assert answer.choices[0].message.content == REPLY


async def test_completions(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(
        model=MODEL, prompt="Once", max_tokens=4, logprobs=2, echo=True
    )
    choice = answer.choices[0]
    assert choice.text.startswith("Once")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens).endswith(choice.text)
    stream = await sdk.completions.create(model=MODEL, prompt="Once", max_tokens=4, stream=True)
    parts = [chunk.choices[0] async for chunk in stream]
    assert "Once" + "".join(part.text for part in parts) == choice.text
    assert parts[-1].finish_reason == "length"


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    listed = await sdk.models.list()
    assert [model.id async for model in listed] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).owned_by == "argosy"


async def test_errors_have_their_class(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.chat.completions.create(model="gpt-9", messages=HELLO)
    assert missing.value.code == "model_not_found"
    engine.refusal = ApiError(503, "engine_unavailable", "restarting", retry_after_s=1)
    with pytest.raises(openai.InternalServerError) as down:
        await sdk.chat.completions.create(model=MODEL, messages=HELLO)
    assert down.value.code == "engine_unavailable"


async def test_error_mid_stream_is_raised(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.script = always(Script([100, 101], finish="error", error="a row failed"))
    stream = await sdk.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="a row failed"):
        [chunk async for chunk in stream]


async def test_retry_after_is_honoured(served: Served, engine: FakeEngine) -> None:
    engine.refusal = ApiError(503, "engine_unavailable", "restarting", retry_after_s=0.01)

    def recover() -> None:
        engine.refusal = None

    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused") as client:
        asyncio.get_running_loop().call_later(0.005, recover)
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == REPLY


async def test_sync_client(served: Served) -> None:
    def talk() -> tuple[str | None, str, str]:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused") as client:
            whole = client.chat.completions.create(model=MODEL, messages=HELLO)
            stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            legacy = client.completions.create(model=MODEL, prompt="Hi", max_tokens=100)
            return whole.choices[0].message.content, text, legacy.choices[0].text

    assert await asyncio.to_thread(talk) == (REPLY, REPLY, REPLY)


async def test_javascript(served: Served) -> None:
    told = await javascript("sdk.mjs", f"{served.url}/v1", MODEL)
    assert told["chat"] == told["stream"] == told["completion"] == told["completionStream"] == REPLY
    assert told["usage"] > 0
    assert told["finish"] == "stop"
    assert told["models"] == [MODEL]
    assert told["error"] == {"status": 400, "param": "temperature", "kind": "BadRequestError"}
