"""Rules for keywords about strings: `pattern` and `format`."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from argosy.constraints.library_errors import shorten_error
from argosy.constraints.limits import PARSER_LIMITS
from argosy.constraints.pattern_translator import PatternError, translate_pattern
from argosy.constraints.schema_errors import quote
from argosy.constraints.schema_normalizer import SchemaNode
from argosy.constraints.string_formats import FORMAT_PATTERNS

LENGTHS = ("minLength", "maxLength")


def normalize_pattern(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Translate a regular expression into the library's syntax."""
    node.require_text(keyword, value)
    if value:
        try:
            add_pattern(node, translate_schema_pattern(value), keyword)
        except PatternError as error:
            node.relax(keyword, f"in the regular expression, {error}")


def normalize_format(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Replace a format by its regular expression."""
    node.require_text(keyword, value)
    pattern = FORMAT_PATTERNS.get(value)
    if pattern is None:
        node.relax(keyword, f"the format {quote(value)} is not one of {', '.join(FORMAT_PATTERNS)}")
    else:
        add_pattern(node, translate_schema_pattern(pattern), keyword)


def add_pattern(node: SchemaNode, pattern: str, keyword: str) -> None:
    """Add a translated expression to the conditions of a node."""
    node.normalizer.count_pattern(pattern, node.pointer(keyword))
    node.add("pattern", pattern)


def finish_string(node: SchemaNode) -> None:
    """Relax the length of a string if the library cannot decide whether any text has it and matches the patterns."""
    bounds = {name: node.output[name] for name in LENGTHS if name in node.output}
    if "pattern" not in node.output or not bounds:
        return
    patterns = [part for part in node.conjuncts if "pattern" in part]
    schema = {"type": "string", "pattern": node.output["pattern"], **bounds, "allOf": patterns}
    error = compile_string_schema(json.dumps(schema))
    if error.startswith("Unable to determine"):
        for name in bounds:
            node.relax(name, "it cannot be combined with the regular expression")
            del node.output[name]


@lru_cache(maxsize=2048)
def translate_schema_pattern(pattern: str) -> str:
    """Translate a regular expression of a schema, and compile it.

    Raises:
        PatternError: It is invalid, matches no text or is not supported.
    """
    translation = translate_pattern(pattern)
    error = compile_string_schema(json.dumps({"type": "string", "pattern": translation}))
    if error.startswith("Regex is empty"):
        raise PatternError("no text matches")
    if error:
        raise PatternError(error.rstrip("."))
    return translation


def compile_string_schema(schema: str) -> str:
    """Return the library's error for the schema of a string, or an empty text."""
    grammar = f'{{"grammars":[{{"json_schema":{schema}}}]}}'
    error = LLMatcher.validate_grammar(grammar, None, limits=PARSER_LIMITS)
    return shorten_error(error.removeprefix("Unsatisfiable schema: ")) if error else ""
