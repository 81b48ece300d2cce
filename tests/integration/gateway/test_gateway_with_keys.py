"""Gateway with a store: access by keys, changes of accounts, and limits, usage and explanations of tenants."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tests.integration.test_metrics import value
from tests.support.fake_engine import FakeEngine, Script, constant_script, reply_script
from tests.support.fake_upstream import fake_upstream
from tests.support.gateway_client import serve_gateway
from tests.support.gateway_processes import (
    OrganisationAccounts,
    open_organisation,
    open_sdk_client,
)
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import until
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.deployment import AuthConfig, ExplainConfig, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.engine.serving.text import Tokenizer
from argosy.gateway import GatewayServer
from argosy.store import AccountSnapshot, Price, Store, StoreConfig, open_store

TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05
TOKENS = list(range(100, 130))
REPLY = "Hello there. How can I help you today?"
CHAT_PATH = "/v1/chat/completions"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "Tell me a story"}
]
BODY: dict[str, Any] = {"model": "big", "messages": MESSAGES, "max_tokens": 30}
FREE_PATHS = (
    *(
        "/v1/models",
        "/api/tags",
        "/api/ps",
        "/api/show",
        "/api/version",
        "/version",
        "/openapi.json",
    ),
    *("/health", "/ready", "/metrics", "/replicas/", "/admin/", "/api/v2/alerts"),
    "/console",
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
"""Begins of paths that list what the gateway knows, or need a higher role."""
PATHS_OF_INPUT = {"/api/embed", "/v1/responses", "/v1/responses/input_tokens"}
"""Paths whose bodies have `input`, and no fields of others."""
MAX_RETRY_AFTER_S = 62
"""A minute, and the window slot in which the request was counted."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    """URL of a store that does not exist yet."""
    return f"sqlite:///{tmp_path}/argosy.db"


@dataclass(frozen=True)
class TenantGateway:
    """Gateway in front of a scripted replica, and its store with the projects `web` and `other`."""

    url: str
    server: GatewayServer
    accounts: OrganisationAccounts
    engine: FakeEngine
    web: str
    """Id of a project that may use `daily_tokens` output tokens."""
    other: str
    """Id of a premium project that shares its prompts within the organisation."""
    keys: dict[str, str]
    """Plain keys by name."""

    def client(self, key: str) -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {self.keys[key]}"}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=TIMEOUT_S)

    def sdk(self, key: str) -> contextlib.AbstractAsyncContextManager[openai.AsyncOpenAI]:
        """Return an OpenAI SDK client with the key of this name, or with this unknown key."""
        return open_sdk_client(self.url, self.keys.get(key, key))


@contextlib.asynccontextmanager
async def run_tenant_gateway(
    url: str, tokenizer: Tokenizer, *, daily_tokens: int = 1000, retention_s: float = 3600.0
) -> AsyncIterator[TenantGateway]:
    """Run a gateway with keys of all kinds. Limits and prices name the model by its alias `largest`."""
    engine = FakeEngine(tokenizer, constant_script(Script(TOKENS, finish="length")))
    with open_organisation(url) as accounts:
        web, limited = accounts.project("web"), accounts.project("limited")
        other = accounts.project(
            "other", tier="premium", weight=2.5, share_cache=True, flags=["no-speculation"]
        )
        accounts.limit(limited, "requests", 1, "minute")
        accounts.limit(limited, "tokens", 10_000, "minute")
        terms = accounts.store.limits_and_prices
        terms.set_limit(
            *("project", web, "output_tokens", daily_tokens),
            window="day",
            model="largest",
            actor="test",
        )
        terms.set_price(Price(model="largest", input=5, cached_input=1, output=20), actor="test")
        keys = {
            "web": accounts.key(web),
            "other": accounts.key(other),
            "admin": accounts.key(other, "admin", role="admin", scope="gateway"),
            "limited": accounts.key(limited),
            "other model": accounts.key(web, "elsewhere", models=("another",)),
            "expired": accounts.key(web, "old", expires_at=time.time() + 0.2),
        }
        async with serve(engine) as served:
            replica = ReplicaConfig(url=served.url, model=MODEL)
            config = GatewayConfig(
                port=0,
                models=[ModelConfig(name="big", aliases=("largest",), replicas=[replica])],
                store=StoreConfig(url=url),
                explain=ExplainConfig(retention_s=retention_s),
                drain_deadline_s=0.5,
            )
            async with serve_gateway(config) as (server, base_url):
                yield TenantGateway(base_url, server, accounts, engine, web, other, keys)


async def test_replica_receives_the_settings_of_a_project(url: str, tokenizer: Tokenizer) -> None:
    async with run_tenant_gateway(url, tokenizer) as gateway:
        for key in ("web", "other"):
            async with gateway.client(key) as client:
                assert (await client.post(CHAT_PATH, json=BODY)).status_code == 200
        web, other, organisation = gateway.web, gateway.other, gateway.accounts.organisation
        assert [
            (each.tenant, each.cache_domain, each.tier, each.weight, each.speculation)
            for each in gateway.engine.requests
        ] == [(web, web, 1, 1.0, True), (other, organisation, 0, 2.5, False)]


async def test_used_up_limit_of_requests_refuses_all_work(url: str, tokenizer: Tokenizer) -> None:
    """Every path that does work for a request, whichever paths there are, counts it."""
    body = BODY | {"input": "a", "items": [], "metadata": {}}
    others = {"prompt": "a", "query": "a", "text_1": "a", "text_2": "b", "tokens": [1]}
    others |= {"documents": ["a"], "texts": ["a"], "input_type": "classification"}
    async with run_tenant_gateway(url, tokenizer) as gateway, gateway.client("limited") as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        first = await client.post("/v1/conversations", json={"items": []})
        assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
        refused = [
            (
                method,
                path,
                body if path in PATHS_OF_INPUT else body | others,
            )
            for path, methods in paths.items()
            for method in methods
            if not path.startswith(FREE_PATHS)
        ]
        refused.append(("post", "/v1/responses", body | {"background": True}))
        refused.append(("post", "/v1/responses", body | {"previous_response_id": "resp_1"}))
        for method, path, fields in refused:
            url_path = path.format_map(defaultdict(lambda: "x"))
            answer = await client.request(method, url_path, json=fields)
            is_other_task = "its tasks are generate" in answer.text
            assert answer.status_code == 429 or is_other_task, f"{method} {path}: {answer.text}"
        assert len(refused) > 35
    assert gateway.engine.requests == []


async def test_limit_of_the_admin_api_applies_to_a_running_stream(
    url: str, tokenizer: Tokenizer
) -> None:
    async with (
        run_tenant_gateway(url, tokenizer) as gateway,
        gateway.client("other") as client,
        gateway.client("admin") as admin,
    ):
        gateway.engine.script = lambda _: Script(list(TOKENS), finish="length", pause_after=15)
        stream = asyncio.create_task(client.post(CHAT_PATH, json=BODY | {"stream": True}))
        await gateway.engine.paused.wait()
        limit = {"owner_kind": "project", "owner": gateway.other, "unit": "output_tokens"}
        response = await admin.post("/admin/limits", json=limit | {"amount": 5, "window": "day"})
        assert response.status_code in {200, 201}, response.text
        headers: httpx2.Headers | dict[str, str] = {}
        while "x-ratelimit-limit-tokens" not in headers:
            tokenized = await client.post("/tokenize", json={"model": "big", "prompt": "Hi"})
            headers = tokenized.headers
        gateway.engine.may_continue.set()
        assert b'"finish_reason":"length","stop_reason":"limit"' in (await stream).content
        (record,) = await gateway.accounts.wait_for_rows(1)
        assert (record.project, record.status) == (gateway.other, "stopped")
        assert 5 < record.output_tokens < 30


async def test_limit_stops_a_stream_and_delivered_tokens_are_charged(
    url: str, tokenizer: Tokenizer
) -> None:
    async with run_tenant_gateway(url, tokenizer, daily_tokens=20) as gateway:
        async with gateway.sdk("web") as sdk:
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
        (record,) = await gateway.accounts.wait_for_rows(1)  # the rejected request has no record
        assert (record.request, record.status) == (stopped_id, "stopped")
        assert record.output_tokens == tokens
        uncached = record.input_tokens - record.cached_tokens
        assert record.nano_dollars == uncached * 5 + record.cached_tokens + tokens * 20


async def test_request_is_explained_to_its_tenant_and_to_operators_only(
    url: str, tokenizer: Tokenizer
) -> None:
    async with run_tenant_gateway(url, tokenizer) as gateway:
        async with gateway.client("web") as client:
            request_id = (await client.post(CHAT_PATH, json=BODY)).json()["id"]
            path = f"/admin/requests/{request_id}"
            explanation = (await client.get(path)).json()
        caller = explanation["caller"]
        assert (caller["project"], caller["tier"]) == (gateway.web, "standard")
        assert explanation["status"] == "completed"
        assert explanation["tokens"]["output"] == 30
        assert explanation["ledger"]["nano_dollars"] > 0
        assert explanation["attempts"][0]["candidates"]
        async with gateway.client("other") as client:
            assert (await client.get(path)).status_code == 404
        async with gateway.client("admin") as client:
            assert (await client.get(path)).json() == explanation


async def test_explanation_expires_without_further_requests(url: str, tokenizer: Tokenizer) -> None:
    async with (
        run_tenant_gateway(url, tokenizer, retention_s=0.0) as gateway,
        gateway.client("web") as client,
    ):
        request_id = (await client.post(CHAT_PATH, json=BODY)).json()["id"]
        await gateway.accounts.wait_for_rows(1)  # the request has ended
        explanation = (await client.get(f"/admin/requests/{request_id}")).json()
        assert explanation["source"] == "ledger"


async def test_stream_cut_by_the_drain_deadline_is_charged(url: str, tokenizer: Tokenizer) -> None:
    async with run_tenant_gateway(url, tokenizer) as gateway:
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
        (record,) = await gateway.accounts.wait_for_rows(1)
        assert (record.status, record.output_tokens) == ("failed", 5)


async def test_python_sdk_gets_responses_and_key_errors(url: str, tokenizer: Tokenizer) -> None:
    async with run_tenant_gateway(url, tokenizer) as gateway:
        gateway.engine.script = constant_script(reply_script(tokenizer, REPLY))
        for key, code in (
            ("sk-argosy-unknown", "invalid_api_key"),
            ("expired", "expired_api_key"),
            ("other model", "model_not_allowed"),
        ):
            await asyncio.sleep(0.2 if key == "expired" else 0)
            async with gateway.sdk(key) as client:
                with pytest.raises(openai.APIStatusError) as error:
                    await client.chat.completions.create(model="big", messages=MESSAGES)
                is_forbidden = isinstance(error.value, openai.PermissionDeniedError)
                assert is_forbidden or isinstance(error.value, openai.AuthenticationError)
                assert (error.value.code, is_forbidden) == (code, key == "other model")
                assert error.value.request_id
                if is_forbidden:
                    assert [model.id async for model in await client.models.list()] == []
        async with gateway.sdk("limited") as client:
            create = client.chat.completions.with_raw_response.create
            first = await create(model="big", messages=MESSAGES)
            assert first.parse().choices[0].message.content == REPLY
            assert first.headers["x-ratelimit-limit-requests"] == "1"
            assert first.headers["x-ratelimit-limit-tokens"] == "10000"
            assert 0 < int(first.headers["x-ratelimit-remaining-tokens"]) < 10_000
            with pytest.raises(openai.RateLimitError) as limited:
                await create(model="big", messages=MESSAGES)
            headers = limited.value.response.headers
            assert limited.value.code == "rate_limit_exceeded"
            assert 0 < int(headers["retry-after"]) <= MAX_RETRY_AFTER_S
            assert 0 < int(headers["retry-after-ms"]) <= MAX_RETRY_AFTER_S * 1000
            assert headers["x-ratelimit-remaining-requests"] == "0"
            assert headers["x-ratelimit-reset-requests"].endswith("s")
        assert len(gateway.engine.requests) == 1


# --- accounts that change while the gateway runs ---------------------------------------------------


@contextlib.asynccontextmanager
async def gateway_with_store(
    url: str,
    auth: AuthConfig = AuthConfig(),  # noqa: B008 - immutable
    host: str = "127.0.0.1",
) -> AsyncIterator[httpx2.AsyncClient]:
    """Run a gateway with a store and two models on one server. Yields a client without a key."""
    async with fake_upstream() as server:
        replicas = [ReplicaConfig(url=server.url, kind="openai", model="rough")]
        config = GatewayConfig(
            host=host,
            port=0,
            models=[ModelConfig(name=name, replicas=replicas) for name in ("big", "small")],
            store=StoreConfig(url=url),
            auth=auth,
        )
        async with (
            serve_gateway(config) as (_, base_url),
            httpx2.AsyncClient(base_url=base_url, timeout=TIMEOUT_S) as client,
        ):
            yield client


async def stream_completion(client: httpx2.AsyncClient, key: str, model: str) -> str:
    """Stream a completion with the OpenAI SDK and return its text."""
    async with open_sdk_client(str(client.base_url).rstrip("/"), key) as openai_client:
        stream = await openai_client.completions.create(
            model=model, prompt="Say", max_tokens=3, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def wait_for_status(
    client: httpx2.AsyncClient, headers: dict[str, str], status: int, interval_s: float
) -> None:
    """Wait until /v1/models has this status. The gateway reads changed accounts once per second."""
    async with asyncio.timeout(TIMEOUT_S):
        while (await client.get("/v1/models", headers=headers)).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(interval_s)


async def test_key_created_by_admin_api_is_required_scoped_and_counted(url: str) -> None:
    async with gateway_with_store(url) as client:
        assert await stream_completion(client, "anything", "small"), "no key exists yet"
        created = await client.post("/admin/organisations", json={"name": "acme"})
        body = {"organisation": created.json()["id"], "name": "chat"}
        project = (await client.post("/admin/projects", json=body)).json()["id"]
        admin = {"project": project, "name": "admin", "role": "admin"}
        admin_key = (await client.post("/admin/keys", json=admin)).json()["key"]
        client.headers["authorization"] = f"Bearer {admin_key}"
        scoped = {"project": project, "name": "app", "models": ["big"]}
        key = (await client.post("/admin/keys", json=scoped)).json()

        assert await stream_completion(client, key["key"], "big")
        with pytest.raises(openai.PermissionDeniedError, match="may not use"):
            await stream_completion(client, key["key"], "small")
        with pytest.raises(openai.AuthenticationError, match="key is unknown"):
            await stream_completion(client, "anything", "big")

        await client.post(f"/admin/keys/{key['id']}/revoke")
        with pytest.raises(openai.AuthenticationError, match="may have been revoked"):
            await stream_completion(client, key["key"], "big")
        assert (await client.get("/health", headers={"authorization": ""})).status_code == 200
    store = open_store(url)
    rows = {row.key: row.requests for row in store.ledger.report(["key"])}
    store.close()
    assert rows == {key["id"]: 1, "": 1}


async def test_key_revoked_by_command_line_is_rejected_although_a_poll_failed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_organisation(url) as accounts:
        chat = {"authorization": f"Bearer {accounts.key(accounts.project('web'), 'chat')}"}
    original = Store.is_current
    failures: list[bool] = []

    def is_current(store: Store, snapshot: AccountSnapshot) -> bool:
        if failures:
            return original(store, snapshot)
        failures.append(True)
        raise RuntimeError("can't start new thread")

    async with gateway_with_store(url) as client, asyncio.timeout(TIMEOUT_S):
        assert (await client.get("/v1/models", headers=chat)).status_code == 200
        monkeypatch.setattr("argosy.gateway.event_loop.RETRY_INTERVAL_S", 0.01)
        monkeypatch.setattr(Store, "is_current", is_current)
        await until(lambda: failures)
        revoke = ["keys", "revoke", "chat", "--store", url]
        result = await asyncio.to_thread(CliRunner().invoke, app, revoke)
        assert result.exit_code == 0, result.output
        await wait_for_status(client, chat, 401, POLL_INTERVAL_S)


async def test_all_forwarded_for_lines_are_read(url: str) -> None:
    """Each proxy may add a line. With two proxies the last line names only a proxy."""
    with open_organisation(url) as accounts:
        key = accounts.key(accounts.project("web"), networks=["127.0.0.0/8"])
    auth = AuthConfig(trusted_proxies=("127.0.0.0/8",))
    async with gateway_with_store(url, auth) as client:
        authorization = [("authorization", f"Bearer {key}")]
        for hops, status in (
            (["127.0.0.2"], 200),
            (["198.51.100.7, 127.0.0.2"], 403),
            (["198.51.100.7", "127.0.0.2"], 403),
            (["127.0.0.3", "198.51.100.7"], 403),
            (["127.0.0.3", "127.0.0.2"], 200),
        ):
            headers = [*authorization, *(("x-forwarded-for", hop) for hop in hops)]
            assert (await client.get("/v1/models", headers=headers)).status_code == status, hops
        assert (await client.get("/v1/models", headers=authorization * 2)).status_code == 401


def test_unreadable_usage_log_is_named_in_error(tmp_path: Path, url: str) -> None:
    usage_file = tmp_path / "argosy.db.usage" / "1.usage"
    usage_file.mkdir(parents=True)
    path = tmp_path / "gateway.yaml"
    models = "models: [{name: m, replicas: [{url: 'http://127.0.0.1:1'}]}]"
    path.write_text(f"port: 0\n{models}\nstore: {{url: '{url}'}}")
    result = CliRunner().invoke(app, ["gateway", "--config", str(path)])
    assert result.exit_code == 2
    assert f"{usage_file}: Is a directory" in result.output


async def test_public_listener_without_keys_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match="argosy keys create"):
        async with gateway_with_store(url, host="0.0.0.0"):  # noqa: S104 - must be rejected
            pass
