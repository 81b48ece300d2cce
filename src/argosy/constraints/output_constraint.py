"""Constraint of one answer: its grammar, and the parts of a schema that the grammar does not enforce."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any] | bool
"""JSON schema."""


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
