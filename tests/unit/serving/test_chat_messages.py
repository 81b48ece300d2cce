"""Messages for chat templates: tool calls, results and reasoning in the shapes that templates expect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from argosy.engine.serving.preprocessing.chat_messages import to_template_messages
from argosy.protocol import ApiError, ChatMessageParam

TEXT = {"type": "text", "text": "x"}


def convert(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return to_template_messages(
        [msgspec.convert(message, ChatMessageParam) for message in messages],
        range(len(messages)),
        lambda call_id, name, number: f"{name}-{number}-{call_id}",
    ).messages


def assistant(arguments: object) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"b": 1, "a": [2]}', {"b": 1, "a": [2]}),
        ({"b": 1}, {"b": 1}),
        ("", {}),
        (None, {}),
        ("[1]", {"arguments": [1]}),
        ('{"cut', {"arguments": '{"cut'}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
)
def test_arguments_become_a_mapping_in_the_clients_order(
    arguments: object, expected: dict[str, Any]
) -> None:
    (message,) = convert(assistant(arguments))
    function = message["tool_calls"][0]["function"]
    assert "content" not in message
    assert function["arguments"] == expected
    assert list(function["arguments"]) == list(expected)


def test_results_name_the_call_by_its_mapped_id() -> None:
    result = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "5"}]}
    _, message = convert(assistant("{}"), result)
    assert message == {"role": "tool", "content": "5", "tool_call_id": "f-0-a", "name": "f"}


def test_legacy_calls_and_results_become_tool_calls() -> None:
    call = {"role": "assistant", "function_call": {"name": "g", "arguments": '{"x": 1}'}}
    first, second = convert(call, {"role": "function", "name": "g", "content": "2"})
    assert first["tool_calls"][0]["function"] == {"name": "g", "arguments": {"x": 1}}
    assert second["role"] == "tool"
    assert second["tool_call_id"] == first["tool_calls"][0]["id"]


def test_a_custom_call_becomes_a_call_with_one_argument() -> None:
    call = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": "*** x"}}
    (message,) = convert({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"] == {
        "name": "patch",
        "arguments": {"input": "*** x"},
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "why"},
        {"reasoning": "why"},
        {"thinking": "why"},
        {"thinking_blocks": [{"type": "thinking", "thinking": "why"}, "odd"]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "why"}]},
        {"content": [{"type": "thinking", "thinking": "why"}, TEXT]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "why"}]}, TEXT]},
        {"content": [{"type": "reasoning", "text": "why"}, TEXT]},
        {"content": [TEXT, {"type": "reasoning", "reasoning": "why"}]},
    ],
)
def test_reasoning_gets_every_name_that_templates_read(fields: dict[str, Any]) -> None:
    (message,) = convert({"role": "assistant", "content": "x", **fields})
    assert message["reasoning_content"] == message["reasoning"] == message["thinking"] == "why"
    assert message["content"] == "x"


@pytest.mark.parametrize(
    ("fields", "content"), [({}, "[audio omitted]"), ({"content": [TEXT]}, "x")]
)
def test_text_beside_an_earlier_sound_is_kept(fields: dict[str, Any], content: str) -> None:
    earlier = {"role": "assistant", "audio": {"id": "a"}, **fields}
    message, _ = convert(earlier, {"role": "user", "content": "y"})
    assert message["content"] == content


@pytest.mark.parametrize(
    "call", [{"id": "a"}, {"function": {"arguments": "{}"}}, {"function": {"name": ""}}]
)
def test_a_call_without_a_name_is_refused_by_its_path(call: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as error:
        convert({"role": "assistant", "tool_calls": [call]})
    assert error.value.param == "messages[0].tool_calls[0].function.name"
