"""OpenAI SDKs with API keys of a gateway: responses, and the exception class of each rejection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from tests.integration.conftest import REPLY
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_processes import (
    MODEL,
    OrganisationAccounts,
    gateways,
    open_organisation,
    open_sdk_client,
)
from tests.support.javascript_sdk import run_javascript
from tests.support.replica_servers import MODEL as REPLICA_MODEL
from tests.support.replica_servers import RunningReplica

from argosy.deployment import AuthConfig, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.store import StoreConfig

HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
EXPIRY_S = 1.0
MAX_RETRY_AFTER_S = 62
"""A minute, and the window slot in which the request was counted."""


@dataclass(frozen=True)
class Keys:
    """API keys with different permissions."""

    good: str
    expired: str
    other_model: str
    """Allows another model only."""
    limited: str
    """Allows one request per minute."""
    low_budget: str
    """Has a budget of 20 tokens per day."""


def make_keys(accounts: OrganisationAccounts) -> Keys:
    shop = accounts.project("shop")
    limited, low_budget = accounts.project("limited"), accounts.project("poor")
    accounts.limit(limited, "requests", 1, "minute")
    accounts.limit(limited, "tokens", 10_000, "minute")
    accounts.price(1_000)
    accounts.limit(low_budget, "nano_dollars", 20_000, "day")
    return Keys(
        good=accounts.key(shop),
        expired=accounts.key(shop, "old", expires_at=time.time() + EXPIRY_S),
        other_model=accounts.key(shop, "elsewhere", models=("another",)),
        limited=accounts.key(limited),
        low_budget=accounts.key(low_budget),
    )


@pytest.fixture
async def gateway_and_keys(
    replica_server: RunningReplica, tmp_path: Path
) -> AsyncIterator[tuple[str, Keys]]:
    """Yield URL and keys of a gateway whose replica has a scripted engine."""
    store = f"sqlite:///{tmp_path / 'store.db'}"
    config = GatewayConfig(
        port=0,
        models=[
            ModelConfig(
                name=MODEL, replicas=[ReplicaConfig(url=replica_server.url, model=REPLICA_MODEL)]
            )
        ],
        store=StoreConfig(url=store),
        auth=AuthConfig(mode="required"),
    )
    with open_organisation(store) as accounts:
        keys = make_keys(accounts)
        async with gateways(config, tmp_path) as (gateway,):
            yield gateway.url, keys
            await gateway.stop()


async def test_python_sdk_gets_responses_and_key_errors(
    gateway_and_keys: tuple[str, Keys], engine: FakeEngine
) -> None:
    url, keys = gateway_and_keys
    async with open_sdk_client(url, keys.good) as client:
        assert [model.id async for model in await client.models.list()] == [MODEL]
        response = await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert response.choices[0].message.content == REPLY
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == REPLY
        assert response.usage is not None
        assert chunks[-1].usage == response.usage
    for key, code in (("sk-argosy-unknown", "invalid_api_key"), (keys.expired, "expired_api_key")):
        if key == keys.expired:
            await asyncio.sleep(EXPIRY_S)
        async with open_sdk_client(url, key) as client:
            with pytest.raises(openai.AuthenticationError) as error:
                await client.models.list()
            assert error.value.code == code
            assert error.value.request_id
    async with open_sdk_client(url, keys.other_model) as client:
        assert [model.id async for model in await client.models.list()] == []
        with pytest.raises(openai.PermissionDeniedError) as forbidden:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert forbidden.value.code == "model_not_allowed"
    assert len(engine.requests) == 2


async def test_python_sdk_gets_rate_limit_headers(gateway_and_keys: tuple[str, Keys]) -> None:
    url, keys = gateway_and_keys
    async with open_sdk_client(url, keys.limited) as client:
        first = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO)
        assert first.headers["x-ratelimit-limit-requests"] == "1"
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        assert first.headers["x-ratelimit-limit-tokens"] == "10000"
        assert 0 < int(first.headers["x-ratelimit-remaining-tokens"]) < 10_000
        with pytest.raises(openai.RateLimitError) as limited:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        headers = limited.value.response.headers
        assert limited.value.code == "rate_limit_exceeded"
        assert 0 < int(headers["retry-after"]) <= MAX_RETRY_AFTER_S
        assert 0 < int(headers["retry-after-ms"]) <= MAX_RETRY_AFTER_S * 1000
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert headers["x-ratelimit-reset-requests"].endswith("s")


async def test_exhausted_budget_ends_stream(
    gateway_and_keys: tuple[str, Keys], engine: FakeEngine
) -> None:
    url, keys = gateway_and_keys
    engine.script = lambda _: Script(list(range(100, 300)), finish="length")
    async with open_sdk_client(url, keys.low_budget) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        last = [chunk.choices[0] for chunk in chunks if chunk.choices][-1]
        assert last.finish_reason == "length"
        assert last.model_extra == {"stop_reason": "budget"}
        assert chunks[-1].usage is not None
        assert 20 <= chunks[-1].usage.completion_tokens <= 21
        with pytest.raises(openai.RateLimitError) as spent:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert spent.value.code == "insufficient_quota"
    await engine.wait_idle()


async def test_javascript_sdk_gets_responses_and_key_errors(
    gateway_and_keys: tuple[str, Keys],
) -> None:
    url, keys = gateway_and_keys
    key_arguments = keys.good, keys.other_model, keys.limited, keys.expired
    output = await run_javascript("gateway.mjs", f"{url}/v1", MODEL, *key_arguments)
    assert output["good"] == {"models": [MODEL], "chat": REPLY, "stream": REPLY}
    assert output["unknown"]["kind"] == output["expired"]["kind"] == "AuthenticationError"
    assert output["unknown"]["code"] == "invalid_api_key"
    assert output["expired"]["code"] == "expired_api_key"
    assert output["elsewhere"]["kind"] == "PermissionDeniedError"
    assert output["limited"]["kind"] == "RateLimitError"
    assert output["limited"]["remaining"] == "0"
    assert 0 < int(output["limited"]["retryAfter"]) <= MAX_RETRY_AFTER_S
