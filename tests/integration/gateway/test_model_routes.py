"""Model routes in a gateway with accounts: serving replica, access, limits, prices, usage and traces."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.integration.test_metrics import value
from tests.support.fake_upstream import (
    FakeUpstream,
    UpstreamRequest,
    UpstreamScript,
    build_response,
    fake_upstream,
    respond_500,
    respond_with,
    respond_with_tokens,
)
from tests.support.gateway_client import serve_gateway
from tests.support.gateway_processes import OrganisationAccounts, open_organisation
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.deployment import (
    CacheRule,
    CascadeConfig,
    GatewayConfig,
    JudgeConfig,
    ModelConfig,
    ReplicaConfig,
    RouteConfig,
    TrafficTarget,
)
from argosy.protocol import format_event
from argosy.store import Price, StoreConfig

BODY = {"model": "default", "prompt": "Say something", "max_tokens": 3, "stream": True}
BETA = {"x-beta": "1"}
BY_HEADER = RouteConfig(name="beta", model="qwen", headers=BETA, target_model="qwen-next")


@dataclass(frozen=True)
class RoutedGateway:
    """A gateway with the models `qwen` and `qwen-next`, each on one server."""

    base: str
    accounts: OrganisationAccounts
    qwen: FakeUpstream
    next: FakeUpstream
    keys: dict[str, str]

    def client(self, key_name: str = "web") -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {self.keys[key_name]}"}
        return httpx2.AsyncClient(base_url=self.base, headers=headers, timeout=30)

    async def explain(self, request: str, key_name: str) -> str:
        """Return what `argosy explain` prints, with single spaces."""
        arguments = ["explain", request, "--url", self.base, "--key", self.keys[key_name]]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        (ledger,) = [line for line in result.output.splitlines() if line.startswith("ledger: $")]
        assert ledger.endswith("per million tokens"), "a pipe receives unwrapped lines"
        return " ".join(result.output.split())


@contextlib.asynccontextmanager
async def run_routed_gateway(
    folder: Path,
    *routes: RouteConfig,
    more_models: Sequence[ModelConfig] = (),
    cache_rules: Sequence[CacheRule] = (),
    budget: int | None = None,
) -> AsyncIterator[RoutedGateway]:
    """Run a gateway with different prices for each model, where "web" may send 3 requests to `qwen-next` per day."""
    url = f"sqlite:///{folder}/argosy.db"
    with open_organisation(url) as accounts:
        web, premium = accounts.project("web"), accounts.project("app", tier="premium")
        keys = {
            "web": accounts.key(web),
            "app": accounts.key(premium),
            "admin": accounts.key(premium, "admin", role="admin", scope="gateway"),
        }
        terms = accounts.store.limits_and_prices
        for model, output in (("qwen", 1), ("qwen-next", 100)):
            price = Price(model=model, input=0, cached_input=0, output=output)
            terms.set_price(price, actor="test")
        terms.set_limit(
            *("project", web, "requests", 3), window="day", model="qwen-next", actor="test"
        )
        if budget is not None:
            accounts.limit(premium, "nano_dollars", budget, "day")
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
                cache_rules=list(cache_rules),
                store=StoreConfig(url=url),
            )
            async with serve_gateway(config) as (_, gateway_url):
                yield RoutedGateway(gateway_url, accounts, qwen_server, next_server, keys)


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
        records = await routed.accounts.wait_for_rows(4)
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
        await routed.accounts.wait_for_rows(4)
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


async def test_trace_has_requested_model_and_route(tmp_path: Path) -> None:
    async with run_routed_gateway(tmp_path, BY_HEADER) as routed, routed.client() as client:
        for headers, model, route in ((BETA, "qwen-next", "beta"), ({}, "qwen", None)):
            response = await client.post("/v1/completions", json=BODY, headers=headers)
            name = response.headers["x-argosy-request"]
            trace = (await client.get(f"/admin/requests/{name}")).json()
            assert (trace["model"], trace["asked"], trace["route"]) == (model, "default", route)
            assert trace["limits" if route else "ledger"]
            route_text = f" (for default{', by beta' if route else ''})"
            assert f"to {model}{route_text}, streamed" in await routed.explain(name, "web")


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
        records = await routed.accounts.wait_for_rows(18)
        assert {(each.asked, each.route, each.model, each.nano_dollars) for each in records} == {
            ("chat", "traffic", "qwen", 3),
            ("chat", "traffic", "qwen-next", 300),
            ("down", "fallback_models", "qwen-next", 300),
            ("qwen", "", "qwen", 3),
        }
        text = await routed.explain(response.headers["x-argosy-request"], "app")
        assert "to qwen-next (for down, by fallback_models), streamed" in text
        assert "qwen-next answers: down has no ready replica" in text


FULL = respond_with(build_response(b"{}", "application/json", 429, "retry-after: 30"))
WRONG_KEY = respond_with(build_response(b"{}", "application/json", 401))


async def cut_before_output(request: UpstreamRequest) -> None:
    """Start a stream as a server does that fails before the first token."""
    request.start_stream()
    await request.writer.drain()
    request.writer.close()


@pytest.mark.parametrize(
    ("script", "is_stream", "named"),
    [
        (respond_500, False, "qwen-next"),
        (WRONG_KEY, True, "qwen-next"),
        (FULL, True, "qwen-next"),
        (cut_before_output, True, None),  # the head was sent
    ],
    ids=["500", "401", "429", "cut"],
)
async def test_fallback_answers_the_requests_that_the_only_replica_fails(
    tmp_path: Path, script: UpstreamScript, is_stream: bool, named: str | None
) -> None:
    async with fake_upstream(script) as failing:
        weak = ModelConfig(
            name="weak",
            fallback_models=("down", "qwen-next", "qwen"),
            replicas=[ReplicaConfig(url=failing.url, kind="openai", model="rough", max_requests=1)],
        )
        down = ModelConfig(
            name="down", replicas=[ReplicaConfig(url="http://127.0.0.1:1", kind="openai")]
        )
        async with (
            run_routed_gateway(tmp_path, more_models=(weak, down)) as routed,
            routed.client("app") as client,
        ):
            body = BODY | {"model": "weak", "stream": is_stream}
            post = partial(client.post, "/v1/completions", json=body)
            # One is sent, and two are queued while the replica fails it.
            responses = [*await asyncio.gather(*(post() for _ in range(3))), await post()]
            assert [response.status_code for response in responses] == [200] * 4
            answering = [response.headers.get("x-argosy-model") for response in responses]
            assert answering == [named] * 3 + ["qwen-next"]
            records = await routed.accounts.wait_for_rows(4)
            assert {
                (each.asked, each.route, each.model, each.nano_dollars) for each in records
            } == {("weak", "fallback_models", "qwen-next", 300)}
            first = responses[0].headers["x-argosy-request"]
            text = await routed.explain(first, "app")
            assert "qwen-next answers: weak could not answer; down has no ready replica" in text
            assert failing.url in text
            trace = (await client.get(f"/admin/requests/{first}")).json()
            sent_to = [attempt["replica"] for attempt in trace["attempts"]]
            assert sent_to == [failing.url, routed.next.url]
            assert failing.max_concurrent == 1


async def test_fallback_that_cannot_serve_a_request_does_not_end_its_retries(
    tmp_path: Path,
) -> None:
    async def fail_once(request: UpstreamRequest) -> None:
        await (respond_500 if len(failing.requests) == 1 else respond_with_tokens)(request)

    card = {"id": "rough", "object": "model", "max_model_len": 8}
    async with fake_upstream() as short, fake_upstream(fail_once) as failing:
        short.get_pages = lambda: {"/v1/models": {"object": "list", "data": [card]}}  # type: ignore[method-assign]
        models = [
            ModelConfig(
                name=name,
                fallback_models=fallbacks,
                replicas=[ReplicaConfig(url=server.url, kind="openai", model="rough")],
            )
            for name, fallbacks, server in (("short", (), short), ("weak", ("short",), failing))
        ]
        async with (
            run_routed_gateway(tmp_path, more_models=models) as routed,
            routed.client() as client,
        ):
            body = BODY | {"model": "weak", "prompt": [1] * 20}
            response = await client.post("/v1/completions", json=body)
            assert (response.status_code, len(failing.requests)) == (200, 2), response.text


async def test_request_errors_and_limits_of_the_fallback_are_returned(tmp_path: Path) -> None:
    invalid = respond_with(build_response(b'{"error": {"message": "no"}}', "application/json", 400))
    async with fake_upstream(invalid) as failing:
        weak = ModelConfig(
            name="weak",
            fallback_models=("qwen-next",),
            replicas=[ReplicaConfig(url=failing.url, kind="openai", model="rough")],
        )
        async with (
            run_routed_gateway(tmp_path, more_models=(weak,)) as routed,
            routed.client() as client,
        ):
            post = partial(client.post, "/v1/completions", json=BODY | {"model": "weak"})
            assert (await post()).status_code == 400
            assert not routed.next.requests
            failing.script = respond_500
            statuses = [(await post()).status_code for _ in range(4)]
            assert statuses == [200, 200, 200, 429], "a project may send 3 requests to qwen-next"


def respond_with_logprobs(logprob: float) -> UpstreamScript:
    """Return a script that generates `max_tokens` tokens of this log-probability, if the request asks for it."""

    async def respond(request: UpstreamRequest) -> None:
        count = int(str(request.body["max_tokens"]))
        found = (
            {"token_logprobs": [logprob], "tokens": ["x"]} if "logprobs" in request.body else None
        )
        usage = {"prompt_tokens": 1, "completion_tokens": count}
        if not request.body.get("stream"):
            found = found and {"token_logprobs": [logprob] * count}
            choice = {
                "index": 0,
                "text": " draft" * count,
                "finish_reason": "length",
                "logprobs": found,
            }
            request.send_json(200, {"choices": [choice], "usage": usage})
            return
        request.start_stream()
        for position in range(count):
            finish = "length" if position == count - 1 else None
            choice = {"index": 0, "text": " draft", "finish_reason": finish, "logprobs": found}
            request.send_chunk(format_event(json.dumps({"choices": [choice]}).encode()))
            await asyncio.sleep(0)
        request.end_stream(tokens=count)

    return respond


@pytest.mark.parametrize("after_tokens", [None, 2])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_cascade_answers_with_the_larger_model_what_the_smaller_one_doubts(
    tmp_path: Path, is_stream: bool, after_tokens: int | None
) -> None:
    route = RouteConfig(
        name="cheap",
        model="latest",
        target_model="qwen",
        cascade=CascadeConfig(
            min_mean_logprob=-0.5, min_token_logprob=-3.0, after_tokens=after_tokens
        ),
        sticky_s=60.0,
    )
    body = BODY | {"model": "latest", "max_tokens": 4, "stream": is_stream}
    async with (
        run_routed_gateway(tmp_path, route) as routed,
        routed.client("app") as client,
    ):

        async def ask(session: str, **more: object) -> tuple[httpx2.Response, str]:
            response = await client.post(
                "/v1/completions", json=body | {"session_id": session} | more
            )
            assert response.status_code == 200, response.text
            assert "token_logprobs" not in response.text
            return response, read_text(response.text)

        routed.qwen.script = respond_with_logprobs(-0.1)
        response, text = await ask("a")
        assert (text, response.headers["x-argosy-model"]) == (" draft" * 4, "qwen")
        assert not routed.next.requests
        routed.qwen.script = respond_with_logprobs(-1.0)
        response, text = await ask("a")
        assert (text, response.headers["x-argosy-model"]) == (" 0 1 2 3", "qwen-next")
        assert "logprobs" not in routed.next.requests[0].body
        name = response.headers["x-argosy-request"]
        trace = (await client.get(f"/admin/requests/{name}")).json()
        verdict = trace["routing"][0]["cascade"]
        assert (verdict["escalated"], verdict["mean_logprob"]) == (True, -1.0)
        assert verdict["tokens"] == (after_tokens if is_stream and after_tokens else 4)
        assert "mean log-probability -1.00 is below -0.5" in trace["route_reason"]
        assert [each["outcome"] for each in trace["attempts"]] == ["escalated", "success"]
        assert (await ask("a"))[1] == " 0 1 2 3"  # the conversation stays
        assert len(routed.qwen.requests) == 2
        assert (await ask("b", n=2, stream=False))[0].status_code == 200  # several choices
        assert len(routed.qwen.requests) == 2
        records = await routed.accounts.wait_for_rows(5)
        drafted = verdict["draft"]["output_tokens"]
        assert drafted == 4 or (is_stream and after_tokens)
        assert [
            (
                each.request == f"{name}-draft",
                each.model,
                each.route,
                each.status,
                each.nano_dollars,
            )
            for each in sorted(records, key=lambda each: (each.started_at, each.model))
        ] == [
            (False, "qwen", "cheap", "completed", 4),
            (True, "qwen", "cheap", "completed", drafted),
            (False, "qwen-next", "cheap", "completed", 400),
            (False, "qwen-next", "", "completed", 400),
            (False, "qwen-next", "", "completed", 400),
        ]
        async with routed.client("admin") as admin:
            metrics = (await admin.get("/metrics")).text
        decisions = {
            decision: value(
                metrics, "argosy_gateway_route_decisions_total", route="cheap", decision=decision
            )
            for decision in ("simple", "escalated", "not_simple")
        }
        assert decisions == {"simple": 2, "escalated": 1, "not_simple": 2}
        assert "argosy_gateway_retries_total{" not in metrics


async def test_cascade_keeps_an_answer_that_no_larger_model_can_replace(tmp_path: Path) -> None:
    """A larger model that is down is not waited for. A smaller one that fails is replaced."""
    down = ModelConfig(
        name="down", replicas=[ReplicaConfig(url="http://127.0.0.1:1", kind="openai")]
    )
    cascade = CascadeConfig(min_mean_logprob=-0.5)
    routes = [
        RouteConfig(name="kept", model="down", target_model="qwen", cascade=cascade),
        RouteConfig(name="failing", model="latest", target_model="qwen", cascade=cascade),
    ]
    async with (
        run_routed_gateway(tmp_path, *routes, more_models=(down,)) as routed,
        routed.client("app") as client,
    ):
        routed.qwen.script = respond_with_logprobs(-1.0)
        response = await client.post("/v1/completions", json=BODY | {"model": "down"})
        assert read_text(response.text) == " draft" * 3
        name = response.headers["x-argosy-request"]
        trace = (await client.get(f"/admin/requests/{name}")).json()
        assert "no larger model can answer" in trace["routing"][0]["cascade"]["reason"]
        routed.qwen.script = cut_after_tokens
        response = await client.post("/v1/completions", json=BODY | {"model": "latest"})
        assert read_text(response.text) == " 0 1 2"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_judge_in_a_cascade_grades_answers_that_are_not_sure(
    tmp_path: Path, is_stream: bool
) -> None:
    """The route matches the requests to the judge as well, which are not judged."""
    grade = ["3"]

    async def answer(request: UpstreamRequest) -> None:
        if not grade:
            await respond_500(request)
            return
        message = {"role": "assistant", "content": f"Grade: {grade[0]}"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 1, "completion_tokens": 2}
        request.send_json(200, {"choices": choices, "usage": usage})

    async with fake_upstream(answer) as judging:
        replicas = [ReplicaConfig(url=judging.url, kind="openai", model="rough")]
        models = [ModelConfig(name="judge", replicas=replicas)]
        judge = JudgeConfig(model="judge", sure_mean_logprob=-0.2)
        strict = msgspec.structs.replace(judge, on_failure="escalate")
        routes = [
            RouteConfig(name=name, headers={"x-judge": name}, target_model="qwen",
                        cascade=CascadeConfig(min_mean_logprob=-5.0, judge=config))
            for name, config in (("kept", judge), ("strict", strict))
        ]  # fmt: skip
        async with (
            run_routed_gateway(tmp_path, *routes, more_models=models) as routed,
            routed.client("app") as client,
        ):
            routed.qwen.script = respond_with_logprobs(-1.0)
            body = BODY | {"model": "latest", "max_tokens": 3, "stream": is_stream}

            async def ask(name: str) -> tuple[str, Any]:
                headers = {"x-judge": name}
                response = await client.post("/v1/completions", json=body, headers=headers)
                assert response.status_code == 200, response.text
                path = f"/admin/requests/{response.headers['x-argosy-request']}"
                trace = (await client.get(path)).json()
                return read_text(response.text), trace["routing"][0]["cascade"]

            text, verdict = await ask("kept")
            assert (text, verdict["escalated"]) == (" 0 1 2", True)
            assert verdict["reason"] == "judge grades it 0.3 of 0.7"
            (asked,) = judging.requests
            assert " draft draft draft" in str(asked.body["messages"])
            assert str(BODY["prompt"]) in str(asked.body["messages"])
            grade[:] = ["9"]
            text, verdict = await ask("kept")
            assert (text, verdict["judge"]["grade"]) == (" draft" * 3, 0.9)
            for grades in ([], ["none"]):
                grade[:] = grades
                text, verdict = await ask("kept")
                assert (text, verdict["escalated"]) == (" draft" * 3, False)
                assert "judge gave no grade" in verdict["reason"]
                assert (await ask("strict"))[0] == " 0 1 2"
            routed.qwen.script = respond_with_logprobs(-0.1)
            judging.requests.clear()
            text, verdict = await ask("kept")
            assert (text, "judge" in verdict, judging.requests) == (" draft" * 3, False, [])
            records = await routed.accounts.wait_for_rows(13)
            assert {each.model for each in records if each.route == "judge"} == {"judge"}


async def cut_after_tokens(request: UpstreamRequest) -> None:
    """Start a stream as a server does that fails after a token."""
    request.start_stream()
    request.send_text(" lost")
    await request.writer.drain()
    request.writer.close()


def read_text(response: str) -> str:
    """Return the text of a completion that is streamed or in one piece."""
    events = [
        line.removeprefix("data: ") for line in response.splitlines() if line.startswith("data: {")
    ]
    return "".join(
        choice["text"]
        for event in events or [response]
        for choice in json.loads(event)["choices"][:1]
    )


async def test_budget_and_load_degrade_answers_as_routes_declare(tmp_path: Path) -> None:
    """A cached answer, then a smaller model, then a refusal: each only under pressure, and named in a header."""
    rule = partial(RouteConfig, model="latest", headers={"x-saving": "1"})
    message = "The budget is used up. Ask for more."
    routes = [
        rule(name="kept", max_cached_age_s=3600.0, min_budget_used=0.2),
        rule(name="refusal", refuse=message, min_budget_used=0.5),
        rule(name="smaller", target_model="qwen", min_budget_used=0.2),
        RouteConfig(name="away", model="down", min_wait_s=5.0, refuse="Come back later."),
        RouteConfig(name="idle", model="qwen", min_wait_s=5.0, refuse="Never."),
        RouteConfig(name="tried", model="qwen", refuse="Never.", dry_run=True),
    ]
    down = ModelConfig(
        name="down", replicas=[ReplicaConfig(url="http://127.0.0.1:1", kind="openai")]
    )
    cached = CacheRule(name="all", max_age_s=0.001, sampled=True)
    async with (
        run_routed_gateway(
            tmp_path, *routes, more_models=(down,), cache_rules=[cached], budget=1000
        ) as routed,
        routed.client("app") as client,
    ):
        choice = {"index": 0, "text": "x", "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 3}
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "rough"}
        complete = json.dumps({**head, "choices": [choice], "usage": usage}).encode()
        routed.next.script = routed.qwen.script = respond_with(build_response(complete))

        async def ask(model: str, prompt: str, *, saves: bool = True) -> tuple[object, ...]:
            body = BODY | {"model": model, "prompt": prompt, "stream": False}
            headers = {"x-saving": "1"} if saves else {}
            response = await client.post("/v1/completions", json=body, headers=headers)
            found = response.json().get("error", {}).get("message", "")
            names = [response.headers.get(f"x-argosy-{name}") for name in ("degraded", "model")]
            return (response.status_code, *names, found)

        assert await ask("latest", "one") == (200, None, None, "")  # 30 % of the budget
        assert await ask("latest", "two") == (200, "smaller", "qwen", "")
        assert await ask("latest", "one") == (200, "kept", None, "")  # too old for the rule
        assert (len(routed.next.requests), len(routed.qwen.requests)) == (1, 1)
        assert await ask("latest", "three", saves=False) == (200, None, None, "")  # 60 %
        assert await ask("latest", "four") == (503, "refusal", None, message)
        assert await ask("latest", "one") == (200, "kept", None, "")
        assert len(routed.next.requests) == 2
        assert await ask("down", "one") == (503, "away", None, "Come back later.")
        assert (await ask("qwen", "one"))[:2] == (200, None)
        records = await routed.accounts.wait_for_rows(8)
        assert sum(record.nano_dollars for record in records) == 606
        assert {(each.model, each.route) for each in records if each.nano_dollars == 3} == {
            ("qwen", "smaller"),
            ("qwen", ""),
        }
        async with routed.client("admin") as admin:
            metrics = (await admin.get("/metrics")).text
        counted = partial(value, metrics, "argosy_gateway_route_decisions_total")
        assert counted(route="kept", decision="degraded") == 4
        assert counted(route="tried", decision="degraded", dry_run="true") == 1
