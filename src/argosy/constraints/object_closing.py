"""Closes objects that declare properties, for vLLM's option `disable_additional_properties`."""

from __future__ import annotations

from typing import Any

from argosy.constraints.schema_vocabulary import SCHEMA_LISTS, SCHEMA_MAPS, SINGLE_SCHEMAS


def close_objects(schema: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a schema in which objects with `properties` have no others, unless the schema says more about them."""
    if not isinstance(schema, dict):
        return schema
    closed = {keyword: _close_value(keyword, value) for keyword, value in schema.items()}
    if "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _close_value(keyword: str, value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if keyword in SCHEMA_MAPS and isinstance(value, dict):
        return {name: close_objects(schema) for name, schema in value.items()}
    if keyword in SCHEMA_LISTS and isinstance(value, list):
        return [close_objects(schema) for schema in value]
    if keyword in SINGLE_SCHEMAS:
        return close_objects(value)
    return value
