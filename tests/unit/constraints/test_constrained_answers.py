"""Answers: random ones under the mask of random schemas, and the validation of finished documents."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.byte_matcher import accepts, generate_text
from tests.support.schema_strategy import Schema, count_keywords, random_schema, schemas

from argosy.constraints import read_constraint, schema_grammar, validate_document

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


def test_random_schemas_are_varied() -> None:
    drawn = [random_schema(random.Random(seed)) for seed in range(200)]
    texts = [str(schema) for schema in drawn]
    assert sum(count_keywords(schema) >= 6 for schema in drawn) >= 100
    for keyword in ("$ref", "pattern", "oneOf", "allOf", "format", "additionalProperties"):
        assert sum(f"'{keyword}'" in text for text in texts) >= 10, keyword


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


def test_json_object_is_an_object() -> None:
    constraint = read_constraint({"response_format": {"type": "json_object"}})
    assert constraint is not None
    assert validate_document(constraint, "{}") is None
    assert validate_document(constraint, "[]") is not None
