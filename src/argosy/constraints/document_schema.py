"""Prepares the schema of a request for a validator, which has fewer dialects than this package."""

from __future__ import annotations

from typing import Any

from argosy.constraints.pattern_translator import PatternError, translate_pattern
from argosy.constraints.schema_vocabulary import (
    DRAFT_4,
    DRAFT_2020,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    SINGLE_SCHEMAS,
    find_draft,
)


def prepare_document_schema(schema: Any, external_references: frozenset[int]) -> Any:  # noqa: ANN401 - any JSON value
    """Return a schema that means the same to a validator.

    * Regular expressions have the syntax of the grammar, where they are supported.
    * References to other documents are removed; their identities are in `external_references`.
    * Keywords of older drafts are those of 2020-12, if the schema does not name its draft.
    """
    return _Preparation(external_references, find_draft(schema)).run(schema)


class _Preparation:
    def __init__(self, external_references: frozenset[int], draft: int) -> None:
        self._external_references = external_references
        self._draft = draft

    def run(self, schema: Any) -> Any:  # noqa: ANN401 - any JSON value
        if not isinstance(schema, dict):
            return schema
        prepared = {keyword: self._run_value(keyword, value) for keyword, value in schema.items()}
        if id(schema) in self._external_references:
            del prepared["$ref"]
        if self._draft == DRAFT_2020 and isinstance(schema.get("items"), list):
            prepared["prefixItems"] = prepared.pop("items")
            if "additionalItems" in prepared:
                prepared["items"] = prepared.pop("additionalItems")
        if self._draft > DRAFT_4:
            _replace_exclusive_flags(prepared)
        return prepared

    def _run_value(self, keyword: str, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if keyword == "pattern" and isinstance(value, str):
            return _translate(value)
        if keyword in SCHEMA_MAPS and isinstance(value, dict):
            prepared = {name: self.run(subschema) for name, subschema in value.items()}
            if keyword == "patternProperties":
                translated = {_translate(name): subschema for name, subschema in prepared.items()}
                return translated if len(translated) == len(prepared) else prepared
            return prepared
        if keyword in SCHEMA_LISTS and isinstance(value, list):
            return [self.run(subschema) for subschema in value]
        return self.run(value) if keyword in SINGLE_SCHEMAS else value


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
