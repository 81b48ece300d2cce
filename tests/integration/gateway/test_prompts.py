"""Prompts in requests to a gateway: every dialect that names one, rules, tenants, labels, defaults, and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.fake_upstream import UpstreamRequest, listening, repeat_prompt
from tests.support.gateway_client import check_settings_error, run_gateway_server
from tests.support.native_upstream import NativeScript, NativeUpstream
from tests.support.organisations import Json, run_admin_gateway

from argosy.deployment import (
    GatewayConfig,
    ModelConfig,
    PromptConfig,
    PromptRule,
    ReplicaConfig,
)
from argosy.policy.prompts import PromptMessage

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NEW = {"role": "user", "content": "now"}
PAST = {"role": "assistant", "content": "{{ name }}"}
SYSTEM = {"role": "system", "content": "Help Jo."}
VARIABLES = {"name": "Jo", "history": [PAST]}
PROMPTS = [
    PromptConfig(
        name="support",
        messages=(
            PromptMessage(role="system", content="Help {{ name }}."),
            PromptMessage(placeholder="history"),
        ),
        parameters={"temperature": 0.5, "max_tokens": 7, "model": "big"},
    ),
    PromptConfig(name="text", version=2, text="Say {{ word }}."),
    PromptConfig(name="text", version=3, text="Write {{ word }}.", labels=("staging",)),
    PromptConfig(name="fixed", text="Be kind."),
]
RULES = [
    PromptRule(name="test", headers={"x-label": "new"}, prompt="text", label="3", only_named=True),
    PromptRule(name="bound", model="bound", prompt="fixed"),
]


class CountingUpstream(NativeUpstream):
    """Replica that keeps what it is to tokenize, too."""

    async def _respond(self, request: UpstreamRequest) -> None:
        if request.path == "/tokenize":
            self.requests.append(request)
            request.send_json(200, {"tokens": [1], "count": 1})
        else:
            await super()._respond(request)


class PromptGateway:
    """A gateway with prompts in front of one scripted replica."""

    def __init__(self, client: httpx2.AsyncClient, replica: NativeUpstream) -> None:
        self.client = client
        self.replica = replica

    async def send(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> Any:  # noqa: ANN401
        """Return the version in the response's header, and the body that the replica got."""
        response = await self.client.post(path, json=fields, headers=headers)
        assert response.status_code == 200, response.text
        body = self.replica.requests[-1].body
        assert not {name for name in body if name.startswith("prompt_")}
        return response.headers.get("x-argosy-prompt"), body

    async def explain(self, response: httpx2.Response) -> dict[str, Any]:
        path = f"/admin/requests/{response.headers['x-argosy-request']}"
        explanation: dict[str, Any] = (await self.client.get(path)).json()
        return explanation


@pytest.fixture
async def gateway() -> AsyncIterator[PromptGateway]:
    replica = CountingUpstream()
    replica.native_script = NativeScript(deltas=[{"content": "Hi"}], finish_reason="stop")
    async with listening(replica):
        models = [
            ModelConfig(name=name, replicas=[ReplicaConfig(url=replica.url, kind="argosy")])
            for name in ("big", "bound")
        ]
        config = GatewayConfig(port=0, models=models, prompts=PROMPTS, prompt_rules=RULES)
        async with run_gateway_server(config) as (_, client):
            yield PromptGateway(client, replica)


async def test_tokens_are_counted_with_the_prompt(gateway: PromptGateway) -> None:
    named: dict[str, Any] = {"prompt_id": "support", "prompt_variables": VARIABLES}
    version, body = await gateway.send("/tokenize", **named, messages=[NEW])
    assert version == "support@1"
    assert body["messages"] == [SYSTEM, PAST, NEW]
    assert "max_tokens" not in body
    word: dict[str, Any] = {"prompt_variables": {"word": "yes"}, "model": "big"}
    _, body = await gateway.send("/tokenize", prompt_id="text", prompt="", **word)
    assert body["prompt"] == "Say yes."
    prompt = {"id": "fixed"}
    _, body = await gateway.send(
        f"{RESPONSES}/input_tokens", prompt=prompt, input="now", model="big"
    )
    assert body["messages"] == [{"role": "system", "content": "Be kind."}, NEW]
    _, body = await gateway.send("/tokenize", model="bound", messages=[NEW])
    assert body["messages"] == [{"role": "system", "content": "Be kind."}, NEW]
    _, body = await gateway.send("/tokenize", model="bound", prompt="Be")
    assert body["prompt"] == "Be"
    response = await gateway.client.post("/tokenize", json={"prompt_id": "other", "model": "big"})
    assert response.status_code == 404


async def test_each_dialect_gets_the_prompt_before_its_messages(gateway: PromptGateway) -> None:
    named: dict[str, Any] = {"prompt_id": "support", "prompt_variables": VARIABLES}
    version, body = await gateway.send(CHAT, **named, messages=[NEW])
    assert version == "support@1"
    assert body["messages"] == [SYSTEM, PAST, NEW]
    assert (body["temperature"], body["max_tokens"]) == (0.5, 7)
    version, body = await gateway.send(CHAT, **named, temperature=0.0, max_completion_tokens=3)
    assert body["messages"] == [SYSTEM, PAST]
    assert body["temperature"] == 0
    assert (body["max_completion_tokens"], body.get("max_tokens")) == (3, None)
    prompt = {
        "id": "support",
        "version": "1",
        "variables": {"name": {"type": "input_text", "text": "Jo"}, "history": [PAST]},
    }
    version, body = await gateway.send(RESPONSES, prompt=prompt, input="now", store=False)
    assert version == "support@1"
    assert body["messages"] == [SYSTEM, PAST, NEW]
    word: dict[str, Any] = {
        "prompt_variables": {"word": "{{ 7*7 }}"},
        "max_tokens": 2,
        "model": "big",
    }
    version, body = await gateway.send(COMPLETIONS, prompt_id="text", **word)
    assert (version, body["prompt"]) == ("text@2", "Say {{ 7*7 }}.")
    version, body = await gateway.send(CHAT, prompt_id="text", messages=[NEW], **word)
    assert body["messages"] == [{"role": "system", "content": "Say {{ 7*7 }}."}, NEW]


async def test_rules_bind_a_model_to_a_prompt_and_select_versions(gateway: PromptGateway) -> None:
    named: dict[str, Any] = {
        "prompt_id": "text",
        "prompt_variables": {"word": "x"},
        "messages": [],
        "model": "big",
    }
    cases: list[tuple[dict[str, Any], dict[str, str], str]] = [
        ({}, {}, "text@2"),
        ({}, {"x-label": "new"}, "text@3"),
        ({"prompt_version": 2}, {"x-label": "new"}, "text@2"),
        ({"prompt_version": "staging"}, {}, "text@3"),
        ({"prompt_version": "latest"}, {}, "text@3"),
    ]
    for extra, headers, expected in cases:
        version, _ = await gateway.send(CHAT, headers, **named, **extra)
        assert version == expected
    for path, fields in (
        (CHAT, {"messages": [NEW]}),
        ("/v1/messages", {"messages": [NEW], "max_tokens": 5}),
        ("/api/chat", {"messages": [NEW]}),
        (RESPONSES, {"input": "now", "store": False}),
    ):
        version, body = await gateway.send(path, model="bound", **fields)
        assert version == "fixed@1"
        assert [message["content"] for message in body["messages"]] == ["Be kind.", "now"]
        version, _ = await gateway.send(path, {"x-label": "new"}, model="big", **fields)
        assert version is None
    response = await gateway.client.post(CHAT, json={"model": "bound", "messages": [NEW]})
    assert (await gateway.explain(response))["prompt"] == "fixed@1"


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"prompt_id": "other"}, 404, "prompt_not_found", "prompt_id"),
        ({"prompt_id": "text", "prompt_version": 9}, 404, "prompt_not_found", "prompt_version"),
        ({"prompt_id": "text"}, 400, "invalid_prompt_variables", "prompt_variables"),
        (
            {"prompt_id": "text", "prompt_variables": {"word": "x", "y": 1}},
            *(400, "invalid_prompt_variables", "prompt_variables"),
        ),
        ({"prompt_id": 7}, 400, "invalid_value", "prompt_id"),
        ({"prompt_id": "text", "prompt_variables": []}, 400, "invalid_value", "prompt_variables"),
        (
            {"prompt_id": "text", "prompt_variables": {"word": "x" * (1 << 20)}},
            *(400, "invalid_value", "prompt_variables"),
        ),
        ({"prompt_id": "fixed", "messages": {}}, 400, "invalid_value", "messages"),
    ],
)
async def test_requests_that_a_prompt_does_not_fit_are_refused(
    gateway: PromptGateway, fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    response = await gateway.client.post(CHAT, json={"model": "big"} | fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error
    assert not [each for each in gateway.replica.requests if "messages" in each.body]


async def test_numbers_out_of_range_are_refused(gateway: PromptGateway) -> None:
    for param, value in (
        ("prompt_version", "1" * 5000),
        ("prompt_variables", f'{{"word": {"1" * 5000}}}'),
        ("prompt_variables", '{"word": 1e999}'),
    ):
        body = f'{{"model": "big", "messages": [], "prompt_id": "text", "{param}": {value}}}'
        response = await gateway.client.post(CHAT, content=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error


async def test_completions_take_only_texts(gateway: PromptGateway) -> None:
    for fields, param in (
        ({"prompt_id": "support", "prompt_variables": VARIABLES}, "prompt_id"),
        ({"prompt_id": "fixed", "prompt": "more"}, "prompt"),
    ):
        response = await gateway.client.post(COMPLETIONS, json={"model": "big"} | fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("prompts: [{name: a}]", "prompt 'a' version 1: it needs a text or messages"),
        ("prompts: [{name: a, text: '{{ x( }}'}]", "line 1"),
        ("prompts: [{name: a, text: x}, {name: a, text: y}]", "version 1 is defined twice"),
        (
            "prompts: [{name: a, text: x}, {name: a, text: y, version: 2}]",
            "label 'production' is defined twice",
        ),
        ("prompts: [{name: a, text: x, owner: acme}]", "owners are organisations"),
        ("prompt_rules: [{prompt: a}]", "no prompt has the name 'a'"),
        ("prompt_rules: [{prompt: a, model: other}]", "no model has the name 'other'"),
    ],
)
def test_invalid_settings_say_what_to_change(settings: str, message: str, tmp_path: Path) -> None:
    check_settings_error(tmp_path, settings, message)


async def test_labels_of_a_tenant_move_at_once_and_others_see_nothing(tmp_path: Path) -> None:
    async with run_admin_gateway(tmp_path, script=repeat_prompt) as gateway:
        _, user, operator = await gateway.add_tenant()
        _, foreign, foreign_operator = await gateway.add_tenant()

        async def add(text: str, headers: Json = operator, **fields: Any) -> httpx2.Response:  # noqa: ANN401
            body = {"name": "greeting", "content": {"text": text}} | fields
            return await gateway.client.post("/admin/prompts", json=body, headers=headers)

        async def use(headers: Json, version: Any = None) -> tuple[int, str]:  # noqa: ANN401
            body = {"model": "big", "prompt_id": "greeting", "prompt_version": version}
            answer = await gateway.client.post(COMPLETIONS, json=body, headers=headers)
            found = answer.json()
            text = (
                found["choices"][0]["text"] if answer.status_code == 200 else found["error"]["code"]
            )
            return answer.status_code, text

        first, second = (await add("One")).json(), (await add("Two {{ x | default }}")).json()
        assert (first["labels"], second["labels"]) == (["production"], [])
        assert (second["version"], second["variables"]) == (2, ["x"])
        assert (await add("{{ range(9) }}")).json()["error"]["code"] == "invalid_value"
        assert (await add("No", user)).status_code == 403
        assert await use(user) == (200, "One")
        assert await use(user, 2) == (200, "Two ")
        assert await use(foreign) == (404, "prompt_not_found")
        path = f"/admin/prompts/{second['id']}"
        move = {"label": "production"}
        for headers, status in ((foreign_operator, 404), (operator, 200)):
            answer = await gateway.client.post(f"{path}/label", json=move, headers=headers)
            assert answer.status_code == status
        assert await use(user) == (200, "Two ")
        listed = (await gateway.client.get("/admin/prompts", headers=operator)).json()["data"]
        assert [each["labels"] for each in listed] == [[], ["production"]]
        asked = {"prompt_id": "greeting", "prompt_variables": {"x": "Jo"}}
        rendered = await gateway.client.post("/admin/prompts/render", json=asked, headers=operator)
        assert rendered.json().items() >= {"prompt": "greeting@2", "text": "Two Jo"}.items()
        asked["prompt_variables"] = {"y": "Jo"}
        refused = await gateway.client.post("/admin/prompts/render", json=asked, headers=operator)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "invalid_prompt_variables")
        assert error["message"].startswith("The prompt greeting@2 cannot be rendered: there is no")
        assert (await gateway.client.delete(path, headers=operator)).status_code == 409
        deleted = await gateway.client.delete(f"/admin/prompts/{first['id']}", headers=operator)
        assert deleted.status_code == 200
        assert await use(user, 1) == (404, "prompt_not_found")
        assert (await add("Three")).json()["version"] == 3
        entries = gateway.store.audit_log.list_entries(subject=first["id"])
        assert [each.action for each in entries] == [
            "prompt.delete",
            *["prompt.label"] * 2,
            "prompt.create",
        ]
        assert "One" not in str(entries)
