"""Routes through a gateway with accounts: whose server answers, who may, what it counts as and costs, what is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
from tests.integration.test_metrics import value
from tests.support.scripted_server import Rough, rough_server
from tests.support.waiting import until
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.gateway import GatewayConfig, GatewayServer, ModelConfig, ReplicaConfig, RouteConfig
from argosy.store import Price, Project, Store, StoreConfig, UsageRecord, open_store

ASKED = {"model": "default", "prompt": "Say something", "max_tokens": 3, "stream": True}
BETA = {"x-beta": "1"}
BY_HEADER = RouteConfig(name="beta", model="qwen", headers=BETA, target_model="qwen-next")


@dataclass(frozen=True)
class World:
    """A gateway with the models `qwen` and `qwen-next`, each on a server of its own, and two projects of acme's."""

    base: str
    store: Store
    qwen: Rough
    next: Rough
    web: Project
    app: Project
    """A premium one."""
    keys: dict[str, str]

    def client(self, who: str = "web") -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {self.keys[who]}"}
        return httpx2.AsyncClient(base_url=self.base, headers=headers, timeout=30)

    async def answering(self, who: str = "web", **headers: str) -> str:
        """The model whose server answers a request, with these headers."""
        before = len(self.qwen.asked), len(self.next.asked)
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        async with self.client(who) as client:
            answer = await client.post("/v1/completions", json=ASKED, headers=sent)
        assert answer.status_code == 200, answer.text
        after = len(self.qwen.asked), len(self.next.asked)
        return {(1, 0): "qwen", (0, 1): "qwen-next"}[after[0] - before[0], after[1] - before[1]]

    async def rows(self, count: int) -> list[UsageRecord]:
        """The ledger's, once there are so many."""

        def read() -> list[UsageRecord]:
            return [row for page in self.store.ledger.iter_records() for row in page]

        await until(lambda: len(read()) >= count)
        return read()


@contextlib.asynccontextmanager
async def world(folder: Path, *routes: RouteConfig) -> AsyncIterator[World]:
    """Prices differ, and "web" may ask `qwen-next` three times a day."""
    url = f"sqlite:///{folder}/argosy.db"
    store = open_store(url)
    store.migrate()
    accounts, terms, actor = store.accounts, store.limits_and_prices, "test"
    acme = accounts.create_organisation("acme", actor=actor)
    web = accounts.create_project(acme.id, "web", actor=actor)
    premium = accounts.create_project(acme.id, "app", tier="premium", actor=actor)
    keys = {
        "web": accounts.create_key(web.id, "web", actor=actor)[1],
        "scoped": accounts.create_key(web.id, "scoped", models=("qwen",), actor=actor)[1],
        "app": accounts.create_key(premium.id, "app", actor=actor)[1],
        "admin": accounts.create_key(
            premium.id, "admin", role="admin", scope="gateway", actor=actor
        )[1],
    }
    terms.set_price(Price(model="qwen", input=0, cached_input=0, output=1), actor=actor)
    terms.set_price(Price(model="qwen-next", input=0, cached_input=0, output=100), actor=actor)
    terms.set_limit("project", web.id, "requests", 3, window="day", model="qwen-next", actor=actor)
    async with rough_server() as one, rough_server() as two:
        two.tokenize = [1, 2, 3]
        models = [
            ModelConfig(
                name=name,
                aliases=(alias,),
                replicas=[ReplicaConfig(url=server.url, kind="openai", model="rough")],
            )
            for name, alias, server in (("qwen", "default", one), ("qwen-next", "latest", two))
        ]
        config = GatewayConfig(
            port=0, models=models, routes=list(routes), store=StoreConfig(url=url)
        )
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = GatewayServer(config, ready.set_result)
        running = asyncio.create_task(server.run())
        try:
            yield World(await ready, store, one, two, web, premium, keys)
        finally:
            server.stop()
            await running
            store.close()


async def test_headers_tenants_and_tiers_lead_elsewhere_in_order(tmp_path: Path) -> None:
    routes = (
        RouteConfig(headers={"X-Stable": "*"}, target_model="qwen"),
        RouteConfig(headers={"x-beta": "1", "x-team": "blue"}, target_model="latest"),
        RouteConfig(model="default", tiers=("premium",), target_model="qwen-next"),
    )
    async with world(tmp_path, *routes) as here:
        assert await here.answering() == "qwen"
        assert await here.answering(x_beta="1") == "qwen"
        assert await here.answering(x_beta="1", X_Team="blue") == "qwen-next"
        assert await here.answering(x_beta="1", x_team="blue", x_stable="") == "qwen"
        assert await here.answering("app") == "qwen-next"
        assert await here.answering("app", x_stable="yes") == "qwen"


async def test_a_flag_of_a_key_or_a_project_leads_elsewhere(tmp_path: Path) -> None:
    async with world(tmp_path, RouteConfig(flags=("new-model",), target_model="qwen-next")) as here:
        accounts = here.store.accounts
        _, here.keys["new"] = accounts.create_key(
            here.web.id, "new", flags=["new-model"], actor="test"
        )
        accounts.change_project(here.app.id, flags=["old", "new-model"], actor="test")
        async with here.client("new") as client:
            while (await client.get("/v1/models")).status_code != 200:  # noqa: ASYNC110 - it looks each second
                await asyncio.sleep(0.05)
        assert await here.answering("web") == "qwen"
        assert await here.answering("new") == "qwen-next"
        assert await here.answering("app") == "qwen-next"


async def test_a_tenant_that_is_made_later_is_found(tmp_path: Path) -> None:
    routes = (RouteConfig(tenants=("acme/app", "zeta"), target_model="qwen-next"),)
    async with world(tmp_path, *routes) as here:
        assert await here.answering("web") == "qwen"
        assert await here.answering("app") == "qwen-next"
        accounts = here.store.accounts
        zeta = accounts.create_organisation("zeta", actor="test")
        project = accounts.create_project(zeta.id, "all", actor="test")
        here.keys["zeta"] = accounts.create_key(project.id, "zeta", actor="test")[1]
        async with here.client("zeta") as client:
            while (await client.get("/v1/models")).status_code != 200:  # noqa: ASYNC110 - it looks each second
                await asyncio.sleep(0.05)
        assert await here.answering("zeta") == "qwen-next"


async def test_leave_is_for_what_is_asked_for(tmp_path: Path) -> None:
    async with world(tmp_path, BY_HEADER) as here:
        assert await here.answering("scoped", **BETA) == "qwen-next"
        async with here.client("scoped") as client:
            asked = ASKED | {"model": "qwen-next"}
            refused = await client.post("/v1/completions", json=asked, headers=BETA)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                403,
                "model_not_allowed",
            )
            listed = (await client.get("/v1/models", headers=BETA)).json()["data"]
            assert {card["id"]: card["root"] for card in listed} == {
                "qwen": "qwen",
                "default": "qwen",
            }


async def test_limits_prices_rows_and_metrics_are_those_of_the_model_that_answers(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, BY_HEADER) as here:
        async with here.client() as client:
            answers = [
                await client.post("/v1/completions", json=ASKED, headers=BETA) for _ in range(4)
            ]
            assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
            assert "'qwen-next'" in answers[3].json()["error"]["message"]
            plain = await client.post("/v1/completions", json=ASKED)
            assert "x-ratelimit-limit-requests" not in plain.headers
        rows = await here.rows(4)
        assert sorted((row.model, row.nano_dollars) for row in rows) == [
            ("qwen", 3),
            *[("qwen-next", 300)] * 3,
        ]
        async with here.client("admin") as client:
            text = (await client.get("/metrics")).text
        for model, completed in (("qwen", 1), ("qwen-next", 3)):
            counted = value(text, "argosy_gateway_requests_total", status="completed", model=model)
            assert counted == completed


async def test_the_ledger_tells_what_was_asked_for_which_route_decided_and_which_replica_answered(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, BY_HEADER) as here, here.client("admin") as client:
        for asked, headers in (("default", BETA), ("qwen", BETA), ("default", {}), ("latest", {})):
            body = ASKED | {"model": asked}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
        await here.rows(4)
        query = {"group_by": "asked,route,model,replica"}
        report = (await client.get("/admin/usage", params=query)).json()["data"]
        one, two = here.qwen.url, here.next.url
        assert [
            (row["asked"], row["route"], row["model"], row["replica"], row["requests"])
            for row in report
        ] == [
            ("default", "", "qwen", one, 1),
            ("default", "beta", "qwen-next", two, 1),
            ("latest", "", "qwen-next", two, 1),
            ("qwen", "beta", "qwen-next", two, 1),
        ]
        for which, requests in (
            ({"asked": "default"}, 2),
            ({"route": "beta"}, 2),
            ({"route": ""}, 2),
            ({"replica": two}, 3),
            ({"replica": two, "asked": "latest", "route": "beta"}, 0),
        ):
            (total,) = (await client.get("/admin/usage", params=which)).json()["data"]
            assert total["requests"] == requests, which
            exported = await client.get("/admin/usage.csv", params=which)
            assert len(exported.text.splitlines()) == 1 + requests


async def test_an_explanation_tells_what_was_asked_for_and_which_route_decided(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, BY_HEADER) as here, here.client() as client:
        for headers, model, route in ((BETA, "qwen-next", "beta"), ({}, "qwen", None)):
            answer = await client.post("/v1/completions", json=ASKED, headers=headers)
            name = answer.headers["x-argosy-request"]
            told = (await client.get(f"/admin/requests/{name}")).json()
            assert (told["model"], told["asked"], told["route"]) == (model, "default", route)
            assert told["limits" if route else "ledger"]
            arguments = ["explain", name, "--url", here.base, "--key", here.keys["web"]]
            shown = await asyncio.to_thread(CliRunner().invoke, app, arguments)
            led = f" (for default{', by beta' if route else ''})"
            assert f"to {model}{led}, streamed" in " ".join(shown.output.split())


async def test_what_generates_nothing_goes_the_same_way(tmp_path: Path) -> None:
    async with world(tmp_path, BY_HEADER) as here, here.client() as client:
        body = {"model": "qwen", "prompt": "Say"}
        assert (await client.post("/tokenize", json=body)).status_code == 404  # the one of `qwen`
        for left in ("2", "1", "0"):
            answer = await client.post("/tokenize", json=body, headers=BETA)
            assert answer.json() == {"tokens": [1, 2, 3]}
            assert answer.headers["x-ratelimit-remaining-requests"] == left
        assert (await client.post("/tokenize", json=body, headers=BETA)).status_code == 429
