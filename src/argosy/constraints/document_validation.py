"""Validates finished documents against the schema of the request, where the grammar does not enforce all of it."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from functools import lru_cache
from typing import Any

import jsonschema_rs

from argosy.constraints.output_constraint import OutputConstraint

BACKTRACK_LIMIT = 100_000
MAX_PROBLEM_CHARACTERS = 300


def validate_document(constraint: OutputConstraint, text: str) -> str | None:
    """Return what is wrong with a finished document, or None if it satisfies the constraint.

    Only JSON documents are validated; other constraints are enforced by their grammar alone. Never raises.
    """
    if constraint.kind not in {"json_object", "json_schema"}:
        return None
    try:
        document = json.loads(text, parse_float=_parse_fraction)
    except (ValueError, RecursionError) as error:
        return f"The answer is no JSON document: {error}."
    if constraint.schema is None:
        return None if isinstance(document, dict) else "The answer is no JSON object."
    validator = _find_validator(json.dumps(constraint.schema))
    if isinstance(validator, str):
        return validator
    try:
        validator.validate(document)
    except jsonschema_rs.ValidationError as error:
        pointer = "/".join(["#", *(str(token) for token in error.instance_path)])
        return _shorten(f"At {pointer}: {error.message}")
    except (ValueError, RecursionError) as error:
        return _shorten(f"The answer could not be validated: {error}")
    return None


@lru_cache(maxsize=256)
def _find_validator(schema_text: str) -> Any:  # noqa: ANN401 - validators of each draft have their own class
    """Return a validator, or the reason for which there is none."""
    schema = json.loads(schema_text)
    reason = ""
    for options in (jsonschema_rs.RegexOptions(), jsonschema_rs.FancyRegexOptions(BACKTRACK_LIMIT)):
        try:
            return jsonschema_rs.validator_for(
                schema, validate_formats=True, pattern_options=options, retriever=_refuse_retrieval
            )
        except (ValueError, jsonschema_rs.ReferencingError) as error:
            reason = str(error)
    return _shorten(f"The answer could not be validated against the schema: {reason}")


def _parse_fraction(text: str) -> float | Decimal:
    """Return a double, or a decimal number where a double would overflow."""
    number = float(text)
    return number if math.isfinite(number) else Decimal(text)


def _refuse_retrieval(uri: str) -> Any:  # noqa: ANN401 - signature of the library
    raise ValueError(f"{uri} is not fetched")


def _shorten(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= MAX_PROBLEM_CHARACTERS else line[:MAX_PROBLEM_CHARACTERS] + "..."
