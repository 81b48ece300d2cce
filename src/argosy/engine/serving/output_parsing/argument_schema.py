"""Schemas of arguments as grammars: whole objects as JSON, or single parameters of formats with their own syntax."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from argosy import constraints
from argosy.constraints import OutputConstraint, Relaxation, Tool, resolve_local, schema_types
from argosy.engine.serving.output_parsing.grammar_writer import GrammarWriter
from argosy.engine.serving.output_parsing.typed_values import convert_value
from argosy.protocol import ApiError, invalid_request

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"}
)
_DEFINITIONS = ("$defs", "definitions")
_OBJECT_KEYWORDS = ANNOTATIONS | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    *_DEFINITIONS,
}
_STRING_KEYWORDS = ANNOTATIONS | {"type", "enum", "const", "minLength", "maxLength"}
"""Keywords that hold for a string that is written as plain text."""
_MAX_REPETITIONS = 1000
_MAX_CACHED_SCHEMAS = 2048
_MAX_CACHED_CHARS = 8192
"""Longer schemas are compiled for each request, so that the cache stays small."""
_MAX_EXPANSIONS = 256
"""Most references and unions of one value that are expanded."""


def expand_alternatives(schema: dict[str, Any], root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the alternatives of a value, in which references and unions are replaced by what they stand for.

    A part that cannot be replaced exactly stays as it is. So does all of a schema with very many parts.

    Args:
        schema: Schema of the value.
        root: Schema with the definitions.
    """
    expanded: list[dict[str, Any]] = []
    pending = [schema]
    for _ in range(_MAX_EXPANSIONS):
        if not pending:
            return expanded
        first = pending.pop()
        parts = _expand_once(first, root)
        if parts is None:
            expanded.append(first)
        else:
            pending += reversed(parts)
    return [schema]


def _expand_once(schema: dict[str, Any], root: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the alternatives for one reference or union of a schema; None without one, or if they are not exact."""
    for keyword in ("$ref", "allOf", "anyOf"):
        if keyword not in schema:
            continue
        value = schema[keyword]
        parts = [resolve_local(value, root)] if keyword == "$ref" else value
        if not isinstance(parts, list) or not parts or (keyword == "allOf" and len(parts) > 1):
            return None
        rest = {name: each for name, each in schema.items() if name != keyword}
        merged = [_merge(rest, part) for part in parts]
        return None if None in merged else [each for each in merged if each is not None]
    return None


def _merge(schema: dict[str, Any], part: object) -> dict[str, Any] | None:
    """Return one schema for both; None if a keyword of both means something else in each."""
    if not isinstance(part, dict):
        return None
    shared = schema.keys() & part.keys() - ANNOTATIONS
    return None if any(schema[name] != part[name] for name in shared) else part | schema


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a tool in a format that writes each one by itself."""

    name: str
    schema: dict[str, Any]
    types: frozenset[str]
    """JSON types of the value. Empty if any."""
    is_required: bool
    alternatives: list[dict[str, Any]]
    """Schemas of which the value has one, without references and unions as far as they can be expanded."""
    definitions: dict[str, Any]
    """Keywords with the definitions to which parts of the schema refer."""

    @property
    def is_text(self) -> bool:
        """Whether the value may be a string, which is written as plain text."""
        return not self.types or "string" in self.types

    def allows_text(self, alternative: dict[str, Any]) -> bool:
        """Return whether an alternative of the value may be a string."""
        types = schema_types(alternative, self.definitions)
        return not types or "string" in types

    def list_texts(self, *, has_types: bool) -> tuple[list[str], list[dict[str, Any]]]:
        """Return the texts of enumerations, and the other alternatives for a string.

        Args:
            has_types: Whether the format marks the types of values. Else other values than strings are texts as well,
                and a text that the parser would read as another value is left out.
        """
        texts: dict[str, None] = {}
        others = []
        for alternative in self.alternatives:
            values = list_values(alternative)
            if values is not None:
                texts |= dict.fromkeys(self._list_spellings(values, has_types=has_types))
            elif not has_types or self.allows_text(alternative):
                others.append(alternative)
        return list(texts), others

    def _list_spellings(self, values: list[Any], *, has_types: bool) -> list[str]:
        if has_types:
            return [value for value in values if isinstance(value, str)]
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return [
            text
            for text, value in zip(texts, values, strict=True)
            if self.types == {"string"} or json.loads(convert_value(text, self.types)) == value
        ]


def list_values(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values of an enumeration, or None for another schema."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else None


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
        bare = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
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


def split_parameters(
    writer: GrammarWriter, tool: Tool, param: str, *, has_types: bool
) -> tuple[list[Parameter], bool]:
    """Return the parameters of a tool, and whether it takes others. The writer records what is not enforced.

    Args:
        writer: Grammar of the output.
        tool: The tool.
        param: Path of its schema in the request.
        has_types: Whether the format marks the types of values.

    Raises:
        ApiError: 400 if the tool is strict, and its schema has keywords that a format without JSON cannot enforce.
    """
    schema = tool.parameters
    limit_keywords(writer, tool, schema, _OBJECT_KEYWORDS, "#", param)
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        properties = {}
    definitions: dict[str, Any] = {key: schema[key] for key in _DEFINITIONS if key in schema}
    parameters = []
    for key, value in properties.items():
        subschema = value if isinstance(value, dict) else {}
        parameter = Parameter(
            key,
            {**subschema, **definitions},
            tool.parameter_types.get(key, frozenset()),
            key in tool.required,
            expand_alternatives(subschema, definitions),
            definitions,
        )
        if parameter.is_text:
            _limit_text(writer, tool, parameter, param, has_types=has_types)
        parameters.append(parameter)
    is_open = not properties and schema.get("additionalProperties") is not False
    return parameters, is_open


def _limit_text(
    writer: GrammarWriter, tool: Tool, parameter: Parameter, param: str, *, has_types: bool
) -> None:
    """Check that plain text can only be a value of a parameter (see `limit_keywords`).

    Other alternatives than strings are written as JSON, with all their keywords, unless any text may stand there.
    """
    _, free = parameter.list_texts(has_types=True)
    for alternative in parameter.alternatives:
        if parameter.allows_text(alternative):
            keywords = _STRING_KEYWORDS
        elif free and not has_types:
            keywords = ANNOTATIONS | {"type"}
        else:
            continue
        limit_keywords(
            *(writer, tool, alternative, keywords),
            f"#/properties/{parameter.name}",
            f"{param}.properties.{parameter.name}",
        )


def find_pattern(schema: dict[str, Any]) -> str:
    """Return the regular expression of plain text with the lengths that the schema allows."""
    shortest, longest = schema.get("minLength"), schema.get("maxLength")
    low = shortest if isinstance(shortest, int) and 0 <= shortest <= _MAX_REPETITIONS else 0
    high = longest if isinstance(longest, int) and low <= longest <= _MAX_REPETITIONS else None
    if not low and high is None:
        return r"[\s\S]*"
    return rf"[\s\S]{{{low},{'' if high is None else high}}}"


def limit_keywords(
    writer: GrammarWriter,
    tool: Tool,
    schema: dict[str, Any],
    keywords: frozenset[str],
    pointer: str,
    param: str,
) -> None:
    """Check that a schema has only keywords that the format of calls can express. The writer records others.

    Args:
        writer: Grammar of the output.
        tool: The tool.
        schema: A part of its schema.
        keywords: Keywords that the format can express.
        pointer: Pointer of the part.
        param: Path of the part in the request.

    Raises:
        ApiError: 400 if the tool is strict, with the first other keyword.
    """
    unknown = sorted(set(schema) - keywords)
    if unknown and tool.strict:
        raise invalid_request(
            f"'{param}': the format in which this model writes tool calls cannot enforce the keyword '{unknown[0]}'. "
            "Remove the keyword, or set 'strict' to false.",
            param,
            "unsupported_schema",
        )
    reason = "the model writes these arguments as plain text"
    writer.relaxations += [
        (tool.schema_param, Relaxation(keyword, f"{pointer}/{keyword}", reason))
        for keyword in unknown
    ]
