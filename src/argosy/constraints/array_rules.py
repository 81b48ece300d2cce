"""Rules for keywords about arrays."""

from __future__ import annotations

from typing import Any

from argosy.constraints.schema_normalizer import SchemaNode
from argosy.constraints.schema_vocabulary import DRAFT_2019
from argosy.constraints.value_rules import read_count

IN_PLACE_APPLICATORS = (
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentSchemas",
)
"""Keywords by which other subschemas evaluate properties and items of the same document."""


def normalize_items(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Rewrite items. A list stands for `prefixItems`, as drafts before 2020-12 have it."""
    if isinstance(value, list):
        node.output["prefixItems"] = _normalize_list(node, keyword, value)
        if "additionalItems" in node.source:
            node.output["items"] = node.normalize(node.source["additionalItems"], "additionalItems")
    else:
        node.output["items"] = node.normalize(value, keyword)


def normalize_prefix_items(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Rewrite the schemas of the first items."""
    if not isinstance(value, list) or not value:
        node.reject("The value must be a list with at least one schema.", keyword)
    node.output[keyword] = _normalize_list(node, keyword, value)


def _normalize_list(node: SchemaNode, keyword: str, schemas: list[Any]) -> list[Any]:
    return [node.normalize(item, keyword, position) for position, item in enumerate(schemas)]


def normalize_unique_items(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Drop the keyword where it has no effect."""
    if not isinstance(value, bool):
        node.reject("The value must be true or false.", keyword)
    count = read_count(node, "maxItems")
    if value and (count is None or count > 1):
        node.relax(keyword, "grammars do not compare items")


def normalize_contains(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401, ARG001 - signature of rules
    """Drop the keyword where every array satisfies it."""
    minimum = read_count(node, "minContains") if node.location.draft >= DRAFT_2019 else None
    if minimum != 0 or node.has("maxContains"):
        node.relax(keyword, "grammars do not count matching items")


def normalize_unevaluated_items(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Rewrite to `items`, if no other subschema evaluates items."""
    if (
        value is True
        or value == {}
        or ("items" in node.source and node.location.draft > DRAFT_2019)
    ):
        return
    if any(node.has(name) for name in (*IN_PLACE_APPLICATORS, "contains", "items")):
        node.relax(keyword, "it depends on other subschemas")
        return
    node.output["items"] = node.normalize(value, keyword)
