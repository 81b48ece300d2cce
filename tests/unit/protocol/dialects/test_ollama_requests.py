"""Requests of Ollama's API in their internal form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.case_tables import read_cases

from argosy.protocol import ApiError, ChatCompletionRequest, CompletionRequest, parse_body
from argosy.protocol.dialects import (
    OllamaModelRequest,
    is_load_request,
    translate_ollama_chat,
    translate_ollama_generate,
)

CASES = Path(__file__).with_name("translations.jsonl")
USER = {"role": "user", "content": "Hi"}


def clock() -> float:
    return 0.0


def chat(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    body = {"model": "big", "messages": [USER], **fields}
    request = translate_ollama_chat(json.dumps(body).encode(), clock)
    parse_body(ChatCompletionRequest, json.dumps(request.body).encode())
    return request.body


@pytest.mark.parametrize(
    ("fields", "expected"),
    read_cases(CASES, "ollama fields"),
)
def test_chat_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert chat(**fields).items() >= expected.items()


def test_no_limit_on_output() -> None:
    assert "max_tokens" not in chat(options={"num_predict": -1})
    assert "response_format" not in chat(format="")


def test_results_refer_to_calls_by_name_and_order() -> None:
    calls = [
        {"function": {"name": name, "arguments": {"n": number}}}
        for number, name in enumerate(["f", "g", "f"])
    ]
    messages = chat(
        messages=[
            {"role": "assistant", "content": "", "thinking": "t", "tool_calls": calls},
            {"role": "tool", "content": "of g", "tool_name": "g"},
            {"role": "tool", "content": "of f", "tool_name": "f"},
            {"role": "tool", "content": "of the rest"},
        ]
    )["messages"]
    assert [call["id"] for call in messages[0]["tool_calls"]] == ["call_0", "call_1", "call_2"]
    assert messages[0]["tool_calls"][1]["function"] == {"name": "g", "arguments": '{"n":1}'}
    assert messages[0]["reasoning_content"] == "t"
    assert [message["tool_call_id"] for message in messages[1:]] == ["call_1", "call_0", "call_2"]


def test_generate_is_a_chat_unless_raw() -> None:
    body: dict[str, Any] = {"model": "big", "prompt": "Hi", "system": "s"}
    request = translate_ollama_generate(json.dumps(body).encode(), clock)
    assert not request.is_completion
    assert request.body["messages"] == [{"role": "system", "content": "s"}, USER]
    raw = {"model": "big", "prompt": "Hi", "raw": True, "options": {"num_ctx": 9}, "logprobs": True}
    request = translate_ollama_generate(json.dumps(raw).encode(), clock)
    parse_body(CompletionRequest, json.dumps(request.body).encode())
    assert request.is_completion
    assert request.body["prompt"] == "Hi"
    assert request.ignored == ("options.num_ctx", "logprobs")


@pytest.mark.parametrize("body", [{"model": "big"}, {"model": "big", "messages": []}])
def test_request_without_prompt_loads_the_model(body: dict[str, Any]) -> None:
    assert is_load_request(translate_ollama_chat(json.dumps(body).encode(), clock))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"format": "yaml"}, "format"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ({"model": None}, "model"),
    ],
)
def test_invalid_requests_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        chat(**fields)
    assert (error.value.status, error.value.param) == (400, param)


def test_unsupported_generate_fields_are_refused() -> None:
    body = {"model": "big", "prompt": "def f(", "suffix": "return x"}
    with pytest.raises(ApiError, match="suffix"):
        translate_ollama_generate(json.dumps(body).encode(), clock)


def test_model_of_older_clients_is_its_name() -> None:
    assert OllamaModelRequest(name="big:latest").require_model() == "big"
    with pytest.raises(ApiError, match="model"):
        OllamaModelRequest().require_model()
