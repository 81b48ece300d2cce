"""JSON types that a schema allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
            yield from _iter_types(_resolve(schema["$ref"], root), root, depth - 1)


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    """Return the part of `root` to which a local reference points, or None."""
    if not reference.startswith("#"):
        return None
    node: object = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        node = node.get(key) if isinstance(node, dict) else None
    return node
