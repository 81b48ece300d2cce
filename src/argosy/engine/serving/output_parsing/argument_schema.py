"""Schemas of arguments as grammars: whole objects as JSON, or single parameters of formats with their own syntax."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from argosy import constraints
from argosy.constraints import OutputConstraint, Relaxation, Tool
from argosy.engine.serving.output_parsing.grammar_writer import GrammarWriter
from argosy.protocol import ApiError, invalid_request

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
_MAX_CACHED_SCHEMAS = 2048
_MAX_CACHED_CHARS = 8192
"""Longer schemas are compiled for each request, so that the cache stays small."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a tool in a format that writes each one by itself."""

    name: str
    schema: dict[str, Any]
    types: frozenset[str]
    """JSON types of the value. Empty if any."""
    is_required: bool
    pattern: str
    """Regular expression of a string that is written as plain text."""

    @property
    def is_text(self) -> bool:
        """Whether the value may be a string, which is written as plain text."""
        return not self.types or "string" in self.types

    def texts(self, *, has_types: bool) -> list[str] | None:
        """Return all texts of an enumeration, or None if the schema has none.

        Args:
            has_types: Whether the format marks the types of values. Else other values than strings are texts as well.
        """
        values = self.schema.get("enum", [self.schema["const"]] if "const" in self.schema else None)
        if not isinstance(values, list):
            return None
        return [
            value if isinstance(value, str) else json.dumps(value)
            for value in values
            if isinstance(value, str) or not has_types
        ]


class SchemaGrammars:
    """Sub-grammars of one output grammar. Equal schemas share one.

    Args:
        writer: Grammar that refers to them.
    """

    def __init__(self, writer: GrammarWriter) -> None:
        self._writer = writer
        self._references: dict[tuple[str, bool], str] = {}

    def add(self, schema: dict[str, Any], *, strict: bool, param: str) -> str:
        """Return a reference to the grammar of a JSON document.

        Raises:
            ApiError: 400 if the schema is invalid, or cannot be enforced although it is strict.
        """
        bare = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
        text = json.dumps(bare, ensure_ascii=False)
        key = (text, strict)
        constraint = _compile(text, strict=strict, param=param)
        self._writer.relaxations += [(param, item) for item in constraint.relaxations]
        if key not in self._references:
            (grammar,) = constraint.grammars
            name = f"json_{len(self._references)}"
            self._references[key] = self._writer.add_grammars([{**grammar, "name": name}])
        return self._references[key]


def _compile(text: str, *, strict: bool, param: str) -> OutputConstraint:
    """Return the constraint of a schema, from the cache if it is there.

    Raises:
        ApiError: 400 if the schema is invalid, or cannot be enforced although it is strict.
    """
    if len(text) <= _MAX_CACHED_CHARS:
        try:
            return _compile_cached(text, strict)
        except ApiError:
            pass  # is raised again below, for the request's own field
    return _compile_schema(text, strict, param)


@lru_cache(maxsize=_MAX_CACHED_SCHEMAS)
def _compile_cached(text: str, strict: bool) -> OutputConstraint:  # noqa: FBT001 - key of a cache
    return _compile_schema(text, strict, "")


def _compile_schema(text: str, strict: bool, param: str) -> OutputConstraint:  # noqa: FBT001
    return constraints.schema_grammar(json.loads(text), strict=strict, param=param)


def split_parameters(tool: Tool, param: str) -> tuple[list[Parameter], bool]:
    """Return the parameters of a tool, and whether it takes others.

    Raises:
        ApiError: 400 if the tool is strict, and its schema has keywords that a format without JSON cannot enforce.
    """
    schema = tool.parameters
    if tool.strict:
        require_keywords(schema, _OBJECT_KEYWORDS, param)
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        properties = {}
    definitions: dict[str, Any] = {
        key: schema[key] for key in ("$defs", "definitions") if key in schema
    }
    parameters = []
    for key, value in properties.items():
        subschema = value if isinstance(value, dict) else {}
        parameter = Parameter(
            key,
            {**subschema, **definitions},
            tool.parameter_types.get(key, frozenset()),
            key in tool.required,
            _find_pattern(subschema),
        )
        if tool.strict and parameter.is_text:
            _require_text(subschema, f"{param}.properties.{key}")
        parameters.append(parameter)
    is_open = not properties and schema.get("additionalProperties") is not False
    return parameters, is_open


def unenforced_keywords(tool: Tool) -> list[Relaxation]:
    """Return the keywords of a tool without `strict` that a format without JSON does not enforce."""
    found = _list_unenforced(tool.parameters, _OBJECT_KEYWORDS, "#")
    properties = tool.parameters.get("properties")
    for key, value in properties.items() if isinstance(properties, dict) else ():
        types = tool.parameter_types.get(key, frozenset())
        if isinstance(value, dict) and (not types or "string" in types):
            pointer = f"#/properties/{key}"
            found += _list_unenforced(value, _STRING_KEYWORDS | {"anyOf", "$ref"}, pointer)
    return found


def _list_unenforced(
    schema: dict[str, Any], keywords: frozenset[str], pointer: str
) -> list[Relaxation]:
    reason = "the model writes these arguments as plain text"
    return [
        Relaxation(keyword, f"{pointer}/{keyword}", reason)
        for keyword in sorted(set(schema) - keywords)
    ]


def _find_pattern(schema: dict[str, Any]) -> str:
    """Return the regular expression of plain text with the lengths that the schema allows."""
    shortest, longest = schema.get("minLength"), schema.get("maxLength")
    low = shortest if isinstance(shortest, int) and 0 <= shortest <= _MAX_REPETITIONS else 0
    high = longest if isinstance(longest, int) and low <= longest <= _MAX_REPETITIONS else None
    if not low and high is None:
        return r"[\s\S]*"
    return rf"[\s\S]{{{low},{'' if high is None else high}}}"


def _require_text(schema: dict[str, Any], param: str) -> None:
    """Check that plain text can only be a value of a schema.

    Raises:
        ApiError: 400 with the first keyword that is not enforced.
    """
    require_keywords(schema, _STRING_KEYWORDS | {"anyOf"}, param)
    alternatives = schema.get("anyOf")
    for index, alternative in enumerate(alternatives if isinstance(alternatives, list) else ()):
        if isinstance(alternative, dict):
            require_keywords(alternative, _ANNOTATIONS | {"type"}, f"{param}.anyOf.{index}")


def require_keywords(schema: dict[str, Any], keywords: frozenset[str], param: str) -> None:
    """Check that a strict schema has only keywords that the format of calls can express.

    Raises:
        ApiError: 400 with the first other keyword.
    """
    unknown = sorted(set(schema) - keywords)
    if unknown:
        raise invalid_request(
            f"'{param}': the format in which this model writes tool calls cannot enforce the keyword '{unknown[0]}'. "
            "Remove the keyword, or set 'strict' to false.",
            param,
            "unsupported_schema",
        )
