"""Truncation rules in a gateway: the chat that another engine receives, and how the client learns what was cut."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest, listening
from tests.support.gateway_client import run_gateway_server

from argosy.deployment import (
    BackendKind,
    ContentRule,
    GatewayConfig,
    ModelConfig,
    ReplicaConfig,
    SummaryConfig,
    TruncationRule,
)

CONTEXT = 80
TURN_WORDS = 8
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "w " * 20}}


def count_words(body: dict[str, Any]) -> int:
    """Count the tokens of a chat as the upstream does: the words of its messages and tools."""
    texts = [str(each.get("content")) for each in body["messages"]]
    texts += [each["function"]["description"] for each in body.get("tools") or ()]
    return sum(len(each.split()) for each in texts)


async def answer(request: UpstreamRequest) -> None:
    message = {"role": "assistant", "content": "Yes."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    request.send_json(
        200, {"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage}
    )


@dataclass
class CountingUpstream(FakeUpstream):
    """Server with a context of `CONTEXT` words, which counts them like vLLM."""

    counted: int = 0
    """Number of conversations that were counted."""

    def get_pages(self) -> dict[str, object]:
        model = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": CONTEXT}
        return {"/v1/models": {"object": "list", "data": [model]}}

    async def _respond(self, request: UpstreamRequest) -> None:
        if request.path == "/tokenize" and self.tokenize_status == 200:
            self.counted += 1
            request.send_json(200, {"count": count_words(request.body)})
        else:
            await super()._respond(request)


def talk(turns: int, *, start: int = 0) -> list[dict[str, Any]]:
    """Return turns of `TURN_WORDS` words."""
    return [
        {"role": role, "content": f"{role[0]}{turn}" + " word" * (TURN_WORDS // 2 - 1)}
        for turn in range(start, start + turns)
        for role in ("user", "assistant")
    ]


def chat(turns: int, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a request
    """Return a chat with a system message, some turns, and a question."""
    messages = [{"role": "system", "content": "Be brief"}, *talk(turns)]
    question = {"role": "user", "content": "question"}
    return {"model": "big", "max_tokens": 20, "messages": [*messages, question]} | fields


@contextlib.asynccontextmanager
async def truncating_gateway(
    *rules: TruncationRule,
    kind: BackendKind = "vllm",
    content: list[ContentRule] | None = None,
    more_models: Sequence[ModelConfig] = (),
) -> AsyncIterator[tuple[httpx2.AsyncClient, CountingUpstream]]:
    upstream = CountingUpstream(answer)
    async with listening(upstream):
        replica = ReplicaConfig(url=upstream.url, kind=kind, model="m")
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name="big", replicas=[replica]), *more_models],
            truncation_rules=list(rules),
            content_rules=content or [],
        )
        async with run_gateway_server(config) as (_, client):
            yield client, upstream


def received(upstream: CountingUpstream) -> list[str]:
    """Return the first words of the messages of the last chat that the upstream received."""
    assert "truncation" not in upstream.requests[-1].body
    return [each["content"].split()[0] for each in upstream.requests[-1].body["messages"]]


# With 60 words for a prompt and steps of 15, each cut drops two turns of 8 words.
KEPT: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "what fits": (chat(6), ["Be", "u0"], ""),
    "one step": (chat(8), ["Be", "u2"], "messages[1:5]"),
    "the same step": (chat(9), ["Be", "u2"], "messages[1:5]"),
    "the next step": (chat(10), ["Be", "u4"], "messages[1:9]"),
    "tools count": (chat(6, tools=[TOOL]), ["Be", "u2"], "messages[1:5]"),
    "the answer counts": (chat(6, max_tokens=40), ["Be", "u2"], "messages[1:5]"),
}  # fmt: skip


async def test_cuts_in_steps_and_says_what_was_cut() -> None:
    async with truncating_gateway(TruncationRule(name="long")) as (client, upstream):
        for name, (body, expected, dropped) in KEPT.items():
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, (name, response.text)
            words = received(upstream)
            assert words[:2] == expected, name
            assert words[-1] == "question"
            assert response.headers.get("x-argosy-ignored-fields", "") == dropped, name
            path = f"/admin/requests/{response.headers['x-argosy-request']}"
            explained = (await client.get(path)).json().get("truncation")
            assert (explained is None) == (not dropped)
            if explained is not None:
                assert explained == {
                    "rule": "long",
                    "policy": "oldest_turns",
                    "messages": len(body["messages"]),
                    "dropped": [dropped],
                }
        assert upstream.counted <= 4 * len(KEPT)


async def test_policies_and_requests_decide() -> None:
    cases: list[tuple[TruncationRule | None, dict[str, Any], int, list[str]]] = [
        (TruncationRule(policy="middle"), chat(8), 200, ["Be", "u0", "a0", "u3"]),
        (TruncationRule(policy="refuse"), chat(8, truncation="auto"), 200, ["Be", "u0"]),
        (TruncationRule(), chat(8, truncation="disabled"), 200, ["Be", "u0"]),
        (TruncationRule(headers={"x-other": "1"}), chat(8), 200, ["Be", "u0"]),
        (None, chat(8), 200, ["Be", "u0"]),
        (None, chat(8, truncation="auto"), 200, ["Be", "u2"]),
        (TruncationRule(keep=0.5), chat(8), 200, ["Be", "u4"]),
        (TruncationRule(), chat(0, messages=[{"role": "user", "content": "w " * 90}]), 400, []),
    ]
    for rule, body, status, expected in cases:
        async with truncating_gateway(*([rule] if rule else [])) as (client, upstream):
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == status, response.text
            if status == 200:
                assert received(upstream)[: len(expected)] == expected
            else:
                assert response.json()["error"]["code"] == "context_length_exceeded"
                assert not upstream.requests


async def test_other_dialects_and_the_order_with_content_rules() -> None:
    content = [ContentRule(input={"email": "redact"})]
    async with truncating_gateway(TruncationRule(), content=content) as (client, upstream):
        messages = chat(10)["messages"]
        messages[-1] = {"role": "user", "content": "jo@example.com asks"}
        fields = {"model": "big", "max_output_tokens": 20, "input": messages, "store": False}
        response = await client.post("/v1/responses", json=fields)
        assert response.status_code == 200, response.text
        assert received(upstream)[:2] == ["Be", "u4"]
        assert received(upstream)[-1] == "[email]"
        anthropic = {
            "model": "big",
            "max_tokens": 20,
            "system": "Be brief",
            "messages": messages[1:],
        }
        response = await client.post("/v1/messages", json=anthropic)
        assert response.status_code == 200, response.text
        assert received(upstream)[:2] == ["Be", "u2"]


async def test_a_model_summarises_what_is_dropped() -> None:
    """The summary of the same messages is made once. Without one, they are dropped as by other rules."""
    summary = SummaryConfig(model="big", max_tokens=16)
    rules = [
        TruncationRule(keep=0.5, summary=summary, headers={"x-model": "big"}),
        TruncationRule(keep=0.5, summary=SummaryConfig(model="lost")),
    ]
    down = ReplicaConfig(url="http://127.0.0.1:1", kind="openai")
    lost = ModelConfig(name="lost", replicas=[down])
    async with truncating_gateway(*rules, more_models=[lost]) as (client, upstream):

        async def send(turns: int, model: str) -> tuple[list[str], Any]:
            response = await client.post(
                "/v1/chat/completions", json=chat(turns), headers={"x-model": model}
            )
            assert response.status_code == 200, response.text
            assert "messages[1:" in response.headers["x-argosy-ignored-fields"]
            path = f"/admin/requests/{response.headers['x-argosy-request']}"
            explained = (await client.get(path)).json()["truncation"]
            return received(upstream)[:4], explained["summary_model"]

        expected = ["Be", "Summary", "Understood.", "u7"]
        assert await send(8, "big") == (expected, "big")
        asked = upstream.requests[0].body
        assert (asked["max_tokens"], len(upstream.requests)) == (16, 2)
        assert "user: u0 word" in asked["messages"][0]["content"]
        assert "a6 word" in asked["messages"][0]["content"]
        assert upstream.requests[1].body["messages"][1]["content"].endswith("so far:\nYes.")
        assert await send(8, "big") == (expected, "big")
        assert len(upstream.requests) == 3
        assert await send(8, "other") == (["Be", "u7", "a7", "question"], None)


@pytest.mark.parametrize("kind", ["openai", "vllm"])
async def test_refuses_by_name_what_nobody_can_count(kind: BackendKind) -> None:
    async with truncating_gateway(TruncationRule(), kind=kind) as (client, upstream):
        upstream.tokenize_status = 500
        body = chat(1)
        body["messages"][1]["content"] = "w" * 128 * (CONTEXT + 5)
        response = await client.post("/v1/chat/completions", json=body)
        if kind == "vllm":
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        response = await client.post("/v1/chat/completions", json=chat(8))
        assert response.status_code == 200, response.text  # the server checks it
