"""Vocabulary of JSON Schema: its drafts, keywords, types, and pointers to subschemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

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
MAX_REFERENCES = 16
"""Depth to which references and alternatives of a schema are followed to find its types."""
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_TYPES_OF_VALUES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)


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


def child_pointer(pointer: str, *tokens: str | int) -> str:
    """Return the pointer of a descendant."""
    return "/".join([pointer, *(escape_token(str(token)) for token in tokens)])


def escape_token(token: str) -> str:
    """Escape one reference token."""
    return token.replace("~", "~0").replace("/", "~1")


def resolve_pointer(document: Any, fragment: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value at `fragment`, a percent-encoded pointer that is empty or starts with a slash.

    Raises:
        LookupError: There is no such value.
    """
    value = document
    for token in unquote(fragment).split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            if not key.isascii() or not key.isdigit():
                raise LookupError(key)
            value = value[int(key)]
        elif isinstance(value, dict):
            value = value[key]
        else:
            raise LookupError(key)  # noqa: TRY004 - documented
    return value


def schema_types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows. An empty set means any type."""
    return frozenset(_iter_types(schema, root, MAX_REFERENCES))


def json_type(value: object) -> str:
    """Return the JSON type of a decoded value. Whole numbers are `integer`."""
    return next(name for kind, name in _TYPES_OF_VALUES if isinstance(value, kind))


def _iter_types(schema: object, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Yield the JSON types that `schema` allows, as far as its types, values and references show."""
    if not isinstance(schema, dict) or depth == 0:
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (name for name in declared if isinstance(name, str))
    elif isinstance(schema.get("enum"), list):
        yield from map(json_type, schema["enum"])
    elif "const" in schema:
        yield json_type(schema["const"])
    else:
        for keyword in _ALTERNATIVES:
            for alternative in schema.get(keyword) or ():
                yield from _iter_types(alternative, root, depth - 1)
        if isinstance(schema.get("$ref"), str):
            yield from _iter_types(resolve_local(schema["$ref"], root), root, depth - 1)


def resolve_local(reference: object, root: Mapping[str, Any]) -> object:
    """Return the part of `root` to which a reference within it points, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    try:
        return resolve_pointer(root, reference[1:])
    except LookupError:
        return None
