"""Rewrites `nullable` of OpenAPI 3.0 to a union with the type `null`."""

from __future__ import annotations

from typing import Any

from argosy.constraints.schema_vocabulary import SCHEMA_LISTS, SCHEMA_MAPS, SINGLE_SCHEMAS


def expand_nullable(schema: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a schema in which `"nullable": true` adds `null` to the `type` beside it.

    As in OpenAPI 3.0.3, it has no effect without `type`, and an `enum` must list null itself.
    """
    if not isinstance(schema, dict):
        return schema
    expanded = {keyword: _expand_value(keyword, value) for keyword, value in schema.items()}
    declared = schema.get("type")
    if schema.get("nullable") is True and declared is not None:
        del expanded["nullable"]
        names = [declared] if isinstance(declared, str) else declared
        if isinstance(names, list) and "null" not in names:
            expanded["type"] = [*names, "null"]
    return expanded


def _expand_value(keyword: str, value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if keyword in SCHEMA_MAPS and isinstance(value, dict):
        return {name: expand_nullable(schema) for name, schema in value.items()}
    if keyword in SCHEMA_LISTS and isinstance(value, list):
        return [expand_nullable(schema) for schema in value]
    if keyword in SINGLE_SCHEMAS:
        return expand_nullable(value)
    return value
