"""Rewrites of a whole schema: the options of vLLM and OpenAPI, the validator's dialect, and endless recursion.

Recursive parts that only infinite documents satisfy are removed. The grammar library would allow an optional property
with such a part, and then nothing that completes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from argosy.constraints.pattern_translator import PatternError, translate_pattern
from argosy.constraints.schema_vocabulary import DRAFT_4, DRAFT_2020, find_draft, map_subschemas
from argosy.constraints.value_rules import TYPES

ALL_TYPES = frozenset(TYPES)
LIST_KEYWORDS = ("allOf", "anyOf", "prefixItems")
MAP_KEYWORDS = ("properties", "patternProperties", "$defs")
SINGLE_KEYWORDS = ("items", "additionalProperties")


def close_objects(schema: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a schema in which objects with `properties` have no others, unless the schema says more about them.

    This is vLLM's option `disable_additional_properties`.
    """
    if not isinstance(schema, dict):
        return schema
    closed = map_subschemas(schema, close_objects)
    if "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def expand_nullable(schema: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a schema in which `"nullable": true` adds `null` to the `type` beside it.

    As in OpenAPI 3.0.3, it has no effect without `type`, and an `enum` must list null itself.
    """
    if not isinstance(schema, dict):
        return schema
    expanded = map_subschemas(schema, expand_nullable)
    declared = schema.get("type")
    if schema.get("nullable") is True and declared is not None:
        del expanded["nullable"]
        names = [declared] if isinstance(declared, str) else declared
        if isinstance(names, list) and "null" not in names:
            expanded["type"] = [*names, "null"]
    return expanded


def prepare_document_schema(schema: Any, external_references: frozenset[int]) -> Any:  # noqa: ANN401 - any JSON value
    """Return a schema that means the same to a validator, which knows fewer dialects.

    * Regular expressions have the syntax of the grammar, where they are supported.
    * References to other documents are removed; their identities are in `external_references`.
    * Keywords of older drafts are those of 2020-12, if the schema does not name its draft.
    """
    draft = find_draft(schema)

    def prepare(schema: Any) -> Any:  # noqa: ANN401 - any JSON value
        if not isinstance(schema, dict):
            return schema
        prepared = map_subschemas(schema, prepare)
        _translate_patterns(prepared)
        if id(schema) in external_references:
            del prepared["$ref"]
        if draft == DRAFT_2020 and isinstance(schema.get("items"), list):
            prepared["prefixItems"] = prepared.pop("items")
            if "additionalItems" in prepared:
                prepared["items"] = prepared.pop("additionalItems")
        if draft > DRAFT_4:
            _replace_exclusive_flags(prepared)
        return prepared

    return prepare(schema)


def _translate_patterns(schema: dict[str, Any]) -> None:
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = _translate(schema["pattern"])
    properties = schema.get("patternProperties")
    if isinstance(properties, dict):
        translated = {_translate(name): subschema for name, subschema in properties.items()}
        if len(translated) == len(properties):
            schema["patternProperties"] = translated


def _replace_exclusive_flags(schema: dict[str, Any]) -> None:
    """Replace `exclusiveMinimum: true` of draft 4 by a bound."""
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        value = schema.get(flag)
        if not isinstance(value, bool):
            continue
        del schema[flag]
        if value and bound in schema:
            schema[flag] = schema.pop(bound)


def _translate(pattern: str) -> str:
    try:
        return translate_pattern(pattern)
    except PatternError:
        return pattern


def remove_infinite_parts(schema: dict[str, Any]) -> Any:  # noqa: ANN401 - schema
    """Return a rewritten schema without parts that no finite document satisfies, or False if nothing is left."""
    definitions: Mapping[str, Any] = schema.get("$defs", {})
    finite: set[str] = set()
    size = -1
    while len(finite) > size:
        size = len(finite)
        finite.update(
            name
            for name, definition in definitions.items()
            if name not in finite and _is_finite(definition, finite, ALL_TYPES)
        )
    return _prune(schema, finite) if len(finite) < len(definitions) else schema


def _prune(schema: Any, finite: set[str], types: frozenset[str] = ALL_TYPES) -> Any:  # noqa: ANN401 - schema
    """Replace subschemas that are not finite by False."""
    if not isinstance(schema, dict):
        return schema
    if not _is_finite(schema, finite, types):
        return False
    types = _find_types(schema, types)
    pruned: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in LIST_KEYWORDS:
            inner = ALL_TYPES if keyword == "prefixItems" else types
            pruned[keyword] = [_prune(part, finite, inner) for part in value]
        elif keyword in MAP_KEYWORDS:
            pruned[keyword] = {name: _prune(part, finite) for name, part in value.items()}
        elif keyword in SINGLE_KEYWORDS:
            pruned[keyword] = _prune(value, finite)
        else:
            pruned[keyword] = value
    return pruned


def _find_types(schema: dict[str, Any], types: frozenset[str]) -> frozenset[str]:
    """Return the types that a schema and its conjuncts allow."""
    if "type" in schema:
        declared = schema["type"]
        names = frozenset([declared] if isinstance(declared, str) else declared)
        types &= names | {"integer"} if "number" in names else names
    for part in schema.get("allOf", ()):
        if isinstance(part, dict):
            types = _find_types(part, types)
    return types


def _is_finite(schema: Any, finite: set[str], types: frozenset[str]) -> bool:  # noqa: ANN401 - schema
    """Return False if no document of the types exists, provided that those of the definitions in `finite` exist."""
    if not isinstance(schema, dict):
        return schema is not False
    if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in finite:
        return False
    if "const" in schema or "enum" in schema:
        return True
    types = _find_types(schema, types)
    if not all(_is_finite(part, finite, types) for part in schema.get("allOf", ())):
        return False
    alternatives = schema.get("anyOf")
    if alternatives and not any(_is_finite(part, finite, types) for part in alternatives):
        return False
    return (
        not types  # the library reports it
        or not types <= {"object", "array"}
        or ("object" in types and _is_object_finite(schema, finite))
        or ("array" in types and _is_array_finite(schema, finite))
    )


def _is_object_finite(schema: dict[str, Any], finite: set[str]) -> bool:
    properties = schema.get("properties", {})
    other = {} if "patternProperties" in schema else schema.get("additionalProperties", {})
    return all(
        _is_finite(properties.get(name, other), finite, ALL_TYPES)
        for name in schema.get("required", ())
    )


def _is_array_finite(schema: dict[str, Any], finite: set[str]) -> bool:
    count = schema.get("minItems", 0)
    prefix = schema.get("prefixItems", [])[:count]
    return all(_is_finite(item, finite, ALL_TYPES) for item in prefix) and (
        count <= len(prefix) or _is_finite(schema.get("items", {}), finite, ALL_TYPES)
    )
