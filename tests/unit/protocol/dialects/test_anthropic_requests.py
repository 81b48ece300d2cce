"""Requests of the Messages API in their internal form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.case_tables import read_cases

from argosy.protocol import ApiError, ChatCompletionRequest, TokenizeRequest, parse_body
from argosy.protocol.dialects import translate_count_tokens_request, translate_messages_request

CASES = Path(__file__).with_name("translations.jsonl")
USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=1f3a;"


def translate(**fields: Any) -> tuple[dict[str, Any], tuple[str, ...]]:  # noqa: ANN401 - any JSON
    body = {"model": "big", "max_tokens": 9, "messages": [USER], **fields}
    request = translate_messages_request(json.dumps(body).encode())
    encoded = json.dumps(request.body).encode()
    parse_body(ChatCompletionRequest, encoded)  # a chat that replicas accept
    return json.loads(encoded), request.ignored


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    ("messages", "expected"),
    read_cases(CASES, "anthropic messages"),
)
def test_messages(messages: list[Any], expected: list[Any]) -> None:
    body, ignored = translate(messages=messages)
    assert (body["messages"], ignored) == (expected, ())


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("s", "s"),
        ([text("a"), text("b")], "a\nb"),
        ([text(BILLING), text("s") | {"cache_control": {"type": "ephemeral"}}], "s"),
        (f"{BILLING}\nYou are x.", "You are x."),
    ],
)
def test_system_prompt_without_billing_header(system: Any, expected: str) -> None:  # noqa: ANN401 - any JSON
    body, _ = translate(system=system)
    assert body["messages"] == [{"role": "system", "content": expected}, USER]


def test_system_prompt_of_billing_header_only_is_left_out() -> None:
    assert translate(system=BILLING)[0]["messages"] == [USER]


@pytest.mark.parametrize(
    ("fields", "expected"),
    read_cases(CASES, "anthropic fields"),
)
def test_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    body, ignored = translate(**fields)
    assert body.items() >= {**expected, "max_tokens": 9}.items()
    assert ignored == ()


def test_what_has_no_effect_is_named() -> None:
    _, ignored = translate(
        context_management={},
        mcp_servers=[],
        tools=[TOOL, {"type": "web_search_20260209", "name": "web_search"}],
        messages=[{"role": "user", "content": [text("a"), {"type": "container_upload"}]}],
    )
    assert ignored == ("context_management", "mcp_servers", "messages[0].content[1]", "tools[1]")


@pytest.mark.parametrize(
    ("fields", "param"),
    read_cases(CASES, "anthropic errors"),
)
def test_invalid_requests_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        translate(**fields)
    assert (error.value.status, error.value.param) == (400, param)


def test_count_tokens_is_a_tokenize_request() -> None:
    request = {"model": "big", "system": "s", "messages": [USER], "tools": [TOOL]}
    body, ignored = translate_count_tokens_request(json.dumps(request | {"x": 1}).encode())
    parse_body(TokenizeRequest, json.dumps(body).encode())
    assert body["messages"] == [{"role": "system", "content": "s"}, USER]
    assert (body["tools"], body["add_generation_prompt"]) == ([CHAT_TOOL], True)
    assert ignored == ("x",)
