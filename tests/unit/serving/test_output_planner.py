"""Output planner: which tools a prompt shows, where reasoning may begin, and what is masked."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from tests.support.vocabularies import byte_level_backend

from argosy.constraints import read_constraint, read_tools
from argosy.engine.serving.output_parsing import FORMATS
from argosy.engine.serving.preprocessing.output_planner import OutputPlanner, template_variables
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.choice import OutputPlan
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import ApiError, ChatCompletionRequest, ReasoningBlock

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PLAIN = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
THINKS_ITSELF = (
    PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
THINKS_ON_REQUEST = PLAIN + "{% if enable_thinking %}<think>{% endif %}"
ALWAYS_THINKS = PLAIN + "<think>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@cache
def tokenizer() -> Tokenizer:
    backend = copy.deepcopy(byte_level_backend())
    backend.add_tokens(list(MARKERS))
    return Tokenizer(backend, [])


def token(text: str) -> int:
    token_id = tokenizer().added_token_id(text)
    assert token_id is not None
    return token_id


def planner(source: str, tool_format: str = "hermes") -> OutputPlanner:
    output_format = FORMATS[tool_format].with_vocabulary(set(MARKERS).__contains__)
    return OutputPlanner(tokenizer(), ChatTemplate(source, {}), output_format, lambda *_: 0.0)


def plan(source: str, **fields: Any) -> OutputPlan:  # noqa: ANN401 - any field of a chat
    body = ChatCompletionRequest(model="m", messages=[], **fields)
    template = ChatTemplate(source, {})
    variables = template_variables(body, template)
    text = template.render([{"role": "user", "content": "Hi"}], variables=variables)
    return planner(source).plan(
        body, read_tools(fields), read_constraint(fields), variables=variables, prompt_text=text
    )


OPEN, CLOSE = (token("<think>"),), (token("</think>"),)
OFF: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
ON: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
BUDGET: dict[str, Any] = {"thinking_token_budget": 5}


@pytest.mark.parametrize(
    ("source", "fields", "block"),
    [
        (THINKS_ITSELF, {}, ReasoningBlock(end_ids=CLOSE, start_ids=OPEN)),
        (THINKS_ITSELF, BUDGET, ReasoningBlock(end_ids=CLOSE, start_ids=OPEN, budget=5)),
        (THINKS_ITSELF, OFF, None),
        (THINKS_ITSELF, {"reasoning_effort": "none"}, None),
        (
            THINKS_ITSELF,
            {"reasoning_effort": "high"},
            ReasoningBlock(end_ids=CLOSE, start_ids=OPEN),
        ),
        (THINKS_ON_REQUEST, {}, None),
        (THINKS_ON_REQUEST, ON, ReasoningBlock(end_ids=CLOSE)),
        (THINKS_ON_REQUEST, {"reasoning_effort": "low"}, ReasoningBlock(end_ids=CLOSE)),
        (THINKS_ON_REQUEST, BUDGET, ReasoningBlock(end_ids=CLOSE, start_ids=OPEN, budget=5)),
        (ALWAYS_THINKS, {}, ReasoningBlock(end_ids=CLOSE)),
        (ALWAYS_THINKS, {"reasoning_effort": "none"}, ReasoningBlock(end_ids=CLOSE, budget=0)),
    ],
)
def test_reasoning_may_begin_where_the_model_begins_it(
    source: str, fields: dict[str, Any], block: ReasoningBlock | None
) -> None:
    assert plan(source, **fields).reasoning == block


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        (PLAIN + "{{ reasoning_effort }}", {"reasoning_effort": "low"}),
        (PLAIN + "{{ thinking_effort }}", {"thinking_effort": "low"}),
        (PLAIN + "{% if low_effort %}short{% endif %}", {"low_effort": True}),
        (THINKS_ON_REQUEST, {"enable_thinking": True}),
        (PLAIN + "{{ messages[0].thinking }}{% set reasoning_effort = 1 %}", {}),
    ],
)
def test_effort_reaches_the_variable_that_the_template_reads_or_is_ignored(
    source: str, variables: dict[str, Any]
) -> None:
    body = ChatCompletionRequest(model="m", messages=[], reasoning_effort="low")
    assert template_variables(body, ChatTemplate(source, {})) == variables
    is_ignored = "reasoning_effort" in plan(source, reasoning_effort="low").ignored_fields
    assert is_ignored == (not variables)


def test_reasoning_that_is_switched_off_cannot_begin() -> None:
    assert plan(THINKS_ITSELF, **OFF).banned_token_ids == OPEN
    assert plan(THINKS_ITSELF).banned_token_ids == ()


def test_tools_that_must_not_be_called_are_shown_if_their_trigger_can_be_masked() -> None:
    request = read_tools({"tools": [TOOL], "tool_choice": "none"})
    assert planner(PLAIN).template_tools(request) == request.template_tools
    assert planner(PLAIN, "llama3-json").template_tools(request) == []
    planned = plan(PLAIN, tools=[TOOL], tool_choice="none")
    assert planned.banned_token_ids == (token("<tool_call>"),)
    assert planned.grammar == ""
    assert not planned.parse_calls


def test_a_model_that_sees_no_tools_refuses_them() -> None:
    request = read_tools({"tools": [TOOL]})
    for source, tool_format in (("{{ messages }}", "hermes"), (PLAIN, "think")):
        with pytest.raises(ApiError) as error:
            planner(source, tool_format).template_tools(request)
        assert (error.value.param, error.value.code) == ("tools", "unsupported_parameter")


def test_relaxed_keywords_of_answer_and_tools_are_warned_of() -> None:
    schema = {"type": "array", "uniqueItems": True}
    tool = copy.deepcopy(TOOL)
    tool["function"]["parameters"]["not"] = {"required": ["x"]}  # type: ignore[index]
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    planned = plan(PLAIN, tools=[tool], response_format=response_format)
    assert [warning.param for warning in planned.warnings] == [
        "response_format.json_schema.schema",
        "tools[0].function.parameters",
    ]
    assert [item.keyword for _, item in planned.relaxations] == ["uniqueItems", "not"]
