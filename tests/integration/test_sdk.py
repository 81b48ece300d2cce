"""OpenAI SDKs against a replica: Python (sync and async) in this process, JavaScript through node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from tests.integration.conftest import REPLY
from tests.support.fake_engine import FakeEngine, Script, constant_script
from tests.support.javascript_sdk import run_javascript
from tests.support.replica_servers import MODEL, RunningReplica

from argosy.protocol import ApiError

HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def sdk(replica_server: RunningReplica) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{replica_server.url}/v1", api_key="unused", max_retries=0
    ) as client:
        yield client


async def test_chat_response(sdk: openai.AsyncOpenAI) -> None:
    response = await sdk.chat.completions.create(model=MODEL, messages=HELLO)
    assert response.choices[0].message.content == REPLY
    assert response.usage is not None
    assert response.usage.prompt_tokens_details is not None
    assert response.usage.prompt_tokens_details.cached_tokens == 3
    assert response._request_id  # noqa: SLF001 - the SDK documents it as public


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


async def test_parsed_message_is_accepted_in_next_request(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    history: list[Any] = [*HELLO, message, *HELLO]
    response = await sdk.chat.completions.create(model=MODEL, messages=history)
    assert response.choices[0].message.content == REPLY


async def test_completion_stream_equals_response(sdk: openai.AsyncOpenAI) -> None:
    response = await sdk.completions.create(
        model=MODEL, prompt="Once", max_tokens=4, logprobs=2, echo=True
    )
    choice = response.choices[0]
    assert choice.text.startswith("Once")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens).endswith(choice.text)
    stream = await sdk.completions.create(model=MODEL, prompt="Once", max_tokens=4, stream=True)
    parts = [chunk.choices[0] async for chunk in stream]
    assert "Once" + "".join(part.text for part in parts) == choice.text
    assert parts[-1].finish_reason == "length"


async def test_models_are_listed_and_retrieved(sdk: openai.AsyncOpenAI) -> None:
    listed = await sdk.models.list()
    assert [model.id async for model in listed] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).owned_by == "argosy"


async def test_errors_have_sdk_exception_class(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.chat.completions.create(model="gpt-9", messages=HELLO)
    assert missing.value.code == "model_not_found"
    engine.rejection = ApiError(503, "engine_unavailable", "restarting", retry_after_s=1)
    with pytest.raises(openai.InternalServerError) as down:
        await sdk.chat.completions.create(model=MODEL, messages=HELLO)
    assert down.value.code == "engine_unavailable"


async def test_error_in_stream_is_raised(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.script = constant_script(Script([100, 101], finish="error", error="a row failed"))
    stream = await sdk.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="a row failed"):
        [chunk async for chunk in stream]


async def test_sdk_retries_after_retry_after(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    engine.rejection = ApiError(503, "engine_unavailable", "restarting", retry_after_s=0.01)

    def recover() -> None:
        engine.rejection = None

    async with openai.AsyncOpenAI(base_url=f"{replica_server.url}/v1", api_key="unused") as client:
        asyncio.get_running_loop().call_later(0.005, recover)
        response = await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert response.choices[0].message.content == REPLY


async def test_synchronous_client(replica_server: RunningReplica) -> None:
    def run_requests() -> tuple[str | None, str, str]:
        with openai.OpenAI(base_url=f"{replica_server.url}/v1", api_key="unused") as client:
            response = client.chat.completions.create(model=MODEL, messages=HELLO)
            stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            legacy = client.completions.create(model=MODEL, prompt="Hi", max_tokens=100)
            return response.choices[0].message.content, text, legacy.choices[0].text

    assert await asyncio.to_thread(run_requests) == (REPLY, REPLY, REPLY)


async def test_javascript_sdk(replica_server: RunningReplica) -> None:
    output = await run_javascript("sdk.mjs", f"{replica_server.url}/v1", MODEL)
    texts = [output[name] for name in ("chat", "stream", "completion", "completionStream")]
    assert texts == [REPLY] * 4
    assert output["usage"] > 0
    assert output["finish"] == "stop"
    assert output["models"] == [MODEL]
    assert output["error"] == {"status": 400, "param": "temperature", "kind": "BadRequestError"}
