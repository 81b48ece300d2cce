"""Requests with a wrong value somewhere: each is translated or refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from argosy.protocol import ApiError
from argosy.protocol.dialects import (
    ReasoningCipher,
    ResponsesRequest,
    parse_responses_request,
    translate_messages_request,
    translate_ollama_chat,
    translate_responses_request,
)

TEXT = {"type": "text", "text": "Hi"}
SCHEMA = {"type": "object", "properties": {"x": {"enum": ["a"]}}}
RESPONSES = {
    "model": "big",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "content": [TEXT], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [TEXT]},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": SCHEMA},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "definition": "a"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h"}]},
    ],
    "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
}
MESSAGES = {
    "model": "big",
    "max_tokens": 9,
    "system": [TEXT],
    "messages": [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}],
        },
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "metadata": {"user_id": "u"},
}
OLLAMA = {
    "model": "big",
    "messages": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "a"}}}]},
        {"role": "tool", "tool_name": "f", "content": "ok"},
    ],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "format": SCHEMA,
    "options": {"num_predict": 5, "stop": ["x"]},
    "think": True,
}


def translate_responses(body: bytes) -> object:
    cipher = ReasoningCipher(str, str)
    request, _ = parse_responses_request(ResponsesRequest, body)
    return translate_responses_request(request, cipher, request.input_items(), ())


TRANSLATIONS: list[tuple[dict[str, Any], Callable[[bytes], object]]] = [
    (RESPONSES, translate_responses),
    (MESSAGES, translate_messages_request),
    (OLLAMA, lambda body: translate_ollama_chat(body, lambda: 0.0)),
]


VALUES: list[Any] = [None, True, -1, 10**400, 1e308, "", "\0", [], [[]], {}, {"type": []}, [{}]]


def mutate(body: dict[str, Any]) -> Iterator[bytes]:
    """Yield the body with each of the values at each place."""
    for container, key in list_places(body):
        original = container[key]
        for value in VALUES:
            container[key] = value
            yield json.dumps(body).encode()
        container[key] = original


def list_places(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - any JSON
    """Yield each container in a value with each of its keys or indexes."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from list_places(value[key])


@pytest.mark.parametrize(("body", "translate"), TRANSLATIONS)
def test_wrong_value_anywhere_is_translated_or_refused(
    body: dict[str, Any], translate: Callable[[bytes], object]
) -> None:
    statuses = set()
    for mutated in mutate(copy.deepcopy(body)):
        try:
            translate(mutated)
        except ApiError as error:
            statuses.add(error.status)
    assert statuses == {400}
