"""Finished documents: validation against the schema, numbers, hostile expressions."""

from __future__ import annotations

from typing import Any

import pytest

from argosy.constraints import read_constraint, schema_grammar, validate_document


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
