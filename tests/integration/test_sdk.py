"""OpenAI SDK against a replica: errors and retries. `test_gateway_sdk.py` and `test_clients.py` test responses."""

from __future__ import annotations

import asyncio

import openai
import pytest
from tests.integration.conftest import REPLY
from tests.support.fake_engine import FakeEngine, Script, constant_script
from tests.support.replica_servers import MODEL, RunningReplica

from argosy.protocol import ApiError

HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


async def test_errors_have_the_exception_class_of_the_sdk_and_it_retries(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    sdk = openai.AsyncOpenAI(base_url=f"{replica_server.url}/v1", api_key="unused", max_retries=0)
    async with sdk:
        chat = sdk.chat.completions
        with pytest.raises(openai.BadRequestError) as bad:
            await chat.create(model=MODEL, messages=HELLO, temperature=-1)
        assert bad.value.param == "temperature"
        assert bad.value.request_id
        with pytest.raises(openai.NotFoundError) as missing:
            await chat.create(model="gpt-9", messages=HELLO)
        assert missing.value.code == "model_not_found"
        script, engine.script = (
            engine.script,
            constant_script(Script([100, 101], finish="error", error="a row failed")),
        )
        stream = await chat.create(model=MODEL, messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="a row failed"):
            [chunk async for chunk in stream]
        engine.script = script
        engine.rejection = ApiError(503, "engine_unavailable", "restarting", retry_after_s=0.01)
        with pytest.raises(openai.InternalServerError) as down:
            await chat.create(model=MODEL, messages=HELLO)
        assert down.value.code == "engine_unavailable"

        def recover() -> None:
            engine.rejection = None

        asyncio.get_running_loop().call_later(0.005, recover)
        retrying = sdk.with_options(max_retries=2)
        response = await retrying.chat.completions.create(model=MODEL, messages=HELLO)
        assert response.choices[0].message.content == REPLY
