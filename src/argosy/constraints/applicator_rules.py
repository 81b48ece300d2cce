"""Rules for keywords that combine subschemas, and for references."""

from __future__ import annotations

from typing import Any

from argosy.constraints.limits import MAX_ONE_OF
from argosy.constraints.schema_disjointness import DisjointnessProver
from argosy.constraints.schema_errors import quote
from argosy.constraints.schema_normalizer import SchemaNode
from argosy.constraints.value_rules import TYPES


def normalize_reference(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Refer to the rewritten target."""
    node.require_text(keyword, value)
    normalizer = node.normalizer
    try:
        target = normalizer.references.resolve(value, node.location)
    except LookupError:
        if value.startswith("#"):
            node.reject(f"The schema has no subschema at {quote(value)}.", keyword)
        node.relax(keyword, "the reference leads to another document, which is not fetched")
        normalizer.external_references.add(id(node.source))
        return
    schema = normalizer.define(target)
    if schema is False:
        node.is_unsatisfiable = True
    elif schema:
        node.add("$ref", schema["$ref"])


def normalize_dynamic_reference(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Drop a reference whose target depends on the path that leads to it."""
    node.require_text(keyword, value)
    node.relax(keyword, "grammars resolve references before they are generated")


def normalize_combination(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Rewrite the subschemas of `allOf` and `anyOf`."""
    node.add(keyword, _normalize_options(node, keyword, value))


def normalize_one_of(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Rewrite to `anyOf`, which means the same if no document satisfies two of the subschemas."""
    schemas = _normalize_options(node, keyword, value)
    if len(schemas) > MAX_ONE_OF:
        node.reject(f"The list has more than {MAX_ONE_OF} items. Use 'anyOf'.", keyword)
    node.normalizer.defer(lambda: _require_disjointness(node, keyword, schemas))
    node.add("anyOf", schemas)


def _require_disjointness(node: SchemaNode, keyword: str, schemas: list[Any]) -> None:
    """Relax `oneOf` unless no document satisfies two of the rewritten schemas. All definitions are complete."""
    prover = DisjointnessProver(node.normalizer.definitions)
    for second, later in enumerate(schemas):
        for first, earlier in enumerate(schemas[:second]):
            if not prover.are_disjoint(earlier, later):
                node.relax(
                    keyword,
                    f"a document might satisfy both item {first} and item {second} (distinguish them by a required"
                    " property with a 'const', or use 'anyOf')",
                )
                return


def _normalize_options(node: SchemaNode, keyword: str, value: Any) -> list[Any]:  # noqa: ANN401 - JSON value
    if not isinstance(value, list) or not value:
        node.reject("The value must be a list with at least one schema.", keyword)
    return [node.normalize(schema, keyword, position) for position, schema in enumerate(value)]


def normalize_negation(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Rewrite a negation of types. Others are not supported."""
    if value is False:
        return
    if value is True or value == {}:
        node.is_unsatisfiable = True
        return
    excluded = value.get("type") if isinstance(value, dict) and set(value) == {"type"} else None
    names = [excluded] if isinstance(excluded, str) else excluded
    if not isinstance(names, list) or ("integer" in names and "number" not in names):
        node.relax(keyword, "grammars do not negate schemas")
        return
    allowed = [name for name in TYPES if name not in names and name != "integer"]
    if allowed:
        node.conjuncts.append({"type": allowed})
    else:
        node.is_unsatisfiable = True


def normalize_condition(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401, ARG001 - signature of rules
    """Drop a condition without consequence."""
    if "then" in node.source or "else" in node.source:
        node.relax(keyword, "grammars do not evaluate conditions")
