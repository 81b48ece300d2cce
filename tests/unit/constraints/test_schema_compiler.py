"""JSON schemas and regular expressions: what grammars accept, errors with strict, relaxations without, validation.

Compared with independent implementations, random schemas and the JSON-Schema-Test-Suite.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.case_tables import read_cases
from tests.support.grammar_matcher import accepts, generate_text
from tests.support.json_schema_suite import describe_outcomes, read_suite, write_document
from tests.support.schema_strategy import Schema, random_schema, schemas

from argosy.constraints import (
    JsonWhitespace,
    read_constraint,
    schema_grammar,
    validate_document,
)
from argosy.protocol import ApiError

CASES = Path(__file__).with_name("schema_cases.jsonl")


@pytest.mark.parametrize(("schema", "accepted", "rejected"), read_cases(CASES, "enforced"))
def test_grammar_enforces_keyword(schema: object, accepted: list[str], rejected: list[str]) -> None:
    constraint = schema_grammar(schema, strict=True, param="schema")
    assert constraint.relaxations == ()
    assert [text for text in accepted if not accepts(constraint.grammar_text, text)] == []
    assert [text for text in rejected if accepts(constraint.grammar_text, text)] == []
    for seed in range(5):
        text = generate_text(constraint.grammar_text, random.Random(seed))
        assert text is None or validate_document(constraint, text) is None


@pytest.mark.parametrize(("schema", "keyword", "pointer"), read_cases(CASES, "unenforceable"))
def test_unenforceable_keyword_is_an_error_or_a_relaxation(
    schema: object, keyword: str, pointer: str
) -> None:
    with pytest.raises(ApiError) as error:
        schema_grammar(schema, strict=True, param="response_format.json_schema.schema")
    assert (error.value.status, error.value.code) == (400, "unsupported_schema")
    assert error.value.param == "response_format.json_schema.schema"
    assert f"'{keyword}'" in error.value.message
    assert f"'{pointer}'" in error.value.message

    relaxed = schema_grammar(schema, strict=False, param="schema")
    assert [(item.keyword, item.pointer) for item in relaxed.relaxations] == [(keyword, pointer)]


@pytest.mark.parametrize(("schema", "message"), read_cases(CASES, "invalid"))
@pytest.mark.parametrize("strict", [True, False])
def test_invalid_schema_is_an_error(schema: object, message: str, strict: bool) -> None:
    with pytest.raises(ApiError) as error:
        schema_grammar(schema, strict=strict, param="schema")
    assert (error.value.status, error.value.code) == (400, "invalid_schema")
    assert message in error.value.message


def test_dropped_pattern_properties_leave_a_superset() -> None:
    schema = {"patternProperties": {"a": {}, "b": {}}, "additionalProperties": False}
    relaxed = schema_grammar(schema, strict=False, param="schema")
    assert accepts(relaxed.grammar_text, '{"ab":1}')


def test_keyword_without_effect_is_no_error() -> None:
    schema = {
        "uniqueItems": False,
        "minItems": 0,
        "not": False,
        "if": {"required": ["a"]},
        "dependentRequired": {},
        "propertyNames": {"type": "string"},
        "unevaluatedProperties": True,
        "minContains": 0,
        "contains": {"const": 1},
    }
    assert schema_grammar(schema, strict=True, param="schema").relaxations == ()


def _nest(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def _chain(length: int) -> dict[str, Any]:
    definitions = {
        f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {}}}


@pytest.mark.parametrize(
    "schema",
    [
        _nest(200),
        _chain(500),
        {"description": "x" * 70_000},
        {"$ref": "#/" + "x" * 5_000},
        {"properties": {f"p{i}": {} for i in range(1_500)}},
        {"enum": list(range(6_000))},
        {"anyOf": [{"pattern": f"^a{i}$"} for i in range(300)]},
        {"anyOf": [{"properties": {f"p{i}_{j}": {} for j in range(30)}} for i in range(30)]},
        {"oneOf": [{"const": i} for i in range(300)]},
    ],
    ids=[
        "deep",
        "chain",
        "long",
        "reference",
        "properties",
        "enum",
        "patterns",
        "alternatives",
        "one of",
    ],
)
def test_limits_are_errors(schema: object) -> None:
    with pytest.raises(ApiError) as error:
        schema_grammar(schema, strict=False, param="schema")
    assert error.value.status == 400
    assert len(error.value.message) < 1_000


@pytest.mark.parametrize(
    ("whitespace", "accepted", "rejected"),
    [
        (
            JsonWhitespace(),
            ['{"a":[1,2]}', '{\n  "a": [\n    1, 2]}'],
            ['{"a":   1}', '{"a":\n\n1}'],
        ),
        (JsonWhitespace(pattern=None), ['{"a":[1,2]}'], ['{"a": 1}']),
        (
            JsonWhitespace(pattern=None, item_separator=", ", key_separator=": "),
            ['{"a": [1, 2], "b": 1}'],
            ['{"a":[1, 2]}', '{"a": [1,2]}'],
        ),
    ],
    ids=["answer", "compact", "separators"],
)
def test_whitespace_is_bounded(
    whitespace: JsonWhitespace, accepted: list[str], rejected: list[str]
) -> None:
    constraint = schema_grammar({"type": "object"}, strict=True, param="s", whitespace=whitespace)
    assert [text for text in accepted if not accepts(constraint.grammar_text, text)] == []
    assert [text for text in rejected if accepts(constraint.grammar_text, text)] == []


def test_key_order_of_the_schema_is_the_order_of_the_document() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["a", "b"]}
    constraint = schema_grammar(schema, strict=True, param="schema")
    assert accepts(constraint.grammar_text, '{"b":1,"a":2}')
    assert not accepts(constraint.grammar_text, '{"a":1,"b":2}')


def test_hostile_schemas_do_not_end_the_process() -> None:
    """These ended the process in the library: run them in a process of their own."""
    code = f"""
from argosy.constraints import schema_grammar
from argosy.protocol import ApiError
integer = -2**63
for schema in ({{"const": integer}}, {{"enum": [[integer]]}}, {json.dumps(_chain(900))}, {{"minimum": integer}}):
    for strict in (True, False):
        try:
            schema_grammar(schema, strict=strict, param="schema")
        except ApiError:
            pass
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- patterns and formats ---

FORMATS = (
    *("date", "time", "date-time", "duration", "email", "idn-email", "hostname", "idn-hostname"),
    *("ipv4", "ipv6", "uuid", "uri", "iri", "uri-reference", "iri-reference", "uri-template"),
    *("json-pointer", "relative-json-pointer"),
)
ATOMS = st.sampled_from(
    [
        *("a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", r"\.", r"\s"),
        *("[a-c-]", r"[\d-]", "(?:ab|a)", "(b|)", "é", "{", "}"),
    ]
)
QUANTIFIERS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{0,}", "*?"])
BODIES = st.lists(st.tuples(ATOMS, QUANTIFIERS).map("".join), min_size=1, max_size=5).map("".join)
PATTERNS = st.one_of(
    BODIES,
    BODIES.map("^{}$".format),
    BODIES.map("^{}".format),
    st.tuples(BODIES, BODIES).map("|".join),
)
TEXTS = st.text(alphabet="ab1. -éc{}", max_size=6)


@given(PATTERNS, TEXTS)
def test_regex_matches_as_in_python(pattern: str, text: str) -> None:
    constraint = read_constraint({"regex": pattern})
    assert constraint is not None
    expected = re.fullmatch(pattern, text, re.ASCII) is not None
    assert accepts(constraint.grammar_text, text) == expected


@given(PATTERNS, TEXTS)
def test_pattern_of_a_schema_searches(pattern: str, text: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    constraint = schema_grammar(schema, strict=True, param="schema")
    expected = re.search(pattern, text, re.ASCII) is not None
    assert accepts(constraint.grammar_text, f'"{text}"') == expected
    assert (validate_document(constraint, f'"{text}"') is None) == expected


@given(st.text(alphabet=r"()[]{}|*+?.^$\-,a1bdwsWpLuxk=!<>:&~/", max_size=12))
def test_any_text_is_a_pattern_or_a_clear_error(pattern: str) -> None:
    with contextlib.suppress(ApiError):
        assert read_constraint({"regex": pattern}) is not None


@pytest.mark.parametrize("name", FORMATS)
def test_generated_texts_have_their_format(name: str) -> None:
    constraint = schema_grammar({"type": "string", "format": name}, strict=True, param="schema")
    validator = jsonschema_rs.validator_for({"format": name}, validate_formats=True)
    texts = [generate_text(constraint.grammar_text, random.Random(seed), 120) for seed in range(60)]
    finished = [text.strip('"') for text in texts if text is not None]
    assert len(finished) > 5
    assert [text for text in finished if not validator.is_valid(text)] == []


# --- random answers, and their validation ---

SEEDS = st.integers(0, 2**32)


@given(schemas(strict=True), SEEDS)
def test_answers_of_strict_schemas_are_valid(schema: Schema, seed: int) -> None:
    constraint = schema_grammar(schema, strict=True, param="schema")
    assert constraint.relaxations == ()
    text = generate_text(constraint.grammar_text, random.Random(seed))
    assert text is None or validate_document(constraint, text) is None


@given(schemas(), SEEDS)
def test_invalid_answers_only_occur_where_keywords_are_relaxed(schema: Schema, seed: int) -> None:
    constraint = schema_grammar(schema, strict=False, param="schema")
    text = generate_text(constraint.grammar_text, random.Random(seed))
    if text is not None and validate_document(constraint, text) is not None:
        assert constraint.relaxations != ()


@given(SEEDS)
def test_grammar_texts_are_deterministic(seed: int) -> None:
    first, second = (random_schema(random.Random(seed)) for _ in range(2))
    assert first == second
    texts = {
        schema_grammar(schema, strict=False, param=param).grammar_text
        for schema in (first, second)
        for param in ("a", "b")
    }
    assert len(texts) == 1


@given(schemas(strict=True), SEEDS)
def test_strict_answers_are_accepted_by_the_relaxed_grammar(schema: Schema, seed: int) -> None:
    strict = schema_grammar(schema, strict=True, param="schema")
    relaxed = schema_grammar(schema, strict=False, param="schema")
    text = generate_text(strict.grammar_text, random.Random(seed))
    assert text is None or accepts(relaxed.grammar_text, text)


@pytest.mark.parametrize(
    ("schema", "text", "problem"),
    [
        ({"uniqueItems": True}, "[1,2]", None),
        ({"uniqueItems": True}, "[1,1]", "At #: "),
        ({"properties": {"a": {"items": {"not": {"const": 1}}}}}, '{"a":[2,1]}', "At #/a/1: "),
        ({"pattern": "^(?!b)"}, '"a"', None),
        ({"pattern": "^(?!b)"}, '"b"', "At #: "),
        ({"format": "idn-hostname", "uniqueItems": True}, '"a b"', "At #: "),
        ({"$ref": "https://example.com/x"}, "1", None),
        ({"type": "string", "nullable": True, "uniqueItems": True}, "null", None),
        ({"items": [{"type": "integer"}], "uniqueItems": True}, '["a"]', "At #/0: "),
        ({"minimum": 1, "exclusiveMinimum": True, "uniqueItems": True}, "1", "At #: "),
        ({"type": "number", "uniqueItems": True}, "8e9999", None),
        ({"uniqueItems": True}, "[1,", "no JSON document"),
        ({"uniqueItems": True}, "[" * 100_000, "no JSON document"),
    ],
)
def test_document_is_validated(schema: dict[str, Any], text: str, problem: str | None) -> None:
    constraint = schema_grammar(schema, strict=False, param="schema")
    found = validate_document(constraint, text)
    assert (found is None) == (problem is None)
    assert (problem or "") in (found or "")


def test_expression_with_backtracking_ends() -> None:
    schema = {"pattern": r"^(?=x)?(a+)+\1$"}
    constraint = schema_grammar(schema, strict=False, param="schema")
    assert constraint.relaxations
    assert validate_document(constraint, '"' + "a" * 40 + '!"') is not None


@pytest.mark.parametrize(
    "fields", [{"guided_regex": "a"}, {"guided_choice": ["a"]}, {"ebnf": 'start: "a"'}]
)
def test_other_kinds_need_no_validation(fields: dict[str, Any]) -> None:
    constraint = read_constraint(fields)
    assert constraint is not None
    assert validate_document(constraint, "a") is None


# --- JSON-Schema-Test-Suite ---

TABLE = Path(__file__).with_name("json_schema_suite_table.txt")
EXTERNAL_REFERENCE = "the reference leads to another document, which is not fetched"


def test_outcomes_are_those_of_the_table() -> None:
    assert list(describe_outcomes()) == TABLE.read_text(encoding="utf-8").splitlines()


def test_no_strict_grammar_is_too_wide() -> None:
    outcomes = TABLE.read_text(encoding="utf-8").splitlines()
    assert len(outcomes) > 700
    assert [line for line in outcomes if line.startswith("too wide")] == []


def test_documents_that_a_relaxed_grammar_accepts_are_validated() -> None:
    unnoticed = []
    for group in read_suite():
        try:
            constraint = schema_grammar(group["schema"], strict=False, param="schema")
        except ApiError:
            continue
        if any(relaxation.reason == EXTERNAL_REFERENCE for relaxation in constraint.relaxations):
            continue
        unnoticed += [
            (group["group"], document)
            for document, is_valid in group["tests"]
            if not is_valid
            and accepts(constraint.grammar_text, write_document(document))
            and validate_document(constraint, write_document(document)) is None
        ]
    assert unnoticed == []


def test_relaxed_grammars_accept_all_that_strict_ones_do() -> None:
    narrower = []
    for group in read_suite():
        try:
            strict = schema_grammar(group["schema"], strict=True, param="schema")
        except ApiError:
            continue
        relaxed = schema_grammar(group["schema"], strict=False, param="schema")
        if relaxed.grammars != strict.grammars or relaxed.relaxations:
            narrower.append(group["group"])
    assert narrower == []
