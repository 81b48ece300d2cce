"""Constraints of requests: the spellings of OpenAI, vLLM, SGLang and llama.cpp, options, and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.byte_matcher import accepts

from argosy.constraints import check_grammar, read_constraint
from argosy.protocol import ApiError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
DOCUMENT, OTHER_DOCUMENT = '{"a":1}', '{"a":"x"}'
GBNF = 'root ::= "a" digits+\ndigits ::= [0-9]'
LARK = 'start: "a" DIGITS\nDIGITS: /[0-9]+/'
STRUCTURES = {
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
CALL, OTHER_CALL = 'Hi <f=a>{"a":1}</f> bye', "Hi <f=b>1</f>"

ACCEPTED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, "json_object", DOCUMENT, "[1]"),
    "json_object with schema": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        "json_schema",
        DOCUMENT,
        OTHER_DOCUMENT,
    ),
    "json_schema": ({"response_format": JSON_FORMAT}, "json_schema", DOCUMENT, OTHER_DOCUMENT),
    "json_schema without wrapper": (
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        "json_schema",
        DOCUMENT,
        OTHER_DOCUMENT,
    ),
    "format grammar": (
        {"response_format": {"type": "grammar", "grammar": GBNF}},
        "grammar",
        "a12",
        "b",
    ),
    "format structural_tag": (
        {"response_format": {"type": "structural_tag", **STRUCTURES}},
        "structural_tag",
        CALL,
        OTHER_CALL,
    ),
    "outputs json": (
        {"structured_outputs": {"json": SCHEMA}},
        "json_schema",
        DOCUMENT,
        OTHER_DOCUMENT,
    ),
    "outputs json text": (
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        "json_schema",
        DOCUMENT,
        OTHER_DOCUMENT,
    ),
    "outputs json_object": (
        {"structured_outputs": {"json_object": True}},
        "json_object",
        DOCUMENT,
        "1",
    ),
    "outputs regex": (
        {"structured_outputs": {"regex": r"^\d+/[a-z]{2}$"}},
        "regex",
        "12/ab",
        "x12/ab",
    ),
    "outputs choice": ({"structured_outputs": {"choice": ["yes", "ye\n"]}}, "choice", "ye\n", "ye"),
    "outputs grammar": ({"structured_outputs": {"grammar": LARK}}, "grammar", "a12", "a"),
    "outputs structural_tag": (
        {"structured_outputs": {"structural_tag": json.dumps(STRUCTURES)}},
        "structural_tag",
        CALL,
        OTHER_CALL,
    ),
    "outputs and absent fields": (
        {"structured_outputs": {"regex": "a", "json": None}, "guided_json": None},
        "regex",
        "a",
        "b",
    ),
    "outputs with a backend": (
        {"structured_outputs": {"regex": "a", "_backend": "x"}},
        "regex",
        "a",
        "b",
    ),
    "text and outputs": (
        {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
        "regex",
        "a",
        "b",
    ),
    "guided_json": ({"guided_json": SCHEMA}, "json_schema", DOCUMENT, OTHER_DOCUMENT),
    "guided_regex": ({"guided_regex": "[ab]+"}, "regex", "ab", "c"),
    "guided_choice": ({"guided_choice": ["a", "a"]}, "choice", "a", "aa"),
    "many choices": (
        {"guided_choice": [f"choice {number}" for number in range(4_000)]},
        "choice",
        "choice 3999",
        "choice 4000",
    ),
    "guided_grammar": ({"guided_grammar": GBNF}, "grammar", "a1", "1"),
    "SGLang json_schema": (
        {"json_schema": json.dumps(SCHEMA)},
        "json_schema",
        DOCUMENT,
        OTHER_DOCUMENT,
    ),
    "SGLang regex": ({"regex": "a|b"}, "regex", "b", "c"),
    "SGLang ebnf": ({"ebnf": GBNF}, "grammar", "a1", "1"),
    "SGLang structural_tag": ({"structural_tag": STRUCTURES}, "structural_tag", CALL, OTHER_CALL),
    "llama.cpp grammar": ({"grammar": GBNF}, "grammar", "a1", "1"),
    "llama.cpp json_schema": ({"json_schema": SCHEMA}, "json_schema", DOCUMENT, OTHER_DOCUMENT),
    "schema within a grammar": (
        {"grammar": 'start: "x" %json {"type": "integer", "minimum": 5}'},
        "grammar",
        "x12",
        "x1",
    ),
    "compact": (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        "json_schema",
        DOCUMENT,
        '{"a": 1}',
    ),
    "closed": (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        "json_schema",
        DOCUMENT,
        '{"a":1,"b":1}',
    ),
    "whitespace_pattern": (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": r"[\s]{0,3}"}},
        "json_schema",
        '{"a":   1}',
        '{"a":    1}',
    ),
    "guided_whitespace_pattern": (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": r"[\n ]?"},
        "json_schema",
        '{"a": 1}',
        '{"a":  1}',
    ),
}

ERRORS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "two constraints": (
        {"response_format": JSON_FORMAT, "guided_regex": "a"},
        "invalid_value",
        "guided_regex",
        "'response_format.json_schema.schema' and 'guided_regex'",
    ),
    "two of structured_outputs": (
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        "invalid_value",
        "structured_outputs.regex",
        "both constrain",
    ),
    "unknown format": (
        {"response_format": {"type": "xml"}},
        "invalid_value",
        "response_format.type",
        "xml",
    ),
    "format of another type": (
        {"response_format": "json"},
        "invalid_type",
        "response_format",
        "an object",
    ),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "missing_required_parameter",
        "response_format.json_schema.schema",
        "missing",
    ),
    "strict of another type": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "invalid_type",
        "response_format.json_schema.strict",
        "true or false",
    ),
    "strict": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"not": {"const": 1}}, "strict": True},
            }
        },
        "unsupported_schema",
        "response_format.json_schema.schema",
        "'#/not'",
    ),
    "unknown output": (
        {"structured_outputs": {"xml": 1}},
        "unknown_parameter",
        "structured_outputs.xml",
        "json",
    ),
    "schema text": ({"guided_json": "{"}, "invalid_schema", "guided_json", "no JSON document"),
    "whitespace without JSON": (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "invalid_value",
        "structured_outputs.whitespace_pattern",
        "only applies to a JSON answer",
    ),
    "whitespace of letters": (
        {"guided_json": {}, "guided_whitespace_pattern": "x?"},
        "invalid_grammar",
        "guided_whitespace_pattern",
        "spaces",
    ),
    "contradictory whitespace": (
        {
            "structured_outputs": {
                "json": {},
                "whitespace_pattern": " ",
                "disable_any_whitespace": True,
            }
        },
        "invalid_value",
        "structured_outputs.whitespace_pattern",
        "contradicts",
    ),
    "look-ahead": ({"regex": "(?=a)b"}, "invalid_grammar", "regex", "look-ahead"),
    "unbalanced regex": ({"regex": "(a"}, "invalid_grammar", "regex", "not closed"),
    "multiplied repetitions": (
        {"regex": "((a{100}){100}){100}"},
        "invalid_grammar",
        "regex",
        "multiply",
    ),
    "no choices": ({"guided_choice": []}, "invalid_grammar", "guided_choice", "at least one"),
    "choice of another type": (
        {"structured_outputs": {"choice": [1]}},
        "invalid_grammar",
        "structured_outputs.choice",
        "string",
    ),
    "no grammar": ({"ebnf": "hello"}, "invalid_grammar", "ebnf", "neither Lark"),
    "unknown rule": ({"ebnf": 'start: "a" other'}, "invalid_grammar", "ebnf", "other"),
    "other grammar": ({"ebnf": "start: @answer"}, "invalid_grammar", "ebnf", "@answer"),
    "endless grammar": ({"ebnf": 'start: a\na: a "x"'}, "invalid_grammar", "ebnf", "compile"),
    "chain of rules": (
        {
            "ebnf": "start: r0\n"
            + "\n".join(f'r{i}: r{i + 1} "x" | "y"' for i in range(5_000))
            + '\nr5000: "z"'
        },
        "invalid_grammar",
        "ebnf",
        "bytes",
    ),
    "many rules": (
        {
            "ebnf": "start: r0\n"
            + "\n".join(f"r{i}:r{i + 1}" for i in range(3_000))
            + '\nr3000: "z"'
        },
        "invalid_grammar",
        "ebnf",
        "500 rules",
    ),
    "hostile schema in a grammar": (
        {"ebnf": 'start: %json {"const": -9223372036854775808}'},
        "unsupported_schema",
        "ebnf",
        "'#/const'",
    ),
    "hostile repetition in a grammar": (
        {"ebnf": "start: /(((a{100}){100}){100}){100}/"},
        "invalid_grammar",
        "ebnf",
        "does not compile",
    ),
    "structural tag": (
        {"structural_tag": {"format": {"type": "xml"}}},
        "invalid_grammar",
        "structural_tag",
        "format",
    ),
    "structural tag without trigger": (
        {"structural_tag": {**STRUCTURES, "triggers": ["<g"]}},
        "invalid_grammar",
        "structural_tag",
        "'structures[0].begin'",
    ),
    "schema of a structural tag": (
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": {"type": "x"}}}},
        "invalid_schema",
        "structural_tag.format.json_schema",
        "'#/type'",
    ),
}


@pytest.mark.parametrize(
    ("fields", "kind", "accepted", "rejected"), ACCEPTED.values(), ids=ACCEPTED
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


@pytest.mark.parametrize(("fields", "code", "param", "message"), ERRORS.values(), ids=ERRORS)
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


def test_relaxations_of_a_request_have_pointers() -> None:
    schema = {"properties": {"tags": {"uniqueItems": True}}}
    constraint = read_constraint({"guided_json": schema})
    assert constraint is not None
    assert [item.pointer for item in constraint.relaxations] == ["#/properties/tags/uniqueItems"]


def test_grammar_may_name_special_tokens() -> None:
    constraint = read_constraint({"ebnf": 'start: <think> "a"'})
    assert constraint is not None
    check_grammar(constraint.grammar_text, "ebnf")


TAG_FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "sequence": (
        {
            "type": "sequence",
            "elements": [
                {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
                {
                    "type": "or",
                    "elements": [
                        {"type": "const_string", "value": "yes"},
                        {"type": "regex", "pattern": "n[ao]"},
                        {"type": "grammar", "grammar": 'root ::= "zz"'},
                    ],
                },
            ],
        },
        ["<t>a</t>yes", "<t></t>na", "<t>\n</t>zz"],
        ["yes", "<t>a</t>", "<t>a</t>x"],
    ),
    "triggered": (
        {
            "type": "triggered_tags",
            "triggers": ["<a", "<b"],
            "tags": [
                {
                    "begin": "<a>",
                    "content": {"type": "regex", "pattern": r"\d+"},
                    "end": ["</a>", "!"],
                },
                {"begin": "<b>", "content": {"type": "any_text"}, "end": "</b>"},
            ],
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["text <a>1</a>", "<a>1!", "<b>x<a></b>"],
        ["text", "<a>x</a>", "<a>1!<a>1!", "<c>"],
    ),
    "separated": (
        {
            "type": "tags_with_separator",
            "separator": ",",
            "tags": [
                {
                    "type": "tag",
                    "begin": "(",
                    "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                    "end": ")",
                }
            ],
        },
        ["", "(1)", "(1),(2)"],
        ["(1)(2)", "(1),", "(x)"],
    ),
    "text without a word": (
        {"type": "any_text", "excludes": ["stop"]},
        ["", "go on", "sto"],
        ["please stop now"],
    ),
}


@pytest.mark.parametrize(("element", "accepted", "rejected"), TAG_FORMATS.values(), ids=TAG_FORMATS)
def test_structural_tag_format(
    element: dict[str, Any], accepted: list[str], rejected: list[str]
) -> None:
    constraint = read_constraint({"structural_tag": {"type": "structural_tag", "format": element}})
    assert constraint is not None
    assert [text for text in accepted if not accepts(constraint.grammar_text, text)] == []
    assert [text for text in rejected if accepts(constraint.grammar_text, text)] == []
