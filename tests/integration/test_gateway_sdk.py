"""The OpenAI SDKs with keys of a gateway: what they are given, and which of their errors says what is refused."""

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
from tests.support.gateway_processes import MODEL, Tenants, gateways, sdk, tenants
from tests.support.javascript_sdk import javascript
from tests.support.replica_servers import MODEL as BEHIND
from tests.support.replica_servers import Served

from argosy.gateway import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway.auth import AuthConfig
from argosy.store import StoreConfig

HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
SOON_S = 1.0
LONGEST_S = 62
"""A minute and the slot of the window in which a request was counted."""


@dataclass(frozen=True)
class Keys:
    """Of callers that differ in what they may."""

    good: str
    expired: str
    elsewhere: str
    """For another model."""
    limited: str
    """To one request a minute."""
    poor: str
    """With a budget for 20 tokens a day."""


def make_keys(people: Tenants) -> Keys:
    shop = people.project("shop")
    limited, poor = people.project("limited"), people.project("poor")
    people.limit(limited, "requests", 1, "minute")
    people.limit(limited, "tokens", 10_000, "minute")
    people.price(1_000)
    people.limit(poor, "nano_dollars", 20_000, "day")
    return Keys(
        good=people.key(shop),
        expired=people.key(shop, "old", expires_at=time.time() + SOON_S),
        elsewhere=people.key(shop, "elsewhere", models=("another",)),
        limited=people.key(limited),
        poor=people.key(poor),
    )


@pytest.fixture
async def fleet(served: Served, tmp_path: Path) -> AsyncIterator[tuple[str, Keys]]:
    """URL and keys of a gateway before a replica with a scripted engine."""
    store = f"sqlite:///{tmp_path / 'store.db'}"
    config = GatewayConfig(
        port=0,
        models=[ModelConfig(name=MODEL, replicas=[ReplicaConfig(url=served.url, model=BEHIND)])],
        store=StoreConfig(url=store),
        auth=AuthConfig(mode="required"),
    )
    with tenants(store) as people:
        keys = make_keys(people)
        async with gateways(config, tmp_path) as (gateway,):
            yield gateway.url, keys
            await gateway.stop()


async def test_python(fleet: tuple[str, Keys], engine: FakeEngine) -> None:
    url, keys = fleet
    async with sdk(url, keys.good) as client:
        assert [model.id async for model in await client.models.list()] == [MODEL]
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert whole.choices[0].message.content == REPLY
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == REPLY
        assert whole.usage is not None
        assert chunks[-1].usage == whole.usage
    for key, code in (("sk-argosy-nobody", "invalid_api_key"), (keys.expired, "expired_api_key")):
        if key == keys.expired:
            await asyncio.sleep(SOON_S)
        async with sdk(url, key) as client:
            with pytest.raises(openai.AuthenticationError) as wrong:
                await client.models.list()
            assert wrong.value.code == code
            assert wrong.value.request_id
    async with sdk(url, keys.elsewhere) as client:
        assert [model.id async for model in await client.models.list()] == []
        with pytest.raises(openai.PermissionDeniedError) as forbidden:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert forbidden.value.code == "model_not_allowed"
    assert len(engine.requests) == 2


async def test_python_is_told_of_limits(fleet: tuple[str, Keys]) -> None:
    url, keys = fleet
    async with sdk(url, keys.limited) as client:
        first = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO)
        assert first.headers["x-ratelimit-limit-requests"] == "1"
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        assert first.headers["x-ratelimit-limit-tokens"] == "10000"
        assert 0 < int(first.headers["x-ratelimit-remaining-tokens"]) < 10_000
        with pytest.raises(openai.RateLimitError) as limited:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        told = limited.value.response.headers
        assert limited.value.code == "rate_limit_exceeded"
        assert 0 < int(told["retry-after"]) <= LONGEST_S
        assert 0 < int(told["retry-after-ms"]) <= LONGEST_S * 1000
        assert told["x-ratelimit-remaining-requests"] == "0"
        assert told["x-ratelimit-reset-requests"].endswith("s")


async def test_a_budget_ends_a_stream_at_its_last_token(
    fleet: tuple[str, Keys], engine: FakeEngine
) -> None:
    url, keys = fleet
    engine.script = lambda _: Script(list(range(100, 300)), finish="length")
    async with sdk(url, keys.poor) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        reasons: list[str | None] = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert reasons[-1] == "budget"
        assert chunks[-1].usage is not None
        assert 20 <= chunks[-1].usage.completion_tokens <= 21
        with pytest.raises(openai.RateLimitError) as spent:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert spent.value.code == "insufficient_quota"
    await engine.nothing_runs()


async def test_javascript(fleet: tuple[str, Keys]) -> None:
    url, keys = fleet
    given = keys.good, keys.elsewhere, keys.limited, keys.expired
    told = await javascript("gateway.mjs", f"{url}/v1", MODEL, *given)
    assert told["good"] == {"models": [MODEL], "chat": REPLY, "stream": REPLY}
    assert told["nobody"]["kind"] == told["expired"]["kind"] == "AuthenticationError"
    assert told["nobody"]["code"] == "invalid_api_key"
    assert told["expired"]["code"] == "expired_api_key"
    assert told["elsewhere"]["kind"] == "PermissionDeniedError"
    assert told["limited"]["kind"] == "RateLimitError"
    assert told["limited"]["remaining"] == "0"
    assert 0 < int(told["limited"]["retryAfter"]) <= LONGEST_S
