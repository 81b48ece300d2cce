"""Gateway with a store and an Argosy replica: keys, limits, usage records and explanations of two tenants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tests.integration.test_metrics import value
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_client import serve_gateway
from tests.support.migrated_store import open_migrated_store
from tests.support.replica_servers import MODEL, serve
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.deployment import ExplainConfig, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import GatewayServer
from argosy.store import Price, Project, Store, StoreConfig, UsageRecord

TOKENS = list(range(100, 130))
CHAT_PATH = "/v1/chat/completions"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "Tell me a story"}
]
BODY: dict[str, Any] = {"model": "big", "messages": MESSAGES, "max_tokens": 30}


@dataclass(frozen=True)
class TenantGateway:
    """Gateway in front of a scripted replica, and its store with the projects `web` and `other`."""

    url: str
    server: GatewayServer
    store: Store
    engine: FakeEngine
    web: Project
    other: Project
    """Premium project that shares its prompts within the organisation."""
    keys: dict[str, str]
    """Plain keys by name."""

    def client(self, key: str | None) -> httpx2.AsyncClient:
        headers = {} if key is None else {"authorization": f"Bearer {self.keys[key]}"}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=30)

    def sdk(self, plain_key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=plain_key, max_retries=0)

    async def wait_for_records(self, count: int) -> list[UsageRecord]:
        """Return the ledger's records once it has `count` of them."""
        while True:
            records = [record for page in self.store.ledger.iter_records() for record in page]
            if len(records) >= count:
                return records
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def run_tenant_gateway(
    folder: Path, tokenizer: Tokenizer, *, daily_tokens: int = 1000, retention_s: float = 3600.0
) -> AsyncIterator[TenantGateway]:
    """Run a gateway whose project `web` may use `daily_tokens` output tokens.

    Limits and prices name the model by its alias `largest`.
    """
    store_url = f"sqlite:///{folder / 'argosy.db'}"
    store = open_migrated_store(store_url)
    accounts, terms = store.accounts, store.limits_and_prices
    acme = accounts.create_organisation("acme", actor="test")
    web = accounts.create_project(acme.id, "web", actor="test")
    other = accounts.create_project(
        acme.id, "other", tier="premium", weight=2.5, share_cache=True, actor="test"
    )

    def create_key(project: Project, name: str, **options: Any) -> str:  # noqa: ANN401 - options of a key
        return accounts.create_key(project.id, name, actor="test", **options)[1]

    keys = {
        "web": create_key(web, "web"),
        "other": create_key(other, "other"),
        "admin": create_key(other, "admin", role="admin", scope="gateway"),
    }
    terms.set_limit(
        *("project", web.id, "output_tokens", daily_tokens),
        window="day",
        model="largest",
        actor="test",
    )
    terms.set_price(Price(model="largest", input=5, cached_input=1, output=20), actor="test")
    engine = FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length"))
    async with serve(engine) as served:
        replica = ReplicaConfig(url=served.url, model=MODEL)
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name="big", aliases=("largest",), replicas=[replica])],
            store=StoreConfig(url=store_url),
            explain=ExplainConfig(retention_s=retention_s),
            drain_deadline_s=0.5,
        )
        async with serve_gateway(config) as (server, url):
            yield TenantGateway(url, server, store, engine, web, other, keys)
        store.close()


async def test_replica_receives_the_cache_domain_and_priority_of_a_project(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_tenant_gateway(tmp_path, tokenizer) as gateway:
        for key in ("web", "other"):
            async with gateway.client(key) as client:
                assert (await client.post(CHAT_PATH, json=BODY)).status_code == 200
        web, other = gateway.web, gateway.other
        assert [
            (request.tenant, request.cache_domain, request.tier, request.weight)
            for request in gateway.engine.requests
        ] == [(web.id, web.id, 1, 1.0), (other.id, other.organisation, 0, 2.5)]


async def test_limit_of_the_admin_api_applies_to_a_running_stream(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with (
        run_tenant_gateway(tmp_path, tokenizer) as gateway,
        gateway.client("other") as client,
        gateway.client("admin") as admin,
    ):
        gateway.engine.script = lambda _: Script(list(TOKENS), finish="length", pause_after=15)
        stream = asyncio.create_task(client.post(CHAT_PATH, json=BODY | {"stream": True}))
        await gateway.engine.paused.wait()
        limit = {"owner_kind": "project", "owner": gateway.other.id, "unit": "output_tokens"}
        response = await admin.post("/admin/limits", json=limit | {"amount": 5, "window": "day"})
        assert response.status_code in {200, 201}, response.text
        headers: httpx2.Headers | dict[str, str] = {}
        while "x-ratelimit-limit-tokens" not in headers:
            tokenized = await client.post("/tokenize", json={"model": "big", "prompt": "Hi"})
            headers = tokenized.headers
        gateway.engine.may_continue.set()
        assert b'"finish_reason":"length","stop_reason":"limit"' in (await stream).content
        (record,) = await gateway.wait_for_records(1)
        assert (record.project, record.status) == (gateway.other.id, "stopped")
        assert 5 < record.output_tokens < 30


async def test_limit_stops_a_stream_and_delivered_tokens_are_charged(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_tenant_gateway(tmp_path, tokenizer, daily_tokens=20) as gateway:
        async with gateway.sdk(gateway.keys["web"]) as sdk:
            end, tokens = None, 0
            async for chunk in await sdk.chat.completions.create(
                model="big",
                messages=MESSAGES,
                max_tokens=30,
                stream=True,
                stream_options={"include_usage": True},
            ):
                if chunk.choices and chunk.choices[0].finish_reason:
                    end = chunk.choices[0]
                if chunk.usage:
                    tokens = chunk.usage.completion_tokens
                stopped_id = chunk.id
            assert end is not None
            assert (end.finish_reason, end.model_extra) == ("length", {"stop_reason": "limit"})
            assert 20 <= tokens < 30
            with pytest.raises(openai.RateLimitError) as rejected:
                await sdk.chat.completions.create(model="big", messages=MESSAGES)
            assert rejected.value.code == "rate_limit_exceeded"
            headers = rejected.value.response.headers
            assert int(headers["retry-after"]) * 1000 >= int(headers["retry-after-ms"]) > 0
            rejected_id = headers["x-argosy-request"]
        async with gateway.client("admin") as client:
            explanation = (await client.get(f"/admin/requests/{rejected_id}")).json()
            assert (explanation["status"], explanation["limits"][0]["limit"]) == ("refused", 20)
            explanation = (await client.get(f"/admin/requests/{stopped_id}")).json()
            assert explanation["status"] == "stopped"
            assert explanation["finish_reasons"] == {"0": "length"}
            assert explanation["stop_reasons"] == {"0": "limit"}
            assert [limit["fits"] for limit in explanation["limits"]] == [True, False]
            metrics = (await client.get("/metrics")).text
        assert value(metrics, "argosy_gateway_limit_rejections_total", unit="output_tokens") == 1
        (record,) = await gateway.wait_for_records(1)  # the rejected request has no record
        assert (record.request, record.status) == (stopped_id, "stopped")
        assert record.output_tokens == tokens
        uncached = record.input_tokens - record.cached_tokens
        assert record.nano_dollars == uncached * 5 + record.cached_tokens + tokens * 20


async def test_request_is_explained_to_its_tenant_and_to_operators_only(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_tenant_gateway(tmp_path, tokenizer) as gateway:
        async with gateway.client("web") as client:
            request_id = (await client.post(CHAT_PATH, json=BODY)).json()["id"]
            path = f"/admin/requests/{request_id}"
            explanation = (await client.get(path)).json()
        caller = explanation["caller"]
        assert (caller["project"], caller["tier"]) == (gateway.web.id, gateway.web.tier)
        assert explanation["status"] == "completed"
        assert explanation["tokens"]["output"] == 30
        assert explanation["ledger"]["nano_dollars"] > 0
        assert explanation["attempts"][0]["candidates"]
        async with gateway.client("other") as client:
            assert (await client.get(path)).status_code == 404
        async with gateway.client("admin") as client:
            assert (await client.get(path)).json() == explanation

        async def explain(key: str) -> tuple[int, str]:
            arguments = ["explain", request_id, "--url", gateway.url, "--key", gateway.keys[key]]
            result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
            return result.exit_code, result.output

        exit_code, output = await explain("web")
        assert exit_code == 0, output
        assert "completed" in output
        (ledger_line,) = [line for line in output.splitlines() if line.startswith("ledger: $")]
        assert ledger_line.endswith("per million tokens"), "a pipe receives unwrapped lines"
        exit_code, output = await explain("other")
        assert exit_code == 2
        assert "is no record of the request" in output


async def test_explanation_expires_without_further_requests(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with (
        run_tenant_gateway(tmp_path, tokenizer, retention_s=0.0) as gateway,
        gateway.client("web") as client,
    ):
        request_id = (await client.post(CHAT_PATH, json=BODY)).json()["id"]
        await gateway.wait_for_records(1)  # the request has ended
        explanation = (await client.get(f"/admin/requests/{request_id}")).json()
        assert explanation["source"] == "ledger"


async def test_stream_cut_by_the_drain_deadline_is_charged(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_tenant_gateway(tmp_path, tokenizer) as gateway:
        gateway.engine.script = lambda _: Script(list(TOKENS), pause_after=5)
        async with (
            gateway.client("web") as client,
            client.stream("POST", CHAT_PATH, json=BODY | {"stream": True}) as response,
        ):
            chunks = response.aiter_bytes()
            data = await anext(chunks)
            while data.count(b'"content"') < 6:  # the role and five tokens
                data += await anext(chunks)
            gateway.server.stop()
            end = b"".join([chunk async for chunk in chunks])
            assert b'"code":"draining"' in end
            assert b"[DONE]" not in end
        (record,) = await gateway.wait_for_records(1)
        assert (record.status, record.output_tokens) == ("failed", 5)
