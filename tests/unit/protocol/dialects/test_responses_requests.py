"""Requests of the Responses API in their internal form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.case_tables import read_cases

from argosy.protocol import ApiError, ChatCompletionRequest, parse_body
from argosy.protocol.dialects import (
    ReasoningCipher,
    ResponsesRequest,
    assign_item_ids,
    list_references,
    parse_responses_request,
    resolve_references,
    translate_responses_request,
)

CASES = Path(__file__).with_name("translations.jsonl")
CIPHER = ReasoningCipher(
    lambda text: f"sealed:{text}",
    lambda text: text.removeprefix("sealed:") if text.startswith("sealed:") else None,
)
FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "patch", "description": "Edits files."}
NAMESPACE = {"type": "namespace", "name": "mcp__x__", "description": "", "tools": [FUNCTION]}
USER = {"role": "user", "content": "Hi"}


def translate(
    history: list[dict[str, Any]] | None = None,
    **fields: Any,  # noqa: ANN401 - any JSON
) -> tuple[dict[str, Any], tuple[str, ...]]:
    body = {"model": "big", "input": "Hi", **fields}
    request, unknown = parse_responses_request(ResponsesRequest, json.dumps(body).encode())
    translated = translate_responses_request(request, CIPHER, request.input_items(), history or ())
    encoded = json.dumps(translated.body).encode()
    parse_body(ChatCompletionRequest, encoded)  # a chat that replicas accept
    return json.loads(encoded), (*unknown, *translated.ignored)


@pytest.mark.parametrize(
    ("items", "expected"),
    read_cases(CASES, "responses items"),
)
def test_input_items(items: Any, expected: list[Any]) -> None:  # noqa: ANN401 - any JSON
    body, ignored = translate(input=items)
    assert (body["messages"], ignored) == (expected, ())


def test_history_precedes_input_and_instructions_are_not_inherited() -> None:
    history = [
        {"type": "message", "id": "msg_1", "role": "user", "content": "first"},
        {"type": "message", "id": "msg_2", "role": "assistant", "content": "answer"},
    ]
    body, _ = translate(history, instructions="new")
    contents = [message["content"] for message in body["messages"]]
    assert contents == ["new", "first", "answer", "Hi"]


def test_references_are_replaced_by_stored_items() -> None:
    history, other = [{"type": "message", "id": "msg_1"}], {"type": "message", "id": "msg_9"}
    items = [{"type": "item_reference", "id": "msg_1"}, {"type": "item_reference", "id": "msg_9"}]
    assert list_references([*items, USER]) == ["msg_1", "msg_9"]
    assert resolve_references([*items, USER], history, {"msg_9": other}) == [other, USER]
    with pytest.raises(ApiError, match=r"input\[0\]"):
        resolve_references(items, [], {"msg_9": other})


@pytest.mark.parametrize(
    ("fields", "expected"),
    read_cases(CASES, "responses fields"),
)
def test_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    body, _ = translate(**fields)
    assert body.items() >= expected.items()


def test_tools_of_codex() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    body, ignored = translate(
        tools=[
            FUNCTION,
            CUSTOM | {"format": grammar},
            NAMESPACE,
            {"type": "web_search"},
            {"type": "local_shell"},
        ],
        store=False,
        client_metadata={"x": "y"},
        include=["reasoning.encrypted_content"],
        input=[USER, {"type": "additional_tools", "tools": []}],
        max_tool_calls=3,
    )
    function, custom, namespaced = body["tools"]
    assert function["function"]["name"] == "f"
    assert namespaced["function"] == function["function"] | {"name": "mcp__x__f"}
    assert custom["custom"]["description"].startswith("Edits files.\n\nThe input follows this lark")
    assert "format" not in custom["custom"]
    assert ignored == ("max_tool_calls", "tools[1].format", "tools[3]", "tools[4]", "input[1]")


@pytest.mark.parametrize(
    ("fields", "param"),
    read_cases(CASES, "responses errors"),
)
def test_invalid_requests_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        translate(**fields)
    assert (error.value.status, error.value.param) == (400, param)


def test_reasoning_of_other_servers_is_left_out() -> None:
    body, _ = translate(input=[{"type": "reasoning", "encrypted_content": "gAAAA"}, USER])
    assert body["messages"] == [USER]


def test_stored_items_have_ids_and_parts() -> None:
    items = [
        {"type": "message", "role": "user", "content": "Hi"},
        {"type": "function_call_output", "call_id": "c", "output": "x", "id": "fco_own"},
    ]
    assert assign_item_ids(items, lambda: "7") == [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Hi"}],
            "id": "msg_7",
            "status": "completed",
        },
        items[1],
    ]


@pytest.mark.parametrize("own_id", ["", "a\0b", "x" * 3000, 7])
def test_ids_that_a_store_may_not_hold_are_replaced(own_id: object) -> None:
    (item,) = assign_item_ids([{"type": "reasoning", "id": own_id}], lambda: "7")
    assert item["id"] == "rs_7"
