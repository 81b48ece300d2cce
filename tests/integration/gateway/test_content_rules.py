"""Content rules in a gateway: every dialect, channel and division, failover in a match, prompts, and refusals."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest, listening
from tests.support.gateway_client import check_settings_error, run_gateway_server
from tests.support.native_upstream import (
    Delta,
    NativeScript,
    NativeUpstream,
    continue_call,
    start_call,
    think,
)

from argosy.deployment import (
    BackendKind,
    ContentRule,
    GatewayConfig,
    ModelConfig,
    ReplicaConfig,
)
from argosy.protocol import SSE_DONE, format_event

SECRETS = ("jo@example.com", "4111 1111 1111 1111")
TEXT = "Write to jo@example.com, card 4111 1111 1111 1111. Bye"
FILTERED = "Write to [email], card **** **** **** 1111. Bye"
ARGUMENTS = json.dumps({"to": SECRETS[0], "card": 4111111111111111, "note": "caf\u00e9"})
RULE = ContentRule(name="pii", output={"*": "redact", "card": "mask"})
MESSAGES = [{"role": "user", "content": "Tell me"}]


@dataclass
class FilteringGateway:
    """A gateway with content rules in front of one scripted replica."""

    client: httpx2.AsyncClient
    replica: Any
    """A `NativeUpstream`, or the one that a test brings."""

    def speak(self, *texts: str, size: int = 1, think_first: str = "") -> None:
        """Let the replica answer with texts, in pieces of `size` characters."""
        pieces = [each[at : at + size] for each in texts for at in range(0, len(each), size)]
        thoughts = [think(each) for each in think_first]
        self.script([*thoughts, *({"content": piece} for piece in pieces)])

    def script(self, deltas: list[Delta], finish_reason: str = "stop") -> None:
        self.replica.native_script = NativeScript(deltas=deltas, finish_reason=finish_reason)

    async def post(self, path: str = "/v1/chat/completions", **fields: Any) -> httpx2.Response:  # noqa: ANN401
        body = {"model": "big", "messages": MESSAGES, "max_tokens": 300} | fields
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response

    async def chat(self, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return the only choice of an answer in one piece."""
        choice: dict[str, Any]
        (choice,) = (await self.post(**fields)).json()["choices"]
        return choice

    async def explain(self, response: httpx2.Response) -> list[dict[str, Any]]:
        """Return what the explanation of a request says of its content."""
        path = f"/admin/requests/{response.headers['x-argosy-request']}"
        content: list[dict[str, Any]] = (await self.client.get(path)).json()["content"]
        return content


@contextlib.asynccontextmanager
async def filtering_gateway(
    *rules: ContentRule,
    replicas: int = 1,
    replica: FakeUpstream | None = None,
    kind: BackendKind = "argosy",
) -> AsyncIterator[FilteringGateway]:
    replica = replica or NativeUpstream()
    async with listening(replica):
        model = ModelConfig(
            name="big",
            replicas=[
                ReplicaConfig(url=replica.url, kind=kind, model="m", name=f"r{n}")
                for n in range(replicas)
            ],
        )
        config = GatewayConfig(port=0, models=[model], content_rules=list(rules or [RULE]))
        async with run_gateway_server(config) as (_, client):
            yield FilteringGateway(client, replica)


DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {}),
    "responses": ("/v1/responses", {"input": "Tell me", "store": False}),
    "messages": ("/v1/messages", {}),
    "ollama": ("/api/chat", {}),
}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_sends_only_filtered_text(dialect: str) -> None:
    path, fields = DIALECTS[dialect]
    async with filtering_gateway() as gateway:
        for is_stream in (False, True):
            for size in (1, 5, 1000):
                gateway.speak(TEXT, size=size, think_first="jo@example.com?")
                response = await gateway.post(path, stream=is_stream, **fields)
                assert not any(secret in response.text for secret in SECRETS)
                if not is_stream:
                    assert FILTERED in response.text
                assert "example" not in response.text
                assert "4111 1" not in response.text


@pytest.mark.parametrize("cut_after", range(8, len(TEXT), 3))
async def test_failover_inside_a_match_changes_nothing(cut_after: int) -> None:
    async with filtering_gateway(replicas=2) as gateway:
        gateway.speak(TEXT)
        gateway.replica.cut_after = cut_after
        events = (await gateway.post(stream=True)).text
        chunks = [
            json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")
        ]
        assert (
            "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
            == FILTERED
        )
        assert gateway.replica.cut_after is None


async def test_tool_arguments_end_the_answer_or_stay_valid() -> None:
    call = [start_call(0, "send_mail"), *(continue_call(0, each) for each in ARGUMENTS)]
    async with filtering_gateway() as gateway:
        gateway.script([{"content": "One moment. "}, *call], "tool_calls")
        response = await gateway.post()
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "content_filter"
        assert choice["message"]["content"] == "One moment. "
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"to": "'
        assert await gateway.explain(response) == [
            {"rule": "pii", "side": "output", "detector": "email", "action": "stop", "count": 1}
        ]
    async with filtering_gateway(
        msgspec.structs.replace(RULE, tool_arguments="as_output")
    ) as gateway:
        gateway.script(call, "tool_calls")
        for is_stream in (False, True):
            choice = await gateway.chat()
            assert is_stream or choice["finish_reason"] == "tool_calls"
            arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
            assert json.loads(arguments) == {"to": "[email]", "card": None, "note": "caf\u00e9"}


async def test_stop_ends_the_stream_before_the_match_and_bills_what_was_generated() -> None:
    async with filtering_gateway(ContentRule(output={"email": "stop"})) as gateway:
        for is_stream in (False, True):
            gateway.speak(TEXT + " and more" * 50)
            response = await gateway.post(stream=is_stream)
            assert "Bye" not in response.text
            assert "jo@" not in response.text
            assert response.text.count('"finish_reason":"content_filter"') == 1
        choice = await gateway.chat()
        assert choice["message"]["content"] == "Write to "


async def test_json_output_stays_valid_and_token_details_are_left_out() -> None:
    async with filtering_gateway() as gateway:
        gateway.speak(ARGUMENTS)
        response = await gateway.post(
            response_format={"type": "json_object"}, logprobs=True, return_token_ids=True
        )
        (choice,) = response.json()["choices"]
        assert json.loads(choice["message"]["content"]) == {
            "to": "[email]",
            "card": None,
            "note": "caf\u00e9",
        }
        assert not choice["logprobs"]
        assert not choice.get("token_ids")
        assert "logprobs" in response.headers["x-argosy-ignored-fields"]


BODY_MESSAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reasoning in both fields, and extras": (
        {"content": "It is jo@example.com", "reasoning_content": "jo@example.com?", "reasoning": "jo@example.com?",
         "reasoning_details": [{"text": "jo@example.com"}], "audio": {"transcript": "jo@example.com"}},
        {"content": "It is [email]", "reasoning_content": "[email]?", "reasoning": "[email]?"},
    ),
    "parts": (
        {"content": [{"type": "text", "text": "jo@exa"}, {"type": "thinking", "thinking": "jo@example.com"},
                     {"type": "text", "text": "mple.com!"}]},
        {"content": "[email]!"},
    ),
    "an old function call": (
        {"content": None, "function_call": {"name": "f", "arguments": ARGUMENTS}}, {"content": None},
    ),
    "calls after a text that is left": (
        {"content": "Hi", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "b", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}]},
        {"content": "Hi"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BODY_MESSAGES)
async def test_answers_of_other_engines_in_one_piece_leave_no_way_around(case: str) -> None:
    message, expected = BODY_MESSAGES[case]

    async def respond(request: UpstreamRequest) -> None:
        choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        extras = {
            "logprobs": {"content": [{"token": "jo@example.com"}]},
            "meta_info": "jo@example.com",
        }
        answer = {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "prompt_text": "jo@example.com",
        }
        request.send_json(200, answer | {"choices": [choice | extras], "usage": usage})

    async with filtering_gateway(replica=FakeUpstream(respond), kind="openai") as gateway:
        response = await gateway.post()
        (choice,) = response.json()["choices"]
        assert {
            name: value for name, value in choice["message"].items() if name != "role"
        } == expected
        is_stopped = "content" in expected and expected["content"] in {None, "Hi"}
        assert choice["finish_reason"] == ("content_filter" if is_stopped else "stop")
        assert "example" not in response.text


async def test_streams_of_other_engines_leave_no_way_around() -> None:
    deltas: list[dict[str, Any]] = [
        {
            "reasoning_content": "jo@",
            "reasoning": "jo@",
            "reasoning_details": [{"text": "jo@example.com"}],
        },
        {"reasoning_content": "example.com", "reasoning": "example.com"},
        {"function_call": {"name": "f", "arguments": '{"to": "jo@exam'}},
        {"function_call": {"arguments": 'ple.com"}'}},
    ]

    async def respond(request: UpstreamRequest) -> None:
        request.start_stream()
        for number, delta in enumerate([*deltas, {}]):
            reason = "stop" if number == len(deltas) else None
            choice = {
                "index": 0,
                "delta": delta,
                "finish_reason": reason,
                "text_offset": "jo@example.com",
            }
            chunk = {
                "id": "x",
                "object": "chat.completion.chunk",
                "created": 1,
                "model": "m",
                "choices": [choice],
            }
            request.send_chunk(format_event(json.dumps(chunk).encode()))
        request.send_chunk(SSE_DONE)
        request.send_chunk(b"")

    rule = msgspec.structs.replace(RULE, tool_arguments="as_output")
    async with filtering_gateway(rule, replica=FakeUpstream(respond), kind="openai") as gateway:
        text = (await gateway.post(stream=True)).text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        found = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(each.get("reasoning") or "" for each in found) == "[email]"
        calls = [each["function_call"]["arguments"] for each in found if each.get("function_call")]
        assert json.loads("".join(calls)) == {"to": "[email]"}
        assert "example" not in text


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "data: jo@example.com"}]},
        {"messages": [{"role": "user", "name": "jo@example.com", "content": "Hi"}]},
        {"documents": [{"name": "jo@example.com", "data": "jo@example.com"}]},
        {"prediction": {"type": "content", "content": "jo@example.com"}},
    ],
)
async def test_no_field_of_a_prompt_is_a_way_around(fields: dict[str, Any]) -> None:
    async with filtering_gateway(ContentRule(input={"email": "redact"})) as gateway:
        gateway.speak("Hi")
        await gateway.post(**fields)
        sent = json.dumps(gateway.replica.requests[-1].body)
        assert "example" not in sent
        assert "[email]" in sent


async def test_prompts_are_filtered_and_restored() -> None:
    rule = ContentRule(input={"email": "redact", "card": "mask"}, restore=True)
    history = [
        {"role": "system", "content": "Help a@example.com"},
        {"role": "user", "content": [{"type": "text", "text": "I am b@example.com"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"to": "a\\u0040example.com"}'}}
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "4111 1111 1111 1111 of b@example.com"},
    ]  # fmt: skip
    async with filtering_gateway(rule) as gateway:
        gateway.speak("Dear [email_2] and [email_1], not [email_3].")
        choice = await gateway.chat(messages=history)
        assert (
            choice["message"]["content"] == "Dear b@example.com and a@example.com, not [email_3]."
        )
        sent = [request for request in gateway.replica.requests if "messages" in request.body][
            -1
        ].body["messages"]
        assert [sent[0]["content"], sent[1]["content"][0]["text"], sent[3]["content"]] == [
            "Help [email_1]",
            "I am [email_2]",
            "**** **** **** 1111 of [email_2]",
        ]
        assert json.loads(sent[2]["tool_calls"][0]["function"]["arguments"]) == {"to": "[email_1]"}
        call = [start_call(0, "f"), *(continue_call(0, each) for each in '{"to": "[email_2]"}')]
        gateway.script(call, "tool_calls")
        response = await gateway.post(messages=history)
        (choice,) = response.json()["choices"]
        assert (
            choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"to": "b@example.com"}'
        )
        findings = await gateway.explain(response)
        assert [(each["detector"], each["count"]) for each in findings] == [
            ("card", 1),
            ("email", 4),
        ]
        metrics = (await gateway.client.get("/metrics")).text
        (line,) = [
            each
            for each in metrics.splitlines()
            if each.startswith("argosy_gateway_content_matches_total") and '"email"' in each
        ]
        assert 'rule="content_rules[0]"' in line
        assert float(line.rpartition(" ")[2]) == 8


async def test_prompts_are_refused_without_their_text_in_the_error() -> None:
    rule = ContentRule(
        name="own", input={"email": "stop", "code": "stop"}, patterns={"code": r"X-\d{3}"}
    )
    async with filtering_gateway(rule) as gateway:
        for prompt, name in (("mail jo@example.com", "email"), ("see X-123", "code")):
            body: dict[str, Any] = {
                "model": "big",
                "messages": [{"role": "user", "content": prompt}],
            }
            response = await gateway.client.post("/v1/chat/completions", json=body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("content_refused", "messages")
            assert f"({name})" in error["message"]
            assert "jo@" not in response.text
        body = {"model": "big", "prompt": [1, 2, 3]}
        response = await gateway.client.post("/v1/completions", json=body)
        assert response.json()["error"]["code"] == "content_not_filterable"
        assert not [each for each in gateway.replica.requests if "messages" in each.body]


async def test_first_rule_whose_conditions_hold_decides() -> None:
    rules = (
        ContentRule(headers={"x-raw": "1"}, output={"email": "report"}),
        ContentRule(output={"email": "redact"}),
    )
    async with filtering_gateway(*rules) as gateway:
        gateway.speak(TEXT)
        body = {"model": "big", "messages": MESSAGES}
        response = await gateway.client.post(
            "/v1/chat/completions", json=body, headers={"x-raw": "1"}
        )
        assert response.json()["choices"][0]["message"]["content"] == TEXT
        assert (await gateway.chat())["message"]["content"].startswith(
            "Write to [email], card 4111"
        )


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{}", "nothing is filtered"),
        ("{output: {emial: redact}}", "no detector has the name 'emial'"),
        ("{output: {email: remove}}", "Invalid enum value 'remove'"),
        ("{input: {email: mask}, restore: true}", "nothing in `input` has the action redact"),
        ("{output: {own: redact}, patterns: {own: 'a+'}}", "Replace \\* and \\+ by bounds"),
        ("{output: {email: redact}, words: {email: [x]}}", "the name 'email' is taken"),
        ("{output: {email: redact}, tiers: [free]}", "which need a store"),
        ("{output: {email: redact}, model: other}", "no model has the name 'other'"),
    ],
)
def test_invalid_rules_say_what_to_change(rule: str, message: str, tmp_path: Path) -> None:
    check_settings_error(tmp_path, f"content_rules: [{rule}]", message)
