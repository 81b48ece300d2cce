"""Requests of the dialects in their internal form, and the fields that errors name."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given
from hypothesis import strategies as st
from tests.support.case_tables import read_cases

from argosy.constraints import read_tools
from argosy.protocol import (
    NO_TOKENS,
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    parse_body,
)
from argosy.protocol.dialects import (
    ErrorEncoder,
    OllamaModelRequest,
    OutputIdentity,
    ReasoningCipher,
    ResponsesRequest,
    assign_item_ids,
    encode_anthropic_error,
    encode_ollama_error,
    encode_responses_error,
    is_load_request,
    list_references,
    parse_responses_request,
    resolve_references,
    translate_count_tokens_request,
    translate_messages_request,
    translate_ollama_chat,
    translate_ollama_generate,
    translate_responses_request,
)

Json = dict[str, Any]
CASES = Path(__file__).with_name("translations.jsonl")
CIPHER = ReasoningCipher(
    lambda text: f"sealed:{text}",
    lambda text: text.removeprefix("sealed:") if text.startswith("sealed:") else None,
)
USER = {"role": "user", "content": "Hi"}


def encode(body: object) -> bytes:
    return json.dumps(body).encode()


def translate_responses(body: bytes, history: list[Json] | None = None) -> tuple[Json, Any]:
    request, unknown = parse_responses_request(ResponsesRequest, body)
    translated = translate_responses_request(request, CIPHER, request.input_items(), history or ())
    return translated.body, (*unknown, *translated.ignored)


def translate_anthropic(body: bytes) -> tuple[Json, Any]:
    request = translate_messages_request(body)
    return request.body, request.ignored


def translate_ollama(body: bytes) -> tuple[Json, Any]:
    request = translate_ollama_chat(body, lambda: 0.0)
    return request.body, request.ignored


TRANSLATIONS: dict[str, tuple[Json, Callable[..., tuple[Json, Any]]]] = {
    "responses": ({"input": "Hi"}, translate_responses),
    "anthropic": ({"max_tokens": 9, "messages": [USER]}, translate_anthropic),
    "ollama": ({"messages": [USER]}, translate_ollama),
}
"""Fields that a request needs besides its model, and its translation, by API."""


def translate(api: str, *history: Json, **fields: Any) -> tuple[Json, tuple[str, ...]]:  # noqa: ANN401 - any JSON
    """Translate a request to a chat that replicas accept. Returns it, and the names of ignored fields."""
    needed, translate_body = TRANSLATIONS[api]
    request = encode({"model": "big", **needed, **fields})
    body, ignored = translate_body(request, *([[*history]] if history else []))
    parse_body(ChatCompletionRequest, encode(body))
    return json.loads(encode(body)), ignored


def read_all(kind: str) -> list[ParameterSet]:
    """Return the cases of a kind of all APIs, with the API before their columns."""
    return [
        pytest.param(api, *case.values, id=f"{api} {case.id}")
        for api in TRANSLATIONS
        for case in read_cases(CASES, f"{api} {kind}")
    ]


@pytest.mark.parametrize(("api", "fields", "expected"), read_all("fields"))
def test_fields(api: str, fields: Json, expected: Json) -> None:
    body, ignored = translate(api, **fields)
    assert body.items() >= expected.items()
    assert api != "anthropic" or (body["max_tokens"], ignored) == (9, ())


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        *read_all("errors"),
        ("ollama", {"format": "yaml"}, "format"),
        ("ollama", {"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ("ollama", {"model": None}, "model"),
    ],
)
def test_invalid_requests_name_the_field(api: str, fields: Json, param: str) -> None:
    with pytest.raises(ApiError) as error:
        translate(api, **fields)
    assert (error.value.status, error.value.param) == (400, param)


# --- Responses -----------------------------------------------------------------------------------

FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "patch", "description": "Edits files."}
NAMESPACE = {"type": "namespace", "name": "mcp__x__", "description": "", "tools": [FUNCTION]}


@pytest.mark.parametrize(
    ("items", "expected"),
    read_cases(CASES, "responses items"),
)
def test_input_items(items: Any, expected: list[Any]) -> None:  # noqa: ANN401 - any JSON
    body, ignored = translate("responses", input=items)
    assert (body["messages"], ignored) == (expected, ())


def test_history_precedes_input_and_instructions_are_not_inherited() -> None:
    history = [
        {"type": "message", "id": "msg_1", "role": "user", "content": "first"},
        {"type": "message", "id": "msg_2", "role": "assistant", "content": "answer"},
    ]
    body, _ = translate("responses", *history, instructions="new")
    contents = [message["content"] for message in body["messages"]]
    assert contents == ["new", "first", "answer", "Hi"]


def test_references_are_replaced_by_stored_items() -> None:
    history, other = [{"type": "message", "id": "msg_1"}], {"type": "message", "id": "msg_9"}
    items = [{"type": "item_reference", "id": "msg_1"}, {"type": "item_reference", "id": "msg_9"}]
    assert list_references([*items, USER]) == ["msg_1", "msg_9"]
    assert resolve_references([*items, USER], history, {"msg_9": other}) == [other, USER]
    with pytest.raises(ApiError, match=r"input\[0\]"):
        resolve_references(items, [], {"msg_9": other})


def test_tools_of_codex() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    body, ignored = translate(
        "responses",
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
    assert custom["custom"] == {"name": "patch", "description": "Edits files.", "format": grammar}
    assert ignored == ("max_tool_calls", "tools[3]", "tools[4]", "input[1]")


def test_reasoning_of_other_servers_is_left_out() -> None:
    body, _ = translate(
        "responses", input=[{"type": "reasoning", "encrypted_content": "gAAAA"}, USER]
    )
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


# --- Messages ------------------------------------------------------------------------------------

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=1f3a;"


def text(value: str) -> Json:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    ("messages", "expected"),
    read_cases(CASES, "anthropic messages"),
)
def test_messages_of_anthropic(messages: list[Any], expected: list[Any]) -> None:
    body, ignored = translate("anthropic", messages=messages)
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
    body, _ = translate("anthropic", system=system)
    assert body["messages"] == [{"role": "system", "content": expected}, USER]


def test_system_prompt_of_billing_header_only_is_left_out() -> None:
    assert translate("anthropic", system=BILLING)[0]["messages"] == [USER]


def test_what_has_no_effect_is_named() -> None:
    results: list[Json] = [
        {"type": "any_tool_result", "content": value, "source": value} for value in VALUES
    ]
    body, ignored = translate(
        "anthropic",
        context_management={},
        mcp_servers=[],
        tools=[TOOL, {"type": "web_search_20260209", "name": "web_search"}],
        messages=[
            {"role": "user", "content": [text("a"), {"type": "container_upload"}]},
            {"role": "assistant", "content": [*results, text("b")]},
            USER,
        ],
    )
    assert [message["content"] for message in body["messages"]] == ["a", "b", "Hi"]
    places = [f"messages[1].content[{index}]" for index in range(len(VALUES))]
    assert ignored == (
        *("context_management", "mcp_servers", "messages[0].content[1]"),
        *(*places, "tools[1]"),
    )


def test_tools_that_anthropics_clients_run_are_functions() -> None:
    kinds = {
        "bash_20250124": "bash",
        "text_editor_20250124": "str_replace_editor",
        "text_editor_20250728": "str_replace_based_edit_tool",
        "memory_20250818": "memory",
    }
    tools = [{"type": kind, "name": name, "max_characters": 9} for kind, name in kinds.items()]
    body, ignored = translate("anthropic", tools=tools, tool_choice={"type": "any"})
    assert not ignored
    read = read_tools(body).tools  # as replicas read them
    assert [tool.name for tool in read] == list(kinds.values())
    texts = [set(tool.parameter_types) & {"command", "new_str", "insert_text"} for tool in read]
    edited = {"command", "new_str"}
    assert texts == [{"command"}, edited, edited | {"insert_text"}, edited | {"insert_text"}]


def test_count_tokens_is_a_tokenize_request() -> None:
    request = {"model": "big", "system": "s", "messages": [USER], "tools": [TOOL]}
    body, ignored = translate_count_tokens_request(encode(request | {"x": 1}))
    parse_body(TokenizeRequest, encode(body))
    assert body["messages"] == [{"role": "system", "content": "s"}, USER]
    assert (body["tools"], body["add_generation_prompt"]) == ([CHAT_TOOL], True)
    assert ignored == ("x",)


# --- Ollama --------------------------------------------------------------------------------------


def chat(**fields: Any) -> Json:  # noqa: ANN401 - any JSON
    return translate("ollama", **fields)[0]


def test_conversations_are_cut_unless_told_otherwise() -> None:
    assert chat()["truncation"] == "auto"
    assert "truncation" not in chat(truncate=False)


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
    body: Json = {"model": "big", "prompt": "Hi", "system": "s"}
    request = translate_ollama_generate(encode(body), lambda: 0.0)
    assert not request.is_completion
    assert request.body["messages"] == [{"role": "system", "content": "s"}, USER]
    raw = {"model": "big", "prompt": "Hi", "raw": True, "options": {"num_ctx": 9}, "logprobs": True}
    request = translate_ollama_generate(encode(raw), lambda: 0.0)
    parse_body(CompletionRequest, encode(request.body))
    assert request.is_completion
    assert request.body["prompt"] == "Hi"
    assert request.ignored == ("options.num_ctx", "logprobs")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((5, 5.0), (-1, math.inf), ("5m", 300.0), ("1h30m", 5400.0), ("-1s", math.inf)),
        *(("90", 90.0), ("0.5s", 0.5), ("soon", None), ("", None), ("5 m", None), (None, None)),
    ],
)
def test_keep_alive_is_seconds_or_a_duration(value: object, seconds: float | None) -> None:
    request = translate_ollama_chat(encode({"model": "big", "keep_alive": value}), lambda: 0.0)
    assert request.output.keep_alive_s == seconds


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "load"),
        ({"messages": [], "keep_alive": "5m"}, "load"),
        *(({"keep_alive": zero}, "unload") for zero in (0, 0.0, "0", "0s", "0.0m")),
    ],
)
def test_request_without_prompt_loads_or_unloads_the_model(fields: Json, reason: str) -> None:
    request = translate_ollama_chat(encode({"model": "big", **fields}), lambda: 0.0)
    assert is_load_request(request)
    request.output.finish_load()
    assert request.output.build_response()["done_reason"] == reason


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "return x"}, "suffix"),
        ({"context": [1], "raw": True}, "context"),
        *(({"context": ids}, "context") for ids in ([1, 2], [-1], [4286257], [4286257, 2**70])),
    ],
)
def test_unsupported_generate_fields_are_refused(fields: Json, param: str) -> None:
    body = {"model": "big", "prompt": "def f(", **fields}
    with pytest.raises(ApiError) as refused:
        translate_ollama_generate(encode(body), lambda: 0.0)
    assert (refused.value.status, refused.value.param) == (400, param)


def generate(**fields: Any) -> tuple[list[Json], list[int]]:  # noqa: ANN401 - any JSON
    """Return the messages of a generate request, and the context of its response."""
    request = translate_ollama_generate(encode({"model": "big", **fields}), lambda: 0.0)
    request.output.start(OutputIdentity(id="0", created=0, model="big"), NO_TOKENS)
    request.output.add_text(f"to {fields['prompt']}", ())
    request.output.finish("stop", None, NO_TOKENS)
    return request.body["messages"], request.output.build_response()["context"]


@given(st.text(min_size=1), st.text(min_size=1))
def test_context_of_a_generated_text_continues_the_conversation(first: str, second: str) -> None:
    first_turn = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": f"to {first}"},
    ]
    _, context = generate(prompt=first, system="old")
    assert all(0 <= number < 2**24 for number in context)
    question = {"role": "user", "content": second}
    for fields, system in (({}, "old"), ({"system": "new"}, "new")):
        messages, _ = generate(prompt=second, context=context, **fields)
        assert messages == [{"role": "system", "content": system}, *first_turn, question]


def test_model_of_older_clients_is_its_name() -> None:
    assert OllamaModelRequest(name="big:latest").require_model() == "big"
    with pytest.raises(ApiError, match="model"):
        OllamaModelRequest().require_model()


# --- errors --------------------------------------------------------------------------------------

APIS: dict[str, ErrorEncoder] = {
    "responses": encode_responses_error,
    "messages": encode_anthropic_error,
    "ollama": encode_ollama_error,
}
TOO_LONG = "The request needs 9 tokens (6 in 'messages', 3 to generate). Lower max_tokens."
SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("api", "message", "renamed"),
    [
        (
            "responses",
            TOO_LONG,
            "The request needs 9 tokens (6 in 'input', 3 to generate). Lower max_output_tokens.",
        ),
        ("responses", "'messages[0].content[1]' is no text.", "'input' is no text."),
        ("responses", f"'{SCHEMA}' at '#/a' is bad.", "'text.format.schema' at '#/a' is bad."),
        ("responses", "'tools[1].function.name' is bad.", "'tools[1].name' is bad."),
        ("responses", "'input[0].role' is bad.", "'input[0].role' is bad."),
        ("messages", TOO_LONG, TOO_LONG),
        ("messages", "'stop[1]' is bad. Do not stop.", "'stop_sequences[1]' is bad. Do not stop."),
        ("messages", "'tools[1].function.parameters' is bad.", "'tools[1].input_schema' is bad."),
        ("messages", f"'{SCHEMA}' is bad.", "'output_config.format.schema' is bad."),
        ("ollama", "'max_tokens' is 0.", "'options.num_predict' is 0."),
        ("ollama", "'top_p' is 2.", "'options.top_p' is 2."),
        ("ollama", f"'{SCHEMA}' is bad.", "'format' is bad."),
    ],
)
def test_message_has_the_names_of_the_request(api: str, message: str, renamed: str) -> None:
    body = json.loads(APIS[api](ApiError(400, "", message), "req_1"))
    error = body["error"]
    assert (error if isinstance(error, str) else error["message"]) == renamed


@pytest.mark.parametrize(
    ("param", "renamed"),
    [
        ("messages[0].content", "input"),
        ("max_tokens", "max_output_tokens"),
        ("a", "a"),
        (None, None),
    ],
)
def test_param_has_the_name_of_the_request(param: str | None, renamed: str | None) -> None:
    error = ApiError(400, "x", "No.", param=param, details={"kept": 1})
    assert json.loads(encode_responses_error(error, "req_1")) == {
        "error": {
            "message": "No.",
            "type": "invalid_request_error",
            "param": renamed,
            "code": "x",
            "kept": 1,
        },
        "request_id": "req_1",
    }


# --- a wrong value somewhere ---------------------------------------------------------------------

TEXT = {"type": "text", "text": "Hi"}
OBJECT = {"type": "object", "properties": {"x": {"enum": ["a"]}}}
RESPONSES = {
    "model": "big",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "content": [TEXT], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [TEXT]},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": OBJECT},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "definition": "a"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h"}]},
    ],
    "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": OBJECT}},
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
    "tools": [{"name": "f", "input_schema": OBJECT}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": OBJECT}},
    "metadata": {"user_id": "u"},
}
OLLAMA = {
    "model": "big",
    "messages": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "a"}}}]},
        {"role": "tool", "tool_name": "f", "content": "ok"},
    ],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "format": OBJECT,
    "options": {"num_predict": 5, "stop": ["x"]},
    "think": True,
}


VALUES: list[Any] = [None, True, -1, 10**400, 1e308, "", "\0", [], [[]], {}, {"type": []}, [{}]]


def mutate(body: Json) -> Iterator[bytes]:
    """Yield the body with each of the values at each place."""
    for container, key in list_places(body):
        original = container[key]
        for value in VALUES:
            container[key] = value
            yield encode(body)
        container[key] = original


def list_places(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - any JSON
    """Yield each container in a value with each of its keys or indexes."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from list_places(value[key])


@pytest.mark.parametrize(
    ("api", "body"), [("responses", RESPONSES), ("anthropic", MESSAGES), ("ollama", OLLAMA)]
)
def test_wrong_value_anywhere_is_translated_or_refused(api: str, body: Json) -> None:
    statuses = set()
    for mutated in mutate(copy.deepcopy(body)):
        try:
            TRANSLATIONS[api][1](mutated)
        except ApiError as error:
            statuses.add(error.status)
    assert statuses == {400}
