"""Rules for keywords about arrays and objects.

Grammars write declared properties in their order and other properties after them. They do not see that a property that
is not declared occurs twice, so that its occurrences count only once towards `minProperties`.
"""

from __future__ import annotations

import json
from typing import Any

from argosy.constraints.limits import MAX_PROPERTIES
from argosy.constraints.pattern_translator import PatternError
from argosy.constraints.schema_normalizer import SchemaNode
from argosy.constraints.schema_vocabulary import ANNOTATIONS, DRAFT_2019
from argosy.constraints.string_rules import FORMAT_PATTERNS, translate_schema_pattern
from argosy.constraints.string_rules import compile_string_schema as compile_schema
from argosy.constraints.value_rules import CONTROL_CHARACTER, read_count

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


def normalize_properties(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Rewrite the schemas of declared properties."""
    node.require_object(keyword, value)
    node.normalizer.count("properties", len(value), MAX_PROPERTIES, node.pointer(keyword))
    node.output[keyword] = {
        name: node.normalize(schema, keyword, name) for name, schema in value.items()
    }


def normalize_pattern_properties(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Rewrite schemas by expressions of names, which must be disjoint."""
    node.require_object(keyword, value)
    rewritten: dict[str, Any] = {}
    for pattern, schema in value.items():
        try:
            translation = translate_schema_pattern(pattern) or ".*"
        except PatternError as error:
            _drop_pattern_properties(node, f"in a regular expression, {error}")
            return
        node.normalizer.count_pattern(translation, node.pointer(keyword))
        rewritten[translation] = node.normalize(schema, keyword, pattern)
    if len(rewritten) < len(value) or compile_schema(
        json.dumps({"type": "object", "patternProperties": {pattern: {} for pattern in rewritten}})
    ):
        _drop_pattern_properties(node, "the regular expressions match a common name")
    elif rewritten:
        node.output[keyword] = rewritten


def _drop_pattern_properties(node: SchemaNode, reason: str) -> None:
    """Allow any other property. Names that match are exempt from `additionalProperties`, so it is dropped as well."""
    node.relax("patternProperties", reason)
    node.output["additionalProperties"] = {}


def normalize_additional_properties(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Rewrite the schema of other properties."""
    schema = node.normalize(value, keyword)
    if "patternProperties" in node.source and _has_dropped_patterns(node):
        return
    node.output[keyword] = schema


def normalize_required(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Check the names of properties."""
    if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
        node.reject("The value must be a list of property names.", keyword)
    if value:
        node.output[keyword] = list(dict.fromkeys(value))


def normalize_dependencies(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Drop dependencies that are empty."""
    node.require_object(keyword, value)
    if any(condition not in ([], {}, True) for condition in value.values()):
        node.relax(keyword, "grammars do not make one property depend on another")


def normalize_unevaluated_properties(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Rewrite to `additionalProperties`, if no other subschema evaluates properties."""
    if value is True or value == {} or "additionalProperties" in node.source:
        return
    if any(node.has(name) for name in IN_PLACE_APPLICATORS) or _has_dropped_patterns(node):
        node.relax(keyword, "it depends on other subschemas")
        return
    node.output["additionalProperties"] = node.normalize(value, keyword)


def _has_dropped_patterns(node: SchemaNode) -> bool:
    """Return whether `patternProperties` is, or will be, dropped."""
    patterns = node.source.get("patternProperties")
    if not isinstance(patterns, dict):
        return False
    if "patternProperties" not in node.output:
        normalize_pattern_properties(node, "patternProperties", patterns)
    return bool(patterns) and "patternProperties" not in node.output


def finish_property_names(node: SchemaNode) -> None:
    """Rewrite `propertyNames` to `properties` or `patternProperties`, where the node declares no others."""
    keyword = "propertyNames"
    if not node.has(keyword):
        return
    value = node.source[keyword]
    condition = _find_target(node, keyword, value)
    if condition is True or (isinstance(condition, dict) and _is_any_name(condition)):
        return
    if node.has("properties") or node.has("patternProperties"):
        node.relax(keyword, "it is only supported without 'properties' and 'patternProperties'")
        return
    if condition is False:
        node.output["additionalProperties"] = False
        return
    names, pattern = _read_names(condition)
    if names is None and pattern is None:
        node.relax(
            keyword, "only one of 'enum', 'const', 'pattern' and 'format' is supported in it"
        )
        return
    schema = node.normalizer.share(node.output.get("additionalProperties", {}))
    if names is not None:
        node.normalizer.count("properties", len(names), MAX_PROPERTIES, node.pointer(keyword))
        node.output["properties"] = dict.fromkeys(names, schema)
    elif pattern is not None:
        node.normalizer.count_pattern(pattern, node.pointer(keyword))
        node.output["patternProperties"] = {pattern: schema}
    node.output["additionalProperties"] = False


def _find_target(node: SchemaNode, keyword: str, value: Any) -> Any:  # noqa: ANN401 - JSON value
    """Follow references that stand alone."""
    location = node.normalizer.references.locate(value, node.pointer(keyword), node.location)
    for _ in range(10):
        schema = location.schema
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        reference = schema["$ref"]
        if not isinstance(reference, str) or set(schema) - ANNOTATIONS != {"$ref"}:
            return schema
        try:
            location = node.normalizer.references.resolve(reference, location)
        except LookupError:
            return schema
    return {}


def _is_any_name(condition: dict[str, Any]) -> bool:
    return set(condition) - ANNOTATIONS <= {"type"} and condition.get("type", "string") in (
        "string",
        ["string"],
    )


def _read_names(condition: Any) -> tuple[list[str] | None, str | None]:  # noqa: ANN401 - schema
    """Return the allowed names, or a translated expression for them, or neither."""
    keywords = set(condition) - ANNOTATIONS - {"type"} if isinstance(condition, dict) else set()
    if len(keywords) != 1 or condition.get("type", "string") != "string":
        return None, None
    keyword = keywords.pop()
    value = condition[keyword]
    if keyword == "const":
        keyword, value = "enum", [value]
    if keyword == "enum" and isinstance(value, list):
        return list(dict.fromkeys(name for name in value if isinstance(name, str))), None
    if keyword == "format":
        keyword, value = "pattern", FORMAT_PATTERNS.get(value) if isinstance(value, str) else None
    if keyword == "pattern" and isinstance(value, str):
        try:
            return None, translate_schema_pattern(value)
        except PatternError:
            return None, None
    return None, None


def finish_object(node: SchemaNode) -> None:
    """Check names, and decide which bounds of the number of properties are enforced."""
    names = [*node.output.get("properties", ()), *node.output.get("required", ())]
    if any(character < " " for name in names for character in name):
        for keyword in ("properties", "required"):
            if keyword in node.output:
                node.relax(keyword, CONTROL_CHARACTER)
                del node.output[keyword]
        node.output["additionalProperties"] = {}
    minimum, maximum = read_count(node, "minProperties"), read_count(node, "maxProperties")
    if minimum is not None:
        _bound_below(node, minimum)
    if maximum is not None:
        _bound_above(node, maximum)


def _bound_below(node: SchemaNode, minimum: int) -> None:
    required = node.output.get("required", [])
    optional = [name for name in node.output.get("properties", ()) if name not in required]
    if minimum <= len(required):
        return
    if _is_closed(node):
        is_supported = minimum <= len(required) + 1
        if not optional or minimum > len(required) + len(optional):
            node.is_unsatisfiable = node.output.get("type") == "object"
    else:
        is_supported = not optional and minimum == len(required) + 1
    if is_supported:
        node.output["minProperties"] = minimum
    else:
        node.relax(
            "minProperties", "grammars do not count properties that are optional or occur twice"
        )


def _bound_above(node: SchemaNode, maximum: int) -> None:
    required = node.output.get("required", [])
    optional = [name for name in node.output.get("properties", ()) if name not in required]
    if _is_closed(node) and maximum >= len(required) + len(optional):
        return
    minimum = node.output.get("minProperties", 0)
    if not optional or (
        _is_closed(node) and maximum == len(required) + 1 and minimum <= len(required) + 1
    ):
        node.output["maxProperties"] = maximum
    else:
        node.relax("maxProperties", "grammars do not count properties that are optional")


def _is_closed(node: SchemaNode) -> bool:
    return (
        node.output.get("additionalProperties") is False and "patternProperties" not in node.output
    )
