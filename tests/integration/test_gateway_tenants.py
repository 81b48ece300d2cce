"""A whole gateway with a store: what tenants and operators see of keys, limits, the ledger and explanations."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tests.integration.test_metrics import value
from tests.support.fake_engine import FakeEngine, Script
from tests.support.replica_servers import MODEL, serve
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import GatewayConfig, GatewayServer, ModelConfig, ReplicaConfig
from argosy.gateway.request_trace import ExplainConfig
from argosy.store import Price, Project, Store, StoreConfig, UsageRecord, open_store

TOKENS = list(range(100, 130))
BODY: dict[str, Any] = {
    "model": "big",
    "messages": [{"role": "user", "content": "Tell me a story"}],
    "max_tokens": 30,
}
CHATS = "/v1/chat/completions"
HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Shop:
    """A gateway in front of a scripted replica, and its store with two tenants."""

    url: str
    server: GatewayServer
    running: asyncio.Task[None]
    store: Store
    engine: FakeEngine
    web: Project
    other: Project
    """Before the other, and with prompts that its organisation may share."""
    keys: dict[str, str]
    """Plain keys of callers of both tenants, and an admin's."""

    def client(self, who: str | None) -> httpx2.AsyncClient:
        headers = {} if who is None else {"authorization": f"Bearer {self.keys[who]}"}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=30)

    async def rows(self, count: int) -> list[UsageRecord]:
        """The ledger's, once there are so many."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            rows = [row for some in self.store.ledger.iter_records() for row in some]
            if len(rows) >= count:
                return rows
            await asyncio.sleep(0.05)
        raise AssertionError(f"there are not {count} rows")


@contextlib.asynccontextmanager
async def shop(
    folder: Path, tokenizer: Tokenizer, *, daily: int = 1000, explained_s: float = 3600.0
) -> AsyncIterator[Shop]:
    """The tenant "web" may have `daily` output tokens. Its terms name the model by an alias."""
    store_url = f"sqlite:///{folder / 'argosy.db'}"
    store = open_store(store_url)
    store.migrate()
    accounts, actor = store.accounts, "test"
    acme = accounts.create_organisation("acme", actor=actor)
    web = accounts.create_project(acme.id, "web", actor=actor)
    other = accounts.create_project(
        acme.id, "other", tier="premium", weight=2.5, share_cache=True, actor=actor
    )
    keys = {
        "web": accounts.create_key(web.id, "web", actor=actor)[1],
        "other": accounts.create_key(other.id, "other", actor=actor)[1],
        "small": accounts.create_key(web.id, "small", models=("small",), actor=actor)[1],
        "admin": accounts.create_key(other.id, "admin", role="admin", scope="gateway", actor=actor)[
            1
        ],
    }
    terms, alias = store.limits_and_prices, "largest"
    terms.set_limit(
        "project", web.id, "output_tokens", daily, window="day", model=alias, actor=actor
    )
    terms.set_price(Price(model=alias, input=5, cached_input=1, output=20), actor=actor)
    engine = FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length"))
    async with serve(engine) as served:
        config = GatewayConfig(
            port=0,
            models=[
                ModelConfig(
                    name="big",
                    aliases=("largest",),
                    replicas=[ReplicaConfig(url=served.url, model=MODEL)],
                )
            ],
            store=StoreConfig(url=store_url),
            explain=ExplainConfig(retention_s=explained_s),
            drain_deadline_s=0.5,
        )
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = GatewayServer(config, url.set_result)
        running = asyncio.create_task(server.run())
        try:
            waited: set[asyncio.Future[Any]] = {running, url}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            yield Shop(url.result(), server, running, store, engine, web, other, keys)
        finally:
            server.stop()
            await asyncio.gather(running, return_exceptions=True)
            store.close()


async def test_who_may_come_in(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with shop(tmp_path, tokenizer) as here:
        base = f"{here.url}/v1"
        async with openai.AsyncOpenAI(
            base_url=base, api_key="sk-argosy-nobody", max_retries=0
        ) as sdk:
            with pytest.raises(openai.AuthenticationError):
                await sdk.chat.completions.create(model="big", messages=HELLO)
        async with openai.AsyncOpenAI(
            base_url=base, api_key=here.keys["small"], max_retries=0
        ) as sdk:
            with pytest.raises(openai.PermissionDeniedError):
                await sdk.chat.completions.create(model="big", messages=HELLO)
            assert [model.id async for model in await sdk.models.list()] == []
        async with openai.AsyncOpenAI(base_url=base, api_key=here.keys["web"]) as sdk:
            answer = await sdk.chat.completions.create(model="largest", messages=HELLO)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 30
            assert {model.id async for model in await sdk.models.list()} == {"big", "largest"}
        async with here.client(None) as client:
            assert (await client.post(CHATS, json=BODY)).status_code == 401
            assert (await client.get("/metrics")).status_code == 401
            assert (await client.get("/ready")).status_code == 200
        (request,) = here.engine.requests
        assert request.tenant == here.web.id
        (row,) = await here.rows(1)
        assert (row.project, row.status, row.output_tokens) == (here.web.id, "completed", 30)


async def test_a_replica_is_told_who_shares_a_requests_prompt_and_who_is_served_first(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with shop(tmp_path, tokenizer) as here:
        for who in ("web", "other"):
            async with here.client(who) as client:
                assert (await client.post(CHATS, json=BODY)).status_code == 200
        web, other = here.web, here.other
        assert [(r.tenant, r.cache_domain, r.tier, r.weight) for r in here.engine.requests] == [
            (web.id, web.id, 1, 1.0),
            (other.id, other.organisation, 0, 2.5),
        ]


async def test_a_limit_ends_a_stream_and_the_ledger_has_what_was_delivered(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with shop(tmp_path, tokenizer, daily=20) as here:
        async with openai.AsyncOpenAI(
            base_url=f"{here.url}/v1", api_key=here.keys["web"], max_retries=0
        ) as sdk:
            finish, tokens = "", 0
            async for chunk in await sdk.chat.completions.create(
                model="big",
                messages=HELLO,
                max_tokens=30,
                stream=True,
                stream_options={"include_usage": True},
            ):
                if chunk.choices and chunk.choices[0].finish_reason:
                    finish = str(chunk.choices[0].finish_reason)
                if chunk.usage:
                    tokens = chunk.usage.completion_tokens
                answer_id = chunk.id
            assert finish == "limit"
            assert 20 <= tokens < 30
            with pytest.raises(openai.RateLimitError) as full:
                await sdk.chat.completions.create(model="big", messages=HELLO)
            assert full.value.code == "rate_limit_exceeded"
            later = full.value.response.headers
            assert int(later["retry-after"]) * 1000 >= int(later["retry-after-ms"]) > 0
            name = full.value.response.headers["x-argosy-request"]
        async with here.client("admin") as client:
            told = (await client.get(f"/admin/requests/{name}")).json()
            assert (told["status"], told["limits"][0]["limit"]) == ("refused", 20)
            told = (await client.get(f"/admin/requests/{answer_id}")).json()
            assert (told["status"], told["finish_reasons"]) == ("stopped", {"0": "limit"})
            assert [limit["fits"] for limit in told["limits"]] == [True, False]
            text = (await client.get("/metrics")).text
        assert value(text, "argosy_gateway_limit_rejections_total", unit="output_tokens") == 1
        (stopped,) = await here.rows(1)  # what was refused has none
        assert stopped.status == "stopped"
        assert stopped.request == answer_id
        assert stopped.output_tokens == tokens
        fresh = stopped.input_tokens - stopped.cached_tokens
        cost = fresh * 5 + stopped.cached_tokens + tokens * 20
        assert stopped.nano_dollars == cost


async def test_a_request_is_explained_to_its_tenant_and_to_operators(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with shop(tmp_path, tokenizer) as here:
        async with here.client("web") as client:
            name = (await client.post(CHATS, json=BODY)).json()["id"]
            told = (await client.get(f"/admin/requests/{name}")).json()
        assert (told["caller"]["project"], told["caller"]["tier"]) == (here.web.id, here.web.tier)
        assert told["status"] == "completed"
        assert told["tokens"]["output"] == 30
        assert told["ledger"]["nano_dollars"] > 0
        assert told["attempts"][0]["candidates"]
        async with here.client("other") as client:
            assert (await client.get(f"/admin/requests/{name}")).status_code == 404
        async with here.client("admin") as client:
            assert (await client.get(f"/admin/requests/{name}")).json() == told
        arguments = ["explain", name, "--url", here.url, "--key", here.keys["web"]]
        shown = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert shown.exit_code == 0, shown.output
        assert "completed" in shown.output
        (ledger,) = [line for line in shown.output.splitlines() if line.startswith("ledger: $")]
        assert ledger.endswith("per million tokens")  # in a pipe a line is as long as it must be
        arguments[-1] = here.keys["other"]
        refused = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert refused.exit_code == 2
        assert "has no record of the request" in refused.output


async def test_a_request_is_explained_no_longer_than_it_is_to_be_though_no_other_comes(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with shop(tmp_path, tokenizer, explained_s=0.0) as here, here.client("web") as client:
        name = (await client.post(CHATS, json=BODY)).json()["id"]
        await here.rows(1)  # it has ended
        assert (await client.get(f"/admin/requests/{name}")).status_code == 404


async def test_metrics_are_for_those_who_look_after_the_gateway(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with shop(tmp_path, tokenizer) as here:
        async with here.client("web") as client:
            await client.post(CHATS, json=BODY | {"stream": True})
            assert (await client.get("/metrics")).status_code == 403
        async with here.client("admin") as client:
            text = (await client.get("/metrics")).text
        tenant = {"tenant": here.web.id, "model": "big"}
        assert value(text, "argosy_gateway_tokens_total", kind="output", **tenant) == 30
        assert value(text, "argosy_gateway_cost_dollars_total", **tenant) > 600e-9
        assert value(text, "argosy_gateway_requests_total", status="completed", **tenant) == 1
        assert value(text, "argosy_gateway_inter_token_latency_seconds_count") > 0
        assert value(text, "argosy_gateway_replica_status", status="ready") == 1


async def test_what_does_not_end_before_the_gateway_leaves_is_counted(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with shop(tmp_path, tokenizer) as here:
        here.engine.script = lambda _: Script(list(TOKENS), pause_after=5)
        async with (
            here.client("web") as client,
            client.stream("POST", CHATS, json=BODY | {"stream": True}) as answer,
        ):
            told = answer.aiter_bytes()
            data = await anext(told)
            while data.count(b'"content"') < 6:  # five tokens, and the role
                data += await anext(told)
            here.server.stop()
            await here.running
            last = b"".join([piece async for piece in told])
            assert b'"code":"draining"' in last
            assert b"[DONE]" not in last
        (row,) = await here.rows(1)
        assert (row.status, row.output_tokens) == ("failed", 5)


async def test_keys_are_made_and_revoked_while_the_gateway_runs(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with shop(tmp_path, tokenizer) as here:
        async with here.client("admin") as client:
            body = {"project": here.web.id, "name": "new"}
            made = (await client.post("/admin/keys", json=body)).json()
        headers = {"authorization": f"Bearer {made['key']}"}
        async with httpx2.AsyncClient(base_url=here.url, headers=headers) as client:
            while (await client.get("/v1/models")).status_code != 200:  # noqa: ASYNC110 - it looks each second
                await asyncio.sleep(0.05)
            key = next(k for k in here.store.accounts.list_keys() if k.name == "new")
            here.store.accounts.revoke_key(key.id, actor="test")
            while (await client.get("/v1/models")).status_code == 200:  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.05)


async def test_nobody_is_let_in_from_elsewhere_before_there_are_keys() -> None:
    behind = [ReplicaConfig(url="http://127.0.0.1:9")]
    config = GatewayConfig(
        host="0.0.0.0",  # noqa: S104 - that is the point
        port=0,
        models=[ModelConfig(name="big", replicas=behind)],
    )
    with pytest.raises(ValueError, match="no API keys yet"):
        await GatewayServer(config, lambda _: None).run()
