"""Constraints of requests: the spellings of OpenAI, vLLM, SGLang and llama.cpp, options, grammar texts, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.case_tables import read_cases
from tests.support.grammar_matcher import accepts

from argosy.constraints import check_grammar, read_constraint
from argosy.protocol import ApiError

CASES = Path(__file__).with_name("request_cases.jsonl")


def chain_of_rules(length: int, rule: str) -> str:
    """Return a grammar in which each rule refers to the next one."""
    rules = [rule.format(number, number + 1) for number in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "z"'])


@pytest.mark.parametrize(
    ("fields", "kind", "accepted", "rejected"),
    [
        *read_cases(CASES, "accepted"),
        (
            {"guided_choice": [f"choice {number}" for number in range(4_000)]},
            "choice",
            "choice 3999",
            "choice 4000",
        ),
    ],
)
def test_constraint_is_enforced(
    fields: dict[str, Any], kind: str, accepted: str, rejected: str
) -> None:
    constraint = read_constraint({"model": "m", **fields})
    assert constraint is not None
    assert constraint.kind == kind
    names = [grammar["name"] for grammar in constraint.grammars]
    assert len(set(names)) == len(names)
    assert all(name.startswith("answer") for name in names)
    check_grammar(constraint.grammar_text, constraint.param)
    assert accepts(constraint.grammar_text, accepted)
    assert not accepts(constraint.grammar_text, rejected)


@pytest.mark.parametrize(
    ("fields", "code", "param", "message"),
    [
        *read_cases(CASES, "errors"),
        ({"ebnf": chain_of_rules(5_000, 'r{}: r{} "x" | "y"')}, "invalid_grammar", "ebnf", "bytes"),
        ({"ebnf": chain_of_rules(3_000, "r{}:r{}")}, "invalid_grammar", "ebnf", "500 rules"),
    ],
)
def test_error_names_the_field(fields: dict[str, Any], code: str, param: str, message: str) -> None:
    with pytest.raises(ApiError) as error:
        read_constraint(fields)
    assert (error.value.status, error.value.code, error.value.param) == (400, code, param)
    assert message in error.value.message
    assert "<state>" not in error.value.message
    assert len(error.value.message) < 600


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json_object": False}}],
)
def test_free_text_has_no_constraint(fields: dict[str, Any]) -> None:
    assert read_constraint(fields) is None


def test_grammar_may_name_special_tokens() -> None:
    constraint = read_constraint({"ebnf": 'start: <think> "a"'})
    assert constraint is not None
    check_grammar(constraint.grammar_text, "ebnf")


@pytest.mark.parametrize(("element", "accepted", "rejected"), read_cases(CASES, "tag_formats"))
def test_structural_tag_format(
    element: dict[str, Any], accepted: list[str], rejected: list[str]
) -> None:
    constraint = read_constraint({"structural_tag": {"type": "structural_tag", "format": element}})
    assert constraint is not None
    assert [text for text in accepted if not accepts(constraint.grammar_text, text)] == []
    assert [text for text in rejected if accepts(constraint.grammar_text, text)] == []


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"name": "g", "lark_grammar": text}]})


@pytest.mark.parametrize(
    "text",
    [
        _lark('start: "a"'),
        _lark("start: <[151657]> /[a-z]+/ <[151658]>"),
        _lark("start: <tool_call> /[a-z]+/"),
        json.dumps(
            {
                "grammars": [
                    {"name": "g", "lark_grammar": 'start: "x" @g_1'},
                    {"name": "g_1", "json_schema": {"type": "object"}},
                ]
            }
        ),
    ],
)
def test_valid_grammar(text: str) -> None:
    check_grammar(text, "tools")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "EOF"),
        ('{"grammars": []}', "empty"),
        (_lark("start: other"), "other"),
        (_lark("start: @other"), "other"),
        (_lark("start: " + "(" * 5_000), "nested"),
        (" " * (5 * 2**20), "bytes"),
    ],
)
def test_invalid_grammar(text: str, message: str) -> None:
    with pytest.raises(ApiError) as error:
        check_grammar(text, "tools")
    assert (error.value.status, error.value.code, error.value.param) == (
        400,
        "invalid_grammar",
        "tools",
    )
    assert message in error.value.message
    assert "\n" not in error.value.message
