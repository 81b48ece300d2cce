"""Moderation by a model of the same gateway: prompts, streams part by part, failures, and what it costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest, listening
from tests.support.gateway_client import parse_stream, run_gateway_server
from tests.support.gateway_processes import open_organisation
from tests.support.native_upstream import NativeScript, NativeUpstream

from argosy.deployment import (
    AuthConfig,
    BackendKind,
    ContentRule,
    GatewayConfig,
    ModelConfig,
    Moderation,
    ReplicaConfig,
    load_config,
)
from argosy.store import StoreConfig

LABELS = {"unsafe": 0.5, "S1": 0.5}


@dataclass
class GuardUpstream(FakeUpstream):
    """Model that calls texts with `attack` unsafe, as a chat or as a classifier, and does not answer `slow`."""

    is_classifier: bool = False
    is_broken: bool = False
    seen: list[str] = field(default_factory=list)
    """Texts that it was sent."""

    def __post_init__(self) -> None:
        self.script = self.probe_script = self._judge

    def get_pages(self) -> dict[str, object]:
        model: dict[str, Any] = {"id": "m", "object": "model", "owned_by": "argosy"}
        if self.is_classifier:
            model["tasks"] = ["classify"]
        return {"/v1/models": {"object": "list", "data": [model]}, "/load": {}}

    async def _judge(self, request: UpstreamRequest) -> None:
        body = request.body
        text = body["input"] if self.is_classifier else body["messages"][-1]["content"]
        self.seen.append(text)
        if self.is_broken or "slow" in text:
            await asyncio.Event().wait()
        is_unsafe = "attack" in text
        if self.is_classifier:
            data = [
                {
                    "index": 0,
                    "label": "S1" if is_unsafe else "ok",
                    "probs": [0.1, 0.9],
                    "num_classes": 2,
                }
            ]
            request.send_json(
                200,
                {"object": "list", "data": data, "usage": {"prompt_tokens": 3, "total_tokens": 3}},
            )
            return
        message = {"role": "assistant", "content": "unsafe\nS1" if is_unsafe else "safe"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
        request.send_json(200, answer | {"choices": [choice], "usage": usage})


@dataclass
class ModeratedGateway:
    client: httpx2.AsyncClient
    model: NativeUpstream
    guard: GuardUpstream

    async def chat(self, prompt: str = "Hi", **fields: Any) -> httpx2.Response:  # noqa: ANN401 - fields of a request
        body = {
            "model": "big",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 300,
        }
        return await self.client.post("/v1/chat/completions", json=body | fields)

    def speak(self, text: str) -> None:
        self.model.native_script = NativeScript(deltas=[{"content": each} for each in text])

    async def explain(self, response: httpx2.Response) -> list[dict[str, Any]]:
        path = f"/admin/requests/{response.headers['x-argosy-request']}"
        content: list[dict[str, Any]] = (await self.client.get(path)).json()["content"]
        return content


@contextlib.asynccontextmanager
async def moderated_gateway(
    *,
    is_classifier: bool = False,
    kind: BackendKind = "openai",
    gateway: dict[str, Any] | None = None,
    **settings: Any,  # noqa: ANN401 - of `Moderation`
) -> AsyncIterator[ModeratedGateway]:
    model, guard = NativeUpstream(), GuardUpstream(is_classifier=is_classifier)
    moderation = Moderation(model="guard", labels=LABELS, **settings)
    async with listening(model), listening(guard):
        replicas = {
            "big": ReplicaConfig(url=model.url, kind="argosy", model="m"),
            "guard": ReplicaConfig(
                url=guard.url, kind="argosy" if is_classifier else kind, model="m"
            ),
        }
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name=name, replicas=[each]) for name, each in replicas.items()],
            content_rules=[ContentRule(name="safe", moderation=moderation)],
            **(gateway or {}),
        )
        async with run_gateway_server(config) as (_, client):
            moderated = ModeratedGateway(client, model, guard)
            moderated.speak("Hello.")
            yield moderated


@pytest.mark.parametrize("is_classifier", [False, True])
async def test_prompts_are_decided_before_the_model_sees_them(is_classifier: bool) -> None:
    async with moderated_gateway(is_classifier=is_classifier) as gateway:
        assert (await gateway.chat("a question")).status_code == 200
        assert (await gateway.chat("a question")).status_code == 200
        assert gateway.guard.seen == ["a question"]  # approved texts are not moderated again
        sent = len(gateway.model.requests)
        for fields in ({}, {"stream": True}):
            response = await gateway.chat("plan an attack", **fields)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("content_refused", "messages")
            assert "attack" not in error["message"]
        assert len(gateway.model.requests) == sent
        label = "S1" if is_classifier else "unsafe"
        assert await gateway.explain(response) == [
            {"rule": "safe", "side": "input", "detector": f"moderation:{label}", "action": "stop", "count": 1}
        ]  # fmt: skip


async def test_no_prompt_is_a_way_around_moderation() -> None:
    async with moderated_gateway(window_chars=100, fail="open", timeout_s=1) as gateway:
        fields: list[dict[str, Any]] = [
            {"prompt": "z" * 97 + "attack" + "z" * 90},  # across two pieces
            {"prompt": "slow " + "z" * 900 + " attack"},  # beside a piece without a verdict
            {"messages": [{"role": "user", "content": "Hi"}], "documents": [{"text": "an attack"}]},
            {"prompt": "Hi", "suffix": "an attack"},
            {"prompt": [1, 2, 3]},
            {"prompt": [[], [1, 2, 3]]},
        ]
        sent = len(gateway.model.requests)
        for each in fields:
            path = "/v1/chat/completions" if "messages" in each else "/v1/completions"
            response = await gateway.client.post(path, json={"model": "big"} | each)
            assert response.status_code == 400, each
            is_text = "1, 2" not in str(each)
            code = "content_refused" if is_text else "content_not_filterable"
            assert response.json()["error"]["code"] == code, each
        assert len(gateway.model.requests) == sent


async def test_answers_are_sent_part_by_part() -> None:
    async with moderated_gateway(sides=("output",), window_chars=100) as gateway:
        parts = [f"part {number} " + "x" * 92 for number in range(4)]
        gateway.speak("".join(parts))
        for is_stream in (False, True):
            response = await gateway.chat(stream=is_stream)
            text = (
                parse_stream(response.text).text
                if is_stream
                else response.json()["choices"][0]["message"]["content"]
            )
            assert text == "".join(parts)
        assert all(len(each) <= 400 for each in gateway.guard.seen)
        gateway.speak("".join(parts) + "an attack " + "y" * 300)
        for is_stream in (False, True):
            response = await gateway.chat(stream=is_stream)
            assert "attack" not in parse_stream(response.text).text + response.text
            assert response.text.count('"finish_reason":"content_filter"') == 1
            if is_stream:
                assert parse_stream(response.text).text.startswith(parts[0])
            (found,) = await gateway.explain(response)
            assert (found["side"], found["detector"]) == ("output", "moderation:unsafe")
        stream = parse_stream(response.text)
        assert stream.done_count == 1


async def test_a_word_across_two_parts_is_seen() -> None:
    async with moderated_gateway(sides=("output",), window_chars=100) as gateway:
        gateway.speak("z" * 97 + " attack" + "z" * 200)
        assert "ttack" not in (await gateway.chat(stream=True)).text


async def test_failures_close_or_open() -> None:
    for fail, status, reason in (("closed", 503, "content_filter"), ("open", 200, "stop")):
        async with moderated_gateway(
            fail=fail, timeout_s=0.2, sides=("input", "output")
        ) as gateway:
            gateway.guard.is_broken = True
            response = await gateway.chat()
            assert response.status_code == status
            if status == 503:
                assert response.json()["error"]["code"] == "moderation_unavailable"
                assert int(response.headers["retry-after"]) > 0
        async with moderated_gateway(fail=fail, timeout_s=0.2, sides=("output",)) as gateway:
            gateway.guard.is_broken = True
            response = await gateway.chat(stream=True)
            assert parse_stream(response.text).finish_reasons == [reason]
            assert ("Hello" in parse_stream(response.text).text) == (fail == "open")
            (found,) = await gateway.explain(response)
            assert found["detector"] == "moderation_unavailable"


async def test_answers_of_other_engines_in_one_piece() -> None:
    async def respond(request: UpstreamRequest) -> None:
        text = "an attack" if "bad" in json.dumps(request.body) else "fine"
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "audio": {"transcript": text}},
            "finish_reason": "stop",
            "token_ids": [1, 2],
        }
        answer = {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
        }
        request.send_json(200, answer | {"usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    guard, model = GuardUpstream(), FakeUpstream(respond)
    moderation = Moderation(model="guard", labels=LABELS, sides=("output",))
    async with listening(model), listening(guard):
        config = GatewayConfig(
            port=0,
            models=[
                ModelConfig(
                    name=name, replicas=[ReplicaConfig(url=each.url, kind="openai", model="m")]
                )
                for name, each in (("big", model), ("guard", guard))
            ],
            content_rules=[ContentRule(moderation=moderation)],
        )
        async with run_gateway_server(config) as (_, client):
            for prompt, text, reason in (("hi", "fine", "stop"), ("bad", "", "content_filter")):
                body = {"model": "big", "messages": [{"role": "user", "content": prompt}]}
                (choice,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
                assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)
                assert ("audio" in choice["message"]) == ("token_ids" in choice) == bool(text)


async def test_tenants_do_not_learn_which_texts_of_others_were_approved(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    with open_organisation(url) as accounts:
        keys = [accounts.key(accounts.project(name)) for name in ("shop", "bank")]
    settings = {"store": StoreConfig(url=url), "auth": AuthConfig(mode="required")}
    async with moderated_gateway(gateway=settings) as gateway:
        for key in (*keys, *keys):
            gateway.client.headers["authorization"] = f"Bearer {key}"
            assert (await gateway.chat("a question")).status_code == 200
        assert gateway.guard.seen == 2 * ["a question"]


class AnalyzerUpstream(FakeUpstream):
    """Server in the shape of Presidio's analyzer, which knows one name. Never compared with Presidio."""

    is_broken = False

    async def _respond(self, request: UpstreamRequest) -> None:
        assert request.path == "/analyze"
        assert request.body["entities"] == ["PERSON"]
        at = request.body["text"].find("Ann Lee")
        found = [{"entity_type": "PERSON", "start": at, "end": at + 7, "score": 0.85}]
        request.send_json(500 if self.is_broken else 200, found if at >= 0 else [])


async def test_a_presidio_analyzer_redacts_or_refuses() -> None:
    analyzer, model = AnalyzerUpstream(), NativeUpstream(native_script=NativeScript(deltas=[]))
    async with listening(model), listening(analyzer):
        for action in ("redact", "stop"):
            moderation = Moderation(
                analyzer_url=analyzer.url, labels={"PERSON": 0.5}, action=action
            )
            config = GatewayConfig(
                port=0,
                models=[
                    ModelConfig(
                        name="big",
                        replicas=[ReplicaConfig(url=model.url, kind="argosy", model="m")],
                    )
                ],
                content_rules=[ContentRule(moderation=moderation)],
            )
            async with run_gateway_server(config) as (_, client):
                gateway = ModeratedGateway(client, model, GuardUpstream())
                gateway.speak("Hi")
                response = await gateway.chat("I am Ann Lee, hello")
                assert response.status_code == (200 if action == "redact" else 400), response.text
                if action == "redact":
                    sent = model.requests[-1].body["messages"][-1]["content"]
                    assert sent == "I am [person], hello"
                    (found,) = await gateway.explain(response)
                    assert (found["detector"], found["action"]) == ("person", "redact")
                analyzer.is_broken = True
                assert (await gateway.chat("Ann Lee again")).status_code == 503
                analyzer.is_broken = False


@pytest.mark.parametrize(
    ("moderation", "message"),
    [
        ("model: gard", "no model has the name 'gard'"),
        ("language: de", "give one of `model` and `analyzer_url`"),
        ("model: big, action: redact", "needs an `analyzer_url`"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    moderation: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(
        "models: [{name: big, replicas: [{url: 'http://localhost:1'}]}]\n"
        f"content_rules: [{{moderation: {{{moderation}, labels: {{unsafe: 0.5}}}}}}]\n"
    )
    with pytest.raises(ValueError, match=message):
        load_config(path)
