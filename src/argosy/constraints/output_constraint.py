"""Constraint of one answer: its grammar, and the validation of what the grammar does not enforce of a schema."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import jsonschema_rs

Schema = dict[str, Any] | bool
"""JSON schema."""
BACKTRACK_LIMIT = 100_000
MAX_PROBLEM_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Schema keyword that the grammar does not enforce. The finished document may violate it."""

    keyword: str
    pointer: str
    """JSON pointer of the keyword in the schema, as a URI fragment: `#/properties/tags/uniqueItems`."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConstraint:
    """Constraint of an answer, as grammars of llguidance."""

    kind: str
    """Kind: `json_object`, `json_schema`, `regex`, `choice`, `grammar` or `structural_tag`."""
    param: str
    """Request field that contains the constraint, e.g. `response_format.json_schema.schema`."""
    grammars: tuple[dict[str, Any], ...]
    """Sub-grammars. The first is the start. Every name begins with the name of the first."""
    relaxations: tuple[Relaxation, ...] = ()
    schema: Schema | None = None
    """JSON schema that a finished document satisfies: that of the request, in the form for a validator."""

    @property
    def grammar_text(self) -> str:
        """Text for `SamplingParams.grammar`. The same request always has the same text."""
        return encode_grammar(self.grammars)


def encode_grammar(grammars: tuple[dict[str, Any], ...]) -> str:
    """Return the JSON text of a list of sub-grammars. Key order is kept, since it is the order of the output."""
    return json.dumps({"grammars": list(grammars)}, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonWhitespace:
    """Whitespace that a JSON answer may contain."""

    pattern: str | None = r" |\n {0,16}"
    """Regular expression, matched at most once at each place that allows whitespace. None allows no whitespace."""
    item_separator: str = ","
    """Literal text between items and between properties."""
    key_separator: str = ":"
    """Literal text between a key and its value."""


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
