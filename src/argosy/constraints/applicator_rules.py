"""Rules for keywords that combine subschemas, and for references.

`oneOf` becomes `anyOf` if a proof shows that no document satisfies two of its subschemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from argosy.constraints.limits import MAX_ONE_OF
from argosy.constraints.schema_errors import quote
from argosy.constraints.schema_normalizer import SchemaNode
from argosy.constraints.value_rules import TYPES

ALL_TYPES = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
"""Types of JSON values, with numbers split into integers and others."""
MAX_DEPTH = 10
NUMBERS = frozenset(("integer", "fraction"))


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


class DisjointnessProver:
    """Compares normalized schemas. `definitions` maps the names of references to their targets."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions

    def are_disjoint(self, left: Any, right: Any, depth: int = 0) -> bool:  # noqa: ANN401 - schemas
        """Return True if it is certain that no document satisfies both schemas."""
        if left is False or right is False:
            return True
        if not isinstance(left, dict) or not isinstance(right, dict) or depth > MAX_DEPTH:
            return False
        return (
            self._are_types_disjoint(left, right, depth)
            or _are_values_disjoint(left, right)
            or self._are_objects_disjoint(left, right, depth)
            or _are_ranges_disjoint(left, right)
            or self._are_parts_disjoint(left, right, depth + 1)
            or self._are_parts_disjoint(right, left, depth + 1)
        )

    def _are_parts_disjoint(self, left: dict[str, Any], right: dict[str, Any], depth: int) -> bool:
        """Return whether a part of `left` is disjoint from `right`: a reference, a conjunct or all alternatives."""
        if "$ref" in left and self.are_disjoint(self._find_target(left), right, depth):
            return True
        if any(self.are_disjoint(part, right, depth) for part in left.get("allOf", ())):
            return True
        alternatives = left.get("anyOf", ())
        return bool(alternatives) and all(
            self.are_disjoint(option, right, depth) for option in alternatives
        )

    def _are_types_disjoint(self, left: dict[str, Any], right: dict[str, Any], depth: int) -> bool:
        return not self._find_types(left, depth) & self._find_types(right, depth)

    def _find_types(self, schema: Any, depth: int) -> frozenset[str]:  # noqa: ANN401 - schema
        if schema is False:
            return frozenset()
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return ALL_TYPES
        types = _declared_types(schema)
        if "$ref" in schema:
            types &= self._find_types(self._find_target(schema), depth + 1)
        for part in schema.get("allOf", ()):
            types &= self._find_types(part, depth + 1)
        alternatives = schema.get("anyOf")
        if alternatives:
            types &= frozenset().union(
                *(self._find_types(part, depth + 1) for part in alternatives)
            )
        return types

    def _are_objects_disjoint(
        self, left: dict[str, Any], right: dict[str, Any], depth: int
    ) -> bool:
        """Return whether both need an object with a property of which no value satisfies both."""
        if self._find_types(left, depth) & self._find_types(right, depth) != {"object"}:
            return False
        names = dict.fromkeys([*left.get("required", ()), *right.get("required", ())])
        return any(
            self.are_disjoint(_find_property(left, name), _find_property(right, name), depth + 1)
            for name in names
        )

    def _find_target(self, schema: dict[str, Any]) -> Any:  # noqa: ANN401 - schema
        return self._definitions.get(schema["$ref"].rpartition("/")[2])


def _declared_types(schema: dict[str, Any]) -> frozenset[str]:
    types = ALL_TYPES
    if "type" in schema:
        declared = schema["type"]
        names = {declared} if isinstance(declared, str) else set(declared)
        types = frozenset(names - {"number"}) | (NUMBERS if "number" in names else frozenset())
    values = _find_values(schema)
    return types if values is None else types & {_type_of(value) for value in values}


def _find_values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "fraction"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _are_values_disjoint(left: dict[str, Any], right: dict[str, Any]) -> bool:
    left_values, right_values = _find_values(left), _find_values(right)
    if left_values is None or right_values is None:
        return False
    return not {_canonical(value) for value in left_values} & {
        _canonical(value) for value in right_values
    }


def _canonical(value: object) -> str:
    return json.dumps(_normalize_numbers(value), sort_keys=True)


def _normalize_numbers(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normalize_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: _normalize_numbers(item) for name, item in value.items()}
    return value


def _are_ranges_disjoint(left: dict[str, Any], right: dict[str, Any]) -> bool:
    if not (_declared_types(left) & _declared_types(right) <= NUMBERS):
        return False
    return _is_below(left, right) or _is_below(right, left)


def _is_below(left: dict[str, Any], right: dict[str, Any]) -> bool:
    for upper, is_upper_open in (("maximum", False), ("exclusiveMaximum", True)):
        for lower, is_lower_open in (("minimum", False), ("exclusiveMinimum", True)):
            if upper in left and lower in right:
                gap = right[lower] - left[upper]
                if gap > 0 or (gap == 0 and (is_upper_open or is_lower_open)):
                    return True
    return False


def _find_property(schema: dict[str, Any], name: str) -> Any:  # noqa: ANN401 - schema
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    return {} if "patternProperties" in schema else schema.get("additionalProperties", {})
