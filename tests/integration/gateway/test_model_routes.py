"""Model routes in a gateway with accounts: serving replica, access, limits, prices, usage and traces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
from tests.integration.test_metrics import value
from tests.support.fake_upstream import FakeUpstream, fake_upstream
from tests.support.gateway_client import serve_gateway
from tests.support.migrated_store import open_migrated_store
from tests.support.waiting import until
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig, RouteConfig, TrafficTarget
from argosy.store import Price, Project, Store, StoreConfig, UsageRecord

BODY = {"model": "default", "prompt": "Say something", "max_tokens": 3, "stream": True}
BETA = {"x-beta": "1"}
BY_HEADER = RouteConfig(name="beta", model="qwen", headers=BETA, target_model="qwen-next")


@dataclass(frozen=True)
class RoutedGateway:
    """A gateway with the models `qwen` and `qwen-next`, each on one server, and two projects of organisation acme."""

    base: str
    store: Store
    qwen: FakeUpstream
    next: FakeUpstream
    web: Project
    app: Project
    """A project of the premium tier."""
    keys: dict[str, str]

    def client(self, key_name: str = "web") -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {self.keys[key_name]}"}
        return httpx2.AsyncClient(base_url=self.base, headers=headers, timeout=30)

    async def serving_model(self, key_name: str = "web", **headers: str) -> str:
        """Send a request and return the model whose server received it."""
        before = len(self.qwen.requests), len(self.next.requests)
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        async with self.client(key_name) as client:
            response = await client.post("/v1/completions", json=BODY, headers=sent)
        assert response.status_code == 200, response.text
        after = len(self.qwen.requests), len(self.next.requests)
        return {(1, 0): "qwen", (0, 1): "qwen-next"}[after[0] - before[0], after[1] - before[1]]

    async def wait_for_records(self, count: int) -> list[UsageRecord]:
        """Wait for this many usage records and return them."""

        def read() -> list[UsageRecord]:
            return [record for page in self.store.ledger.iter_records() for record in page]

        await until(lambda: len(read()) >= count)
        return read()


@contextlib.asynccontextmanager
async def run_routed_gateway(
    folder: Path, *routes: RouteConfig, more_models: Sequence[ModelConfig] = ()
) -> AsyncIterator[RoutedGateway]:
    """Run a gateway with different prices for each model, where "web" may send 3 requests to `qwen-next` per day."""
    url = f"sqlite:///{folder}/argosy.db"
    store = open_migrated_store(url)
    accounts, limits_and_prices, actor = store.accounts, store.limits_and_prices, "test"
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
    limits_and_prices.set_price(Price(model="qwen", input=0, cached_input=0, output=1), actor=actor)
    limits_and_prices.set_price(
        Price(model="qwen-next", input=0, cached_input=0, output=100), actor=actor
    )
    limits_and_prices.set_limit(
        "project", web.id, "requests", 3, window="day", model="qwen-next", actor=actor
    )
    async with fake_upstream() as qwen_server, fake_upstream() as next_server:
        next_server.token_ids = [1, 2, 3]
        models = [
            ModelConfig(
                name=name,
                aliases=(alias,),
                replicas=[ReplicaConfig(url=server.url, kind="openai", model="rough")],
            )
            for name, alias, server in (
                ("qwen", "default", qwen_server),
                ("qwen-next", "latest", next_server),
            )
        ]
        config = GatewayConfig(
            port=0,
            models=[*models, *more_models],
            routes=list(routes),
            store=StoreConfig(url=url),
        )
        async with serve_gateway(config) as (_, gateway_url):
            yield RoutedGateway(gateway_url, store, qwen_server, next_server, web, premium, keys)
        store.close()


async def test_routes_by_header_and_tier_apply_in_order(tmp_path: Path) -> None:
    routes = (
        RouteConfig(headers={"X-Stable": "*"}, target_model="qwen"),
        RouteConfig(headers={"x-beta": "1", "x-team": "blue"}, target_model="latest"),
        RouteConfig(model="default", tiers=("premium",), target_model="qwen-next"),
    )
    async with run_routed_gateway(tmp_path, *routes) as routed:
        assert await routed.serving_model() == "qwen"
        assert await routed.serving_model(x_beta="1") == "qwen"
        assert await routed.serving_model(x_beta="1", X_Team="blue") == "qwen-next"
        assert await routed.serving_model(x_beta="1", x_team="blue", x_stable="") == "qwen"
        assert await routed.serving_model("app") == "qwen-next"
        assert await routed.serving_model("app", x_stable="yes") == "qwen"


async def test_flag_of_key_or_project_selects_route(tmp_path: Path) -> None:
    async with run_routed_gateway(
        tmp_path, RouteConfig(flags=("new-model",), target_model="qwen-next")
    ) as routed:
        accounts = routed.store.accounts
        _, routed.keys["new"] = accounts.create_key(
            routed.web.id, "new", flags=["new-model"], actor="test"
        )
        accounts.change_project(routed.app.id, flags=["old", "new-model"], actor="test")
        async with routed.client("new") as client:
            while (await client.get("/v1/models")).status_code != 200:  # noqa: ASYNC110 - accounts are read every second
                await asyncio.sleep(0.05)
        assert await routed.serving_model("web") == "qwen"
        assert await routed.serving_model("new") == "qwen-next"
        assert await routed.serving_model("app") == "qwen-next"


async def test_tenant_created_later_matches_route(tmp_path: Path) -> None:
    routes = (RouteConfig(tenants=("acme/app", "zeta"), target_model="qwen-next"),)
    async with run_routed_gateway(tmp_path, *routes) as routed:
        assert await routed.serving_model("web") == "qwen"
        assert await routed.serving_model("app") == "qwen-next"
        accounts = routed.store.accounts
        zeta = accounts.create_organisation("zeta", actor="test")
        project = accounts.create_project(zeta.id, "all", actor="test")
        routed.keys["zeta"] = accounts.create_key(project.id, "zeta", actor="test")[1]
        async with routed.client("zeta") as client:
            while (await client.get("/v1/models")).status_code != 200:  # noqa: ASYNC110 - accounts are read every second
                await asyncio.sleep(0.05)
        assert await routed.serving_model("zeta") == "qwen-next"


async def test_access_is_checked_for_requested_model(tmp_path: Path) -> None:
    async with run_routed_gateway(tmp_path, BY_HEADER) as routed:
        assert await routed.serving_model("scoped", **BETA) == "qwen-next"
        async with routed.client("scoped") as client:
            body = BODY | {"model": "qwen-next"}
            response = await client.post("/v1/completions", json=body, headers=BETA)
            assert (response.status_code, response.json()["error"]["code"]) == (
                403,
                "model_not_allowed",
            )
            models = (await client.get("/v1/models", headers=BETA)).json()["data"]
            assert {card["id"]: card["root"] for card in models} == {
                "qwen": "qwen",
                "default": "qwen",
            }


async def test_limits_prices_and_metrics_are_those_of_serving_model(
    tmp_path: Path,
) -> None:
    async with run_routed_gateway(tmp_path, BY_HEADER) as routed:
        async with routed.client() as client:
            responses = [
                await client.post("/v1/completions", json=BODY, headers=BETA) for _ in range(4)
            ]
            assert [response.status_code for response in responses] == [200, 200, 200, 429]
            assert "'qwen-next'" in responses[3].json()["error"]["message"]
            response_without_route = await client.post("/v1/completions", json=BODY)
            assert "x-ratelimit-limit-requests" not in response_without_route.headers
        records = await routed.wait_for_records(4)
        assert sorted((record.model, record.nano_dollars) for record in records) == [
            ("qwen", 3),
            *[("qwen-next", 300)] * 3,
        ]
        async with routed.client("admin") as client:
            text = (await client.get("/metrics")).text
        for model, completed in (("qwen", 1), ("qwen-next", 3)):
            counted = value(text, "argosy_gateway_requests_total", status="completed", model=model)
            assert counted == completed


async def test_usage_report_has_requested_model_route_and_replica(tmp_path: Path) -> None:
    async with run_routed_gateway(tmp_path, BY_HEADER) as routed, routed.client("admin") as client:
        for requested_model, headers in (
            ("default", BETA),
            ("qwen", BETA),
            ("default", {}),
            ("latest", {}),
        ):
            body = BODY | {"model": requested_model}
            response = await client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200
        await routed.wait_for_records(4)
        report_query = {"group_by": "asked,route,model,replica"}
        report = (await client.get("/admin/usage", params=report_query)).json()["data"]
        qwen_server, next_server = routed.qwen.url, routed.next.url
        assert [
            (
                record["asked"],
                record["route"],
                record["model"],
                record["replica"],
                record["requests"],
            )
            for record in report
        ] == [
            ("default", "", "qwen", qwen_server, 1),
            ("default", "beta", "qwen-next", next_server, 1),
            ("latest", "", "qwen-next", next_server, 1),
            ("qwen", "beta", "qwen-next", next_server, 1),
        ]
        for query, requests in (
            ({"asked": "default"}, 2),
            ({"route": "beta"}, 2),
            ({"route": ""}, 2),
            ({"replica": next_server}, 3),
            ({"replica": next_server, "asked": "latest", "route": "beta"}, 0),
        ):
            (group,) = (await client.get("/admin/usage", params=query)).json()["data"]
            assert group["requests"] == requests, query
            exported = await client.get("/admin/usage.csv", params=query)
            assert len(exported.text.splitlines()) == 1 + requests


async def test_trace_has_requested_model_and_route(tmp_path: Path) -> None:
    async with run_routed_gateway(tmp_path, BY_HEADER) as routed, routed.client() as client:
        for headers, model, route in ((BETA, "qwen-next", "beta"), ({}, "qwen", None)):
            response = await client.post("/v1/completions", json=BODY, headers=headers)
            name = response.headers["x-argosy-request"]
            trace = (await client.get(f"/admin/requests/{name}")).json()
            assert (trace["model"], trace["asked"], trace["route"]) == (model, "default", route)
            assert trace["limits" if route else "ledger"]
            arguments = ["explain", name, "--url", routed.base, "--key", routed.keys["web"]]
            result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
            route_text = f" (for default{', by beta' if route else ''})"
            assert f"to {model}{route_text}, streamed" in " ".join(result.output.split())


async def test_tokenize_requests_are_routed_and_limited(tmp_path: Path) -> None:
    async with run_routed_gateway(tmp_path, BY_HEADER) as routed, routed.client() as client:
        body = {"model": "qwen", "prompt": "Say"}
        assert (
            await client.post("/tokenize", json=body)
        ).status_code == 404  # the server of `qwen` does not support it
        for remaining in ("2", "1", "0"):
            response = await client.post("/tokenize", json=body, headers=BETA)
            assert response.json() == {"tokens": [1, 2, 3]}
            assert response.headers["x-ratelimit-remaining-requests"] == remaining
        assert (await client.post("/tokenize", json=body, headers=BETA)).status_code == 429


async def test_models_answer_for_another_by_weight_and_in_place_of_one_that_is_down(
    tmp_path: Path,
) -> None:
    down = ModelConfig(
        name="down",
        fallback_models=("latest",),
        replicas=[ReplicaConfig(url="http://127.0.0.1:1", kind="openai")],
    )
    chat = ModelConfig(
        name="chat", traffic=(TrafficTarget(model="qwen"), TrafficTarget(model="qwen-next"))
    )
    async with (
        run_routed_gateway(tmp_path, more_models=(chat, down)) as routed,
        routed.client("app") as client,
    ):

        async def ask(model: str, **fields: str) -> httpx2.Response:
            response = await client.post(
                "/v1/completions", json=BODY | {"model": model, "prompt": "x"} | fields
            )
            assert response.status_code == 200, response.text
            return response

        by_user = [
            (await ask("chat", user=f"user {number % 8}")).headers["x-argosy-model"]
            for number in range(16)
        ]
        assert by_user[:8] == by_user[8:]
        counts = len(routed.qwen.requests), len(routed.next.requests)
        assert counts == (by_user.count("qwen"), by_user.count("qwen-next"))
        assert all(counts)

        response = await ask("down")
        assert response.headers["x-argosy-model"] == "qwen-next"
        assert len(routed.next.requests) == counts[1] + 1
        assert "x-argosy-model" not in (await ask("qwen")).headers
        records = await routed.wait_for_records(18)
        assert {(each.asked, each.route, each.model, each.nano_dollars) for each in records} == {
            ("chat", "traffic", "qwen", 3),
            ("chat", "traffic", "qwen-next", 300),
            ("down", "fallback_models", "qwen-next", 300),
            ("qwen", "", "qwen", 3),
        }
        request = response.headers["x-argosy-request"]
        arguments = ["explain", request, "--url", routed.base, "--key", routed.keys["app"]]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        text = " ".join(result.output.split())
        assert "to qwen-next (for down, by fallback_models), streamed" in text
        assert "qwen-next answers: down has no ready replica" in text
