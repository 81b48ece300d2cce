"""Requests of the Messages API in their internal form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from argosy.protocol import ApiError, ChatCompletionRequest, TokenizeRequest, parse_body
from argosy.protocol.dialects import translate_count_tokens_request, translate_messages_request

USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=1f3a;"
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


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
    [
        ([USER], [{"role": "user", "content": "Hi"}]),
        (
            [{"role": "user", "content": [text("a"), text("b")]}],
            [{"role": "user", "content": "a\nb"}],
        ),
        (
            [{"role": "user", "content": [text("a"), PNG]}],
            [{"role": "user", "content": [text("a"), PNG_PART]}],
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "document",
                            "title": "T",
                            "source": {"type": "text", "data": "body", "media_type": "text/plain"},
                        }
                    ],
                }
            ],
            [{"role": "user", "content": "T\nbody"}],
        ),
        ([{"role": "system", "content": "s"}, USER], [{"role": "system", "content": "s"}, USER]),
        (
            [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        {"type": "redacted_thinking", "data": "x"},
                        text("a"),
                        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "is_error": True,
                            "content": [text("r"), PNG],
                        },
                        text("go on"),
                    ],
                },
            ],
            [
                {
                    "role": "assistant",
                    "content": "a",
                    "reasoning_content": "t",
                    "tool_calls": [
                        {
                            "id": "toolu_1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"x":1}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: r"},
                {"role": "user", "content": [PNG_PART, text("go on")]},
            ],
        ),
    ],
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
    [
        (
            {"stream": True},
            {
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        ),
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3}, {"temperature": 0.5, "top_k": 3}),
        ({"metadata": {"user_id": "u"}}, {"user": "u"}),
        ({"seed": 7, "timeout_s": 2.5, "session_id": "s"}, {"seed": 7, "timeout_s": 2.5}),
        ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {
                "tools": [TOOL | {"type": "custom"}],
                "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            },
            {
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"reasoning_effort": "medium", "thinking_token_budget": 1024},
        ),
        (
            {
                "thinking": {"type": "adaptive", "budget_tokens": 0},
                "output_config": {"effort": "high"},
            },
            {"reasoning_effort": "high"},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "response",
                        "schema": {"type": "object"},
                        "strict": True,
                    },
                }
            },
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "The answer is"}]},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
    ],
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
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        (
            {"messages": [{"role": "user", "content": [PNG | {"source": {"type": "file"}}]}]},
            "messages[0].content[0].source",
        ),
    ],
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
