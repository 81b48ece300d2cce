"""Keywords of JSON Schema: which drafts have them, which contain subschemas, and which only annotate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from argosy.constraints.json_pointer import child_pointer

DRAFT_4, DRAFT_6, DRAFT_7, DRAFT_2019, DRAFT_2020 = 4, 6, 7, 2019, 2020
DRAFTS = {
    "http://json-schema.org/draft-03/schema": DRAFT_4,
    "http://json-schema.org/draft-04/schema": DRAFT_4,
    "http://json-schema.org/draft-06/schema": DRAFT_6,
    "http://json-schema.org/draft-07/schema": DRAFT_7,
    "https://json-schema.org/draft/2019-09/schema": DRAFT_2019,
}
"""Drafts by their `$schema`. Every other schema is read as draft 2020-12."""

ANNOTATIONS = frozenset(
    (
        "$anchor",
        "$comment",
        "$defs",
        "$dynamicAnchor",
        "$id",
        "$recursiveAnchor",
        "$schema",
        "$vocabulary",
        "id",
        "definitions",
        "title",
        "description",
        "default",
        "deprecated",
        "readOnly",
        "writeOnly",
        "examples",
        "contentMediaType",
        "contentEncoding",
        "contentSchema",
    )
)
SCHEMA_MAPS = frozenset(
    ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies")
)
"""Keywords whose value maps names to subschemas."""
SCHEMA_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
"""Keywords whose value is, or may be, a list of subschemas."""
SINGLE_SCHEMAS = frozenset(
    (
        "items",
        "additionalItems",
        "additionalProperties",
        "contains",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
        "unevaluatedItems",
        "unevaluatedProperties",
        "contentSchema",
    )
)
"""Keywords whose value is, or may be, one subschema."""
INTRODUCED = {
    "const": DRAFT_6,
    "contains": DRAFT_6,
    "propertyNames": DRAFT_6,
    "if": DRAFT_7,
    "then": DRAFT_7,
    "else": DRAFT_7,
    "dependentRequired": DRAFT_2019,
    "dependentSchemas": DRAFT_2019,
    "maxContains": DRAFT_2019,
    "minContains": DRAFT_2019,
    "unevaluatedItems": DRAFT_2019,
    "unevaluatedProperties": DRAFT_2019,
    "$dynamicRef": DRAFT_2020,
    "prefixItems": DRAFT_2020,
}
"""First draft with a keyword. Earlier drafts ignore it."""


def find_draft(schema: object) -> int:
    """Return the draft of a document by its `$schema`."""
    name = schema.get("$schema") if isinstance(schema, dict) else None
    return DRAFTS.get(name.rstrip("#"), DRAFT_2020) if isinstance(name, str) else DRAFT_2020


def is_known(keyword: str, draft: int) -> bool:
    """Return whether a draft has the keyword, if any draft has it."""
    return INTRODUCED.get(keyword, DRAFT_4) <= draft


def map_subschemas(schema: dict[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a copy of a schema whose direct subschemas, including definitions, are replaced by `function`."""
    mapped = dict(schema)
    for keyword, value in schema.items():
        if keyword in SCHEMA_MAPS and isinstance(value, dict):
            mapped[keyword] = {name: function(subschema) for name, subschema in value.items()}
        elif keyword in SCHEMA_LISTS and isinstance(value, list):
            mapped[keyword] = [function(subschema) for subschema in value]
        elif keyword in SINGLE_SCHEMAS:
            mapped[keyword] = function(value)
    return mapped


def iterate_subschemas(schema: dict[str, Any], pointer: str) -> Iterator[tuple[Any, str]]:
    """Yield the direct subschemas, including definitions, with their pointers."""
    for keyword, value in schema.items():
        place = child_pointer(pointer, keyword)
        if keyword in SCHEMA_MAPS and isinstance(value, dict):
            for name, subschema in value.items():
                yield subschema, child_pointer(place, name)
        elif keyword in SCHEMA_LISTS and isinstance(value, list):
            for position, subschema in enumerate(value):
                yield subschema, child_pointer(place, position)
        elif keyword in SINGLE_SCHEMAS:
            yield value, place
