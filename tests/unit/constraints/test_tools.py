"""Tool fields of requests: every shape that clients send becomes one shape, or an error that names the field."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.case_tables import read_cases
from tests.support.grammar_matcher import accepts, generate_text

from argosy.constraints import CUSTOM_INPUT, TOOL_FIELDS, ToolChoice, input_grammars, read_tools
from argosy.constraints.pattern_translator import PatternError
from argosy.constraints.quoted_grammar import quote_grammar
from argosy.constraints.tools import MAX_TOOLS, MAX_TOOLS_BYTES
from argosy.protocol import ApiError

CASES = Path(__file__).with_name("request_cases.jsonl")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "clock.get:time"}}
SHELL = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
TOOLS = [WEATHER, TIME, SHELL]
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
CHOOSE_WEATHER = {"type": "function", "function": {"name": "get_weather"}}


def error_of(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_tools(fields)
    assert caught.value.status == 400
    return caught.value


def test_tools_are_read_in_order() -> None:
    request = read_tools({"tools": TOOLS})
    assert [tool.name for tool in request.tools] == ["get_weather", "clock.get:time", "shell"]
    assert [tool.kind for tool in request.tools] == ["function", "function", "custom"]
    assert request.tools[0].parameters == SCHEMA
    assert request.tools[1].parameters == NO_ARGUMENTS
    assert request.tools[2].parameters["required"] == [CUSTOM_INPUT]
    assert (request.choice, request.parallel) == (ToolChoice(mode="auto"), True)
    assert request.callable_tools == request.tools


@pytest.mark.parametrize(
    ("schema", "read"),
    [
        ({"type": "object", "properties": {}}, NO_ARGUMENTS),
        ({"title": "now", "properties": {}, "required": []}, NO_ARGUMENTS),
        *(
            (schema, schema)
            for schema in ({"type": "object"}, {"properties": {}, "allOf": [SCHEMA]})
        ),
    ],
)
def test_function_with_empty_properties_takes_no_arguments(
    schema: dict[str, Any], read: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": schema}}
    request = read_tools({"tools": [tool]})
    assert request.tools[0].parameters == read
    assert request.template_tools == [tool]


def test_templates_get_client_order_of_keys_without_strict() -> None:
    function = {"parameters": SCHEMA, "strict": True, "name": "f", "description": "d", "x": 1}
    request = read_tools({"tools": [{"function": function, "type": "function"}]})
    expected = {"parameters": SCHEMA, "name": "f", "description": "d"}
    assert json.dumps(request.template_tools) == json.dumps(
        [{"type": "function", "function": expected}]
    )
    assert request.tools[0].strict


@pytest.mark.parametrize("fields", [{}, {"tools": None}, {"tools": [], "tool_choice": "auto"}])
def test_request_without_tools_calls_none(fields: dict[str, Any]) -> None:
    request = read_tools(fields)
    assert (request.tools, request.choice.mode) == ((), "none")


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        ("none", ToolChoice(mode="none")),
        ("auto", ToolChoice(mode="auto")),
        ("required", ToolChoice(mode="required")),
        (CHOOSE_WEATHER, ToolChoice(mode="named", allowed=("get_weather",))),
        (
            {"type": "function", "name": "get_weather"},
            ToolChoice(mode="named", allowed=("get_weather",)),
        ),
        (
            {"type": "custom", "custom": {"name": "shell"}},
            ToolChoice(mode="named", allowed=("shell",)),
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [CHOOSE_WEATHER, CHOOSE_WEATHER]},
            },
            ToolChoice(mode="required", allowed=("get_weather",)),
        ),
        (
            {"type": "allowed_tools", "tools": [{"type": "custom", "name": "shell"}]},
            ToolChoice(mode="auto", allowed=("shell",)),
        ),
    ],
)
def test_every_shape_of_tool_choice_is_read(value: object, choice: ToolChoice) -> None:
    request = read_tools({"tools": TOOLS, "tool_choice": value})
    assert request.choice == choice
    if choice.mode == "none":
        assert not request.callable_tools
        assert len(request.template_tools) == 3
    elif choice.allowed is not None:
        assert [tool.name for tool in request.callable_tools] == list(choice.allowed)


@pytest.mark.parametrize(("value", "parallel"), [(True, True), (False, False), (None, True)])
def test_parallel_calls_are_the_default(value: object, *, parallel: bool) -> None:
    assert read_tools({"tools": TOOLS, "parallel_tool_calls": value}).parallel is parallel


@pytest.mark.parametrize(
    ("value", "mode"), [(None, "auto"), ("none", "none"), ({"name": "f"}, "named")]
)
def test_legacy_functions_are_tools(value: object, mode: str) -> None:
    request = read_tools({"functions": [{"name": "f"}], "function_call": value})
    assert request.is_legacy
    assert not request.parallel
    assert request.choice.mode == mode
    assert request.template_tools == [{"type": "function", "function": {"name": "f"}}]


def test_tools_of_other_services_are_ignored_and_named() -> None:
    request = read_tools({"tools": [{"type": "web_search"}, WEATHER, {"type": "mcp", "x": 1}]})
    assert [tool.name for tool in request.tools] == ["get_weather"]
    assert request.ignored == ("tools[0]", "tools[2]")


@pytest.mark.parametrize("syntax", ["regex", "lark", "ebnf"])
@pytest.mark.parametrize("nested", [True, False])
def test_grammar_of_custom_tool_is_honoured_or_refused(syntax: str, *, nested: bool) -> None:
    grammar = {"syntax": syntax, "definition": 'start: "a" | "b"' if syntax == "lark" else "a|b"}
    text_format = {"type": "grammar"} | ({"grammar": grammar} if nested else grammar)
    tool: dict[str, Any] = {
        "type": "custom",
        "custom": {"name": "shell", "format": text_format},
    }
    if syntax == "ebnf":
        error = error_of(tools=[tool])
        assert (error.param, error.code) == ("tools[0].custom.format", "unsupported_parameter")
        return
    (read,) = read_tools({"tools": [tool]}).tools
    assert read.strict
    if syntax == "lark":
        assert read.input_grammar in read.description
        broken = {**grammar, "definition": "start: ("}
        tool["custom"]["format"] = {"type": "grammar", "grammar": broken}
        assert error_of(tools=[tool]).param == "tools[0].custom.format"
        return
    assert read.parameters["properties"] == {
        CUSTOM_INPUT: {"type": "string", "pattern": "^(?:a|b)$"}
    }


LARK = [
    r"""start: (line LF)+
line: "+" /(.*)/ | "say " QUOTED | /-{1,2}[a-c"]*/
QUOTED: "\"" /[^"\\\n]*/ "\""
%import common.LF""",
    r"""start: "a".."c" pair+ "END"i
pair: KEY "=" VALUE
KEY: /[a-z]+/
VALUE: /\d+|[.-]/ | "\"\\"
%import common.WS
%ignore WS""",
    r"""start: "{" item ("," item)* "}"
item: ESCAPED_STRING | SIGNED_INT
%import common.ESCAPED_STRING
%import common.SIGNED_INT""",
    r"""start: /([ *(?:"{+]{2}\n? ?)+ "/""",
]


@pytest.mark.parametrize("lark", LARK)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_grammar_within_a_json_string_has_the_same_texts(lark: str, seed: int) -> None:
    plain, quoted = (
        json.dumps({"grammars": input_grammars(lark, "p", "x", is_quoted=is_quoted)})
        for is_quoted in (False, True)
    )
    text = generate_text(plain, random.Random(seed), 60)
    if text is not None and not re.search(r"[\x00-\x08\x0b\x0e-\x1f]", text):
        assert accepts(quoted, json.dumps(text, ensure_ascii=False)[1:-1]), text
    spelled = generate_text(quoted, random.Random(seed), 60)
    if spelled is not None:
        assert accepts(plain, json.loads(f'"{spelled}"')), spelled


@pytest.mark.parametrize(
    "part",
    [
        '%json {"type": "null"}',
        "/[^a]/\n%ignore LF\n%import common.LF",
        "/a/ & /b/",
        "~/a/",
        "/(?i:a)/",
        "/[^a]$/",
        "<end>",
        '/a/x "b"',
    ],
)
def test_grammar_that_cannot_be_quoted_is_not_enforced(part: str) -> None:
    with pytest.raises(PatternError):
        quote_grammar(f"start: {part}")


def function(**body: object) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": body}]}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        *read_cases(CASES, "malformed tools"),
        (function(name="f", description="x" * MAX_TOOLS_BYTES), "tools", "invalid_value"),
        ({"tools": [WEATHER] * (MAX_TOOLS + 1)}, "tools", "invalid_value"),
    ],
)
def test_malformed_tools_are_refused_by_path(fields: dict[str, Any], param: str, code: str) -> None:
    error = error_of(**fields)
    assert (error.param, error.code) == (param, code)
    assert len(error.message) < 400


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["function", "custom", "f", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "function",
                    "custom",
                    "name",
                    "parameters",
                    "format",
                    "grammar",
                    "mode",
                    "tools",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(TOOL_FIELDS), JSON | st.lists(JSON, max_size=3)))
def test_any_json_is_read_or_refused(fields: dict[str, Any]) -> None:
    try:
        request = read_tools(fields)
    except ApiError as error:
        assert_client_error(error)
    else:
        assert {tool.name for tool in request.callable_tools} <= {t.name for t in request.tools}


def assert_client_error(error: ApiError) -> None:
    assert (error.status, error.param is not None) == (400, True)
