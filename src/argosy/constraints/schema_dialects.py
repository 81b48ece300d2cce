"""Rewrites of a whole schema: vLLM's and OpenAPI's options, and the dialect of the validator of finished documents."""

from __future__ import annotations

from typing import Any

from argosy.constraints.pattern_translator import PatternError, translate_pattern
from argosy.constraints.schema_vocabulary import DRAFT_4, DRAFT_2020, find_draft, map_subschemas


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
