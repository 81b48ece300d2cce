"""Schemas of arguments as grammars: whole objects as JSON, or single parameters of formats with their own syntax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from argosy import constraints
from argosy.engine.serving.output_parsing.tools import Tool
from argosy.protocol import invalid_request

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"}
)
_OBJECT_KEYWORDS = _ANNOTATIONS | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
}
_STRING_KEYWORDS = _ANNOTATIONS | {"type", "enum", "const", "minLength", "maxLength"}
"""Keywords that hold for a string that is written as plain text."""
_MAX_REPETITIONS = 1000


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a tool in a format that writes each one by itself."""

    name: str
    schema: dict[str, Any]
    types: frozenset[str]
    is_required: bool
    strings: tuple[str, ...]
    """All values of a string with an enumeration."""
    pattern: str
    """Regular expression of a string that is written as plain text."""


def schema_grammars(
    schema: object, *, strict: bool, param: str, name: str
) -> tuple[dict[str, Any], ...]:
    """Return sub-grammars for a JSON document, whose names begin with `name`.

    Raises:
        ApiError: 400 if the schema is invalid, or cannot be enforced although it is strict.
    """
    return constraints.schema_grammar(schema, strict=strict, param=param, name=name).grammars


def split_parameters(tool: Tool, param: str) -> tuple[list[Parameter], bool]:
    """Return the parameters of a tool, and whether it takes others.

    Raises:
        ApiError: 400 if the tool is strict, and its schema has keywords that a format without JSON cannot enforce.
    """
    schema = tool.parameters
    if tool.strict:
        _require_keywords(schema, _OBJECT_KEYWORDS, param)
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        properties = {}
    definitions: dict[str, Any] = {
        key: schema[key] for key in ("$defs", "definitions") if key in schema
    }
    parameters = []
    for key, value in properties.items():
        subschema = value if isinstance(value, dict) else {}
        types = tool.parameter_types.get(key, frozenset())
        if tool.strict and types == {"string"}:
            _require_keywords(subschema, _STRING_KEYWORDS, f"{param}.properties.{key}")
        parameters.append(
            Parameter(
                key,
                {**subschema, **definitions},
                types,
                key in tool.required,
                _find_strings(subschema),
                _find_pattern(subschema),
            )
        )
    is_open = not properties and schema.get("additionalProperties") is not False
    return parameters, is_open


def _find_strings(schema: dict[str, Any]) -> tuple[str, ...]:
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return tuple(dict.fromkeys(values))
    return ()


def _find_pattern(schema: dict[str, Any]) -> str:
    """Return the regular expression of plain text with the lengths that the schema allows."""
    shortest, longest = schema.get("minLength"), schema.get("maxLength")
    low = shortest if isinstance(shortest, int) and 0 <= shortest <= _MAX_REPETITIONS else 0
    high = longest if isinstance(longest, int) and low <= longest <= _MAX_REPETITIONS else None
    if not low and high is None:
        return r"[\s\S]*"
    return rf"[\s\S]{{{low},{'' if high is None else high}}}"


def _require_keywords(schema: dict[str, Any], keywords: frozenset[str], param: str) -> None:
    unknown = sorted(set(schema) - keywords)
    if unknown:
        raise invalid_request(
            f"'{param}': the format in which this model writes tool calls cannot enforce the keyword '{unknown[0]}'. "
            "Remove the keyword, or set 'strict' to false.",
            param,
            "unsupported_schema",
        )
