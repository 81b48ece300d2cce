"""Keywords of JSON schemas: documents that grammars accept, errors with strict, relaxations without."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest
from tests.support.byte_matcher import accepts, generate_text

from argosy.constraints import JsonWhitespace, schema_grammar, validate_document
from argosy.protocol import ApiError

CLOSED = {"type": "object", "additionalProperties": False}
KIND = {"type": "object", "required": ["kind"]}

ENFORCED: dict[str, tuple[Any, list[str], list[str]]] = {
    "type list": ({"type": ["integer", "null"]}, ["1", "null"], ['"a"', "1.5"]),
    "number and integer": ({"type": ["number", "integer"]}, ["1", "1.5"], ["null"]),
    "large integers": ({"type": "integer"}, ["1" * 40, "-0"], ["1.5"]),
    "exponents": ({"type": "number"}, ["1.5e-05", "1E20", "0"], ["1e", "01"]),
    "bounds": ({"type": "integer", "minimum": 3, "exclusiveMaximum": 5}, ["3", "4"], ["2", "5"]),
    "bounds of doubles": (
        {"type": "number", "exclusiveMinimum": 17, "exclusiveMaximum": 18.5},
        ["17.5", "17.0000000000001", "18.4999999999999"],
        ["17", "17.00000000000000000001", "18.4999999999999999999", "18.5"],
    ),
    "bounds of doubles below 0": (
        {"type": ["number", "null"], "exclusiveMinimum": -0.1, "exclusiveMaximum": 0},
        ["-0.05"],
        ["-0.1", "-0.09999999999999999999999", "0", "-0.0"],
    ),
    "fractions": ({"type": "number", "minimum": 0.5, "maximum": 1}, ["0.75", "1"], ["0.4", "1.1"]),
    "exclusive bounds of draft 4": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 3,
            "exclusiveMinimum": True,
        },
        ["4"],
        ["3"],
    ),
    "multipleOf": ({"type": "number", "multipleOf": 0.01}, ["0.25", "3"], ["0.125"]),
    "enum": ({"enum": ["a", 1, None, {"k": [True]}]}, ['"a"', '{"k":[true]}'], ['"b"', "2"]),
    "const": ({"const": 'q"\\'}, [r'"q\"\\"'], ['"q"']),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ['"éé"'], ['"é"', '"abcd"']),
    "anchored pattern": ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ['"ab"', '"xa"']),
    "searched pattern": ({"type": "string", "pattern": "a|b$"}, ['"xax"', '"b"'], ['"x"', '"bx"']),
    "pattern and length": (
        {"type": "string", "pattern": "^a", "maxLength": 2},
        ['"ab"'],
        ['"abc"', '"b"'],
    ),
    "dot of ECMA-262": (
        {"type": "string", "pattern": "^a.b$"},
        ['"axb"'],
        [r'"a\rb"', '"a\u2028b"'],
    ),
    "brackets in a class": ({"type": "string", "pattern": "^[a[&&]$"}, ['"["', '"&"'], ['"b"']),
    "braces": ({"type": "string", "pattern": "^a{b}$"}, ['"a{b}"'], ['"ab"']),
    "unicode escapes": ({"type": "string", "pattern": r"^\u00e9\ud83d\ude00$"}, ['"é😀"'], ['"e"']),
    "date": (
        {"type": "string", "format": "date"},
        ['"2024-02-29"'],
        ['"2023-02-29"', '"2024-2-9"'],
    ),
    "format and pattern": (
        {"type": "string", "format": "date", "pattern": "^19"},
        ['"1999-12-31"'],
        ['"2000-01-01"', '"19"'],
    ),
    "items": (
        {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        ["[1,2]"],
        ["[1,2,3]"],
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
        ["[]", "[1]"],
        ["[1,1]"],
    ),
    "items as a list": (
        {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
        ["[1]"],
        ['["a"]', "[1,2]"],
    ),
    "uniqueItems without effect": (
        {"type": "array", "uniqueItems": True, "maxItems": 1},
        ["[1]"],
        [],
    ),
    "open object": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ['{"a":1}', '{"a":1,"b":[]}'],
        ["{}", '{"a":"x"}', '{"a":1,"a":"x"}', r'{"a":1,"\u0061":"x"}'],
    ),
    "closed object": ({**CLOSED, "properties": {"a": True}}, ["{}", '{"a":null}'], ['{"b":1}']),
    "required but not declared": (
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
        ['{"a":1}'],
        ["{}", '{"a":"x"}'],
    ),
    "patternProperties": (
        {**CLOSED, "patternProperties": {"^x": {"type": "integer"}}},
        ['{"x1":1}'],
        ['{"x1":"a"}', '{"y":1}'],
    ),
    "names by pattern": (
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z]+$"},
            "additionalProperties": {"type": "null"},
        },
        ['{"ab":null}'],
        ['{"A":null}', '{"a":1}'],
    ),
    "names by enum": (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/Color"},
            "$defs": {"Color": {"enum": ["red", "blue"]}},
        },
        ['{"red":1}'],
        ['{"green":1}', '{"red":1,"red":1}'],
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    "minProperties of a closed object": (
        {**CLOSED, "properties": {"a": True, "b": True}, "minProperties": 1},
        ['{"b":1}', '{"a":1,"b":2}'],
        ["{}"],
    ),
    "maxProperties": ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
    "unevaluatedProperties alone": (
        {"type": "object", "properties": {"a": True}, "unevaluatedProperties": False},
        ['{"a":1}'],
        ['{"b":1}'],
    ),
    "anyOf beside properties": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        ['{"a":1}', '{"b":1}'],
        ["{}"],
    ),
    "allOf": (
        {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 3}]},
        ["2", "3"],
        ["1", "4", '"a"'],
    ),
    "oneOf by a reference": (
        {
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "$defs": {
                "Cat": {**KIND, "properties": {"kind": {"const": "cat"}}},
                "Dog": {
                    **KIND,
                    "properties": {"kind": {"enum": ["dog", "wolf"]}, "friend": {"$ref": "#"}},
                },
            },
        },
        ['{"kind":"cat"}', '{"kind":"dog","friend":{"kind":"cat"}}'],
        ['{"kind":"bird"}', '{"kind":"dog","friend":1}'],
    ),
    "oneOf by ranges": (
        {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}]},
        ["3", "3.5"],
        ["2.5"],
    ),
    "not of types": ({"not": {"type": ["object", "array"]}}, ["1", '"a"'], ["{}", "[]"]),
    "recursive reference": (
        {"type": "array", "items": {"$ref": "#"}},
        ["[]", "[[],[[]]]"],
        ["[1]"],
    ),
    "escaped pointer": (
        {"$ref": "#/$defs/a~1b%25~0", "$defs": {"a/b%~": {"type": "integer"}}},
        ["1"],
        ['"a"'],
    ),
    "anchor and $id": (
        {
            "$id": "https://example.com/root",
            "$ref": "part#x",
            "$defs": {"p": {"$id": "part", "$defs": {"q": {"$anchor": "x", "type": "integer"}}}},
        },
        ["1"],
        ['"a"'],
    ),
    "siblings of $ref in draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/a",
            "maximum": 3,
            "definitions": {"a": {"type": "integer"}},
        },
        ["5"],
        ['"a"'],
    ),
    "siblings of $ref": (
        {"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer"}}},
        ["3"],
        ["4"],
    ),
    "nullable of OpenAPI": ({"type": "string", "nullable": True}, ["null", '"a"'], ["1"]),
    "true": (True, ["1", "{}"], []),
    "annotations": (
        {"type": "integer", "title": "t", "x-order": 1, "default": 3, "examples": [1]},
        ["1"],
        ['"a"'],
    ),
    "endless optional part": (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n"}},
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"n": {"$ref": "#/$defs/n"}},
                    "required": ["n"],
                }
            },
        },
        ["{}"],
        ['{"a":{}}'],
    ),
}

UNENFORCEABLE: dict[str, tuple[Any, str, str]] = {
    "uniqueItems": ({"items": {"uniqueItems": True}}, "uniqueItems", "#/items/uniqueItems"),
    "contains": ({"contains": {"const": 1}}, "contains", "#/contains"),
    "not": ({"properties": {"a/b": {"not": {"const": 1}}}}, "not", "#/properties/a~1b/not"),
    "if": ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if", "#/if"),
    "dependentRequired": (
        {"dependentRequired": {"a": ["b"]}},
        "dependentRequired",
        "#/dependentRequired",
    ),
    "dependentSchemas": (
        {"dependentSchemas": {"a": {"required": ["b"]}}},
        "dependentSchemas",
        "#/dependentSchemas",
    ),
    "dependencies": ({"dependencies": {"a": ["b"]}}, "dependencies", "#/dependencies"),
    "propertyNames": ({"propertyNames": {"maxLength": 2}}, "propertyNames", "#/propertyNames"),
    "minProperties": ({"type": "object", "minProperties": 2}, "minProperties", "#/minProperties"),
    "maxProperties": (
        {"properties": {"a": True}, "maxProperties": 3},
        "maxProperties",
        "#/maxProperties",
    ),
    "overlapping oneOf": ({"oneOf": [{"minimum": 2}, {"multipleOf": 3}]}, "oneOf", "#/oneOf"),
    "unevaluatedProperties": (
        {"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
        "unevaluatedProperties",
        "#/unevaluatedProperties",
    ),
    "look-ahead": (
        {"$defs": {"a": {"pattern": "(?=a)"}}, "$ref": "#/$defs/a"},
        "pattern",
        "#/$defs/a/pattern",
    ),
    "back-reference": ({"pattern": r"(a)\1"}, "pattern", "#/pattern"),
    "word boundary": ({"pattern": r"\ba"}, "pattern", "#/pattern"),
    "multiplied repetitions": ({"pattern": "((a{100}){100}){100}"}, "pattern", "#/pattern"),
    "unknown format": ({"format": "color"}, "format", "#/format"),
    "overlapping patternProperties": (
        {"patternProperties": {"a": {"type": "integer"}, "b": True}, "additionalProperties": False},
        "patternProperties",
        "#/patternProperties",
    ),
    "remote reference": ({"$ref": "https://example.com/schema"}, "$ref", "#/$ref"),
    "dynamic reference": ({"$dynamicRef": "#a"}, "$dynamicRef", "#/$dynamicRef"),
    "integer beyond 2^53": ({"const": 2**53 + 1}, "const", "#/const"),
    "integer beyond a double": ({"const": 10**400}, "const", "#/const"),
    "smallest 64-bit integer": ({"enum": [-(2**63)]}, "enum", "#/enum"),
    "large bound": ({"minimum": 1e300}, "minimum", "#/minimum"),
    "digits beyond a double": ({"maximum": 0.30000000000000004}, "maximum", "#/maximum"),
    "many multiples": ({"multipleOf": 1234567.891}, "multipleOf", "#/multipleOf"),
    "control character": ({"const": "\x01"}, "const", "#/const"),
}

INVALID: dict[str, tuple[Any, str]] = {
    "no schema": (3, "must be an object, true or false"),
    "no subschema": ({"items": {"anyOf": [1]}}, "'#/items/anyOf/0'"),
    "unknown type": ({"properties": {"a": {"type": "text"}}}, "'#/properties/a/type'"),
    "empty enum": ({"enum": []}, "'#/enum'"),
    "negative length": ({"minLength": -1}, "'#/minLength'"),
    "missing definition": ({"$ref": "#/$defs/a"}, "no subschema at '#/$defs/a'"),
    "false": (False, "No document satisfies"),
    "contradictory lengths": ({"type": "string", "minLength": 3, "maxLength": 2}, "No document"),
    "contradictory bounds": ({"type": "integer", "minimum": 3, "maximum": 2}, "No document"),
    "reference to itself": ({"$ref": "#"}, "No finite document"),
    "endless recursion": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        "No finite document",
    ),
    "endless array": (
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        "No finite document",
    ),
    "half a character": ({"const": "\ud800"}, "surrogate"),
}


@pytest.mark.parametrize(("schema", "accepted", "rejected"), ENFORCED.values(), ids=ENFORCED)
def test_grammar_enforces_keyword(schema: object, accepted: list[str], rejected: list[str]) -> None:
    constraint = schema_grammar(schema, strict=True, param="schema")
    assert constraint.relaxations == ()
    assert [text for text in accepted if not accepts(constraint.grammar_text, text)] == []
    assert [text for text in rejected if accepts(constraint.grammar_text, text)] == []
    for seed in range(5):
        text = generate_text(constraint.grammar_text, random.Random(seed))
        assert text is None or validate_document(constraint, text) is None


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"), UNENFORCEABLE.values(), ids=UNENFORCEABLE
)
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


@pytest.mark.parametrize(("schema", "message"), INVALID.values(), ids=INVALID)
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
