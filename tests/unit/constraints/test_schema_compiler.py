"""Keywords of JSON schemas: documents that grammars accept, errors with strict, relaxations without."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.byte_matcher import accepts, generate_text
from tests.support.case_tables import read_cases

from argosy.constraints import JsonWhitespace, schema_grammar, validate_document
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
        {"properties": {f"p{i}": {} for i in range(1_500)}},
        {"enum": list(range(6_000))},
        {"anyOf": [{"pattern": f"^a{i}$"} for i in range(300)]},
        {"anyOf": [{"properties": {f"p{i}_{j}": {} for j in range(30)}} for i in range(30)]},
        {"oneOf": [{"const": i} for i in range(300)]},
    ],
    ids=["deep", "chain", "long", "properties", "enum", "patterns", "alternatives", "one of"],
)
def test_limits_are_errors(schema: object) -> None:
    with pytest.raises(ApiError) as error:
        schema_grammar(schema, strict=False, param="schema")
    assert error.value.status == 400


def test_errors_do_not_contain_long_excerpts() -> None:
    with pytest.raises(ApiError) as error:
        schema_grammar({"$ref": "#/" + "x" * 5_000}, strict=False, param="schema")
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
