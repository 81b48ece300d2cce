"""Compiles a JSON schema to a grammar of llguidance."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from argosy.constraints.applicator_rules import (
    normalize_combination,
    normalize_condition,
    normalize_dynamic_reference,
    normalize_negation,
    normalize_one_of,
    normalize_reference,
)
from argosy.constraints.container_rules import (
    finish_object,
    finish_property_names,
    normalize_additional_properties,
    normalize_contains,
    normalize_dependencies,
    normalize_items,
    normalize_pattern_properties,
    normalize_prefix_items,
    normalize_properties,
    normalize_required,
    normalize_unevaluated_items,
    normalize_unevaluated_properties,
    normalize_unique_items,
)
from argosy.constraints.grammar_check import find_first_mask_error
from argosy.constraints.limits import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from argosy.constraints.output_constraint import (
    JsonWhitespace,
    OutputConstraint,
    encode_grammar,
)
from argosy.constraints.schema_errors import invalid_schema, unsupported_schema
from argosy.constraints.schema_normalizer import Finisher, Rule, SchemaNormalizer
from argosy.constraints.schema_rewrites import (
    expand_nullable,
    prepare_document_schema,
    remove_infinite_parts,
)
from argosy.constraints.string_rules import finish_string, normalize_format, normalize_pattern
from argosy.constraints.value_rules import (
    finish_bounds,
    normalize_bound,
    normalize_const,
    normalize_count,
    normalize_enum,
    normalize_multiple,
    normalize_type,
)

ANSWER_WHITESPACE = JsonWhitespace()
"""Whitespace of answers: one space, or a line break and an indentation of up to 16 spaces."""
UNSATISFIABLE = "Unsatisfiable schema: "
ESCAPES = 'nrbtf\\"'
r"""Escapes in strings. Without `\u`, a key has one spelling, so that no key occurs twice in disguise."""

RULES: dict[str, Rule] = {
    "type": normalize_type,
    "enum": normalize_enum,
    "const": normalize_const,
    "minimum": normalize_bound,
    "maximum": normalize_bound,
    "exclusiveMinimum": normalize_bound,
    "exclusiveMaximum": normalize_bound,
    "multipleOf": normalize_multiple,
    "minLength": normalize_count,
    "maxLength": normalize_count,
    "pattern": normalize_pattern,
    "format": normalize_format,
    "items": normalize_items,
    "prefixItems": normalize_prefix_items,
    "minItems": normalize_count,
    "maxItems": normalize_count,
    "uniqueItems": normalize_unique_items,
    "contains": normalize_contains,
    "unevaluatedItems": normalize_unevaluated_items,
    "properties": normalize_properties,
    "patternProperties": normalize_pattern_properties,
    "additionalProperties": normalize_additional_properties,
    "required": normalize_required,
    "dependencies": normalize_dependencies,
    "dependentRequired": normalize_dependencies,
    "dependentSchemas": normalize_dependencies,
    "unevaluatedProperties": normalize_unevaluated_properties,
    "allOf": normalize_combination,
    "anyOf": normalize_combination,
    "oneOf": normalize_one_of,
    "not": normalize_negation,
    "if": normalize_condition,
    "$ref": normalize_reference,
    "$dynamicRef": normalize_dynamic_reference,
    "$recursiveRef": normalize_dynamic_reference,
}
FINISHERS: tuple[Finisher, ...] = (
    finish_string,
    finish_bounds,
    finish_property_names,
    finish_object,
)


def schema_grammar(
    schema: Any,  # noqa: ANN401 - any JSON value
    *,
    strict: bool,
    param: str,
    whitespace: JsonWhitespace = ANSWER_WHITESPACE,
    name: str = "answer",
    kind: str = "json_schema",
) -> OutputConstraint:
    """Compile a JSON schema.

    Args:
        schema: Decoded schema: an object or a boolean.
        strict: Whether a keyword that cannot be enforced is an error. Else it is a relaxation.
        param: Request field that contains the schema.
        whitespace: Whitespace and separators of the document.
        name: Name of the grammar.
        kind: Kind of the constraint.

    Raises:
        ApiError: 400 with the keyword and its JSON pointer.
    """
    return _compile_schema(read_schema_text(schema, param), strict, param, whitespace, name, kind)


@lru_cache(maxsize=256)
def _compile_schema(
    text: str,
    strict: bool,  # noqa: FBT001 - the same
    param: str,
    whitespace: JsonWhitespace,
    name: str,
    kind: str,
) -> OutputConstraint:
    """Compile a schema. Requests of one application repeat few schemas, so that results are cached."""
    schema = expand_nullable(json.loads(text))
    try:
        normalized = SchemaNormalizer(
            schema, strict=strict, param=param, rules=RULES, finishers=FINISHERS
        ).run()
        compiled = remove_infinite_parts(normalized.schema)
    except RecursionError:
        raise invalid_schema("The schema is nested too deeply.", param) from None
    if compiled is False:
        raise invalid_schema("No finite document satisfies this schema.", param)
    grammars = ({"name": name, "json_schema": add_options(compiled, whitespace)},)
    error = find_first_mask_error(encode_grammar(grammars))
    if error.startswith(UNSATISFIABLE):
        reason = error.removeprefix(UNSATISFIABLE)
        raise invalid_schema(f"No document satisfies this schema: {reason}", param)
    if error.startswith("circular references"):
        error = "A subschema that contains itself has other keywords beside its '$ref'."
    if error:
        raise unsupported_schema(f"The schema does not compile. {error}", param)
    return OutputConstraint(
        kind=kind,
        param=param,
        grammars=grammars,
        relaxations=normalized.relaxations,
        schema=prepare_document_schema(schema, normalized.external_references),
    )


def add_options(schema: dict[str, Any], whitespace: JsonWhitespace) -> dict[str, Any]:
    """Add the library's options to a rewritten schema."""
    options: dict[str, Any] = {
        "item_separator": _escape(whitespace.item_separator),
        "key_separator": _escape(whitespace.key_separator),
        "json_allowed_escapes": ESCAPES,
    }
    if whitespace.pattern is None:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = whitespace.pattern
    return {**schema, "x-guidance": options}


def read_schema_text(schema: Any, param: str) -> str:  # noqa: ANN401 - any JSON value
    """Return a schema as JSON text, after a check of its depth and its size.

    Raises:
        ApiError: 400.
    """
    if not isinstance(schema, dict | bool):
        raise invalid_schema("A schema must be an object, true or false.", param, "#")
    pending: list[tuple[Any, int]] = [(schema, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > 2 * MAX_SCHEMA_DEPTH:
            raise invalid_schema(
                f"The schema is nested more than {2 * MAX_SCHEMA_DEPTH} deep. Use references for recursion.",
                param,
            )
        children = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
        pending.extend((child, depth + 1) for child in children)
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise invalid_schema(
            "The schema has half of a surrogate pair. Send whole characters.", param
        ) from None
    if size > MAX_SCHEMA_BYTES:
        raise invalid_schema(
            f"The schema has {size} bytes. At most {MAX_SCHEMA_BYTES} are supported.", param
        )
    return text


def _escape(text: str) -> str:
    return "".join(
        character if character.isalnum() else f"\\x{{{ord(character):X}}}" for character in text
    )
