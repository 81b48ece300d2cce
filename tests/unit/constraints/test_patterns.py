"""Regular expressions and formats: grammars agree with independent implementations."""

from __future__ import annotations

import contextlib
import random
import re

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.byte_matcher import accepts, generate_text

from argosy.constraints import read_constraint, schema_grammar, validate_document
from argosy.protocol import ApiError

FORMATS = (
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "idn-email",
    "hostname",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "iri",
    "uri-reference",
    "iri-reference",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
)
ATOMS = st.sampled_from(
    [
        "a",
        "b",
        ".",
        "[ab]",
        "[^a]",
        r"\d",
        r"\w",
        r"\.",
        r"\s",
        "[a-c-]",
        r"[\d-]",
        "(?:ab|a)",
        "(b|)",
        "é",
        "{",
        "}",
    ]
)
QUANTIFIERS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{0,}", "*?"])
BODIES = st.lists(st.tuples(ATOMS, QUANTIFIERS).map("".join), min_size=1, max_size=5).map("".join)
PATTERNS = st.one_of(
    BODIES,
    BODIES.map("^{}$".format),
    BODIES.map("^{}".format),
    st.tuples(BODIES, BODIES).map("|".join),
)
TEXTS = st.text(alphabet="ab1. -éc{}", max_size=6)


@given(PATTERNS, TEXTS)
def test_regex_matches_as_in_python(pattern: str, text: str) -> None:
    constraint = read_constraint({"regex": pattern})
    assert constraint is not None
    expected = re.fullmatch(pattern, text, re.ASCII) is not None
    assert accepts(constraint.grammar_text, text) == expected


@given(PATTERNS, TEXTS)
def test_pattern_of_a_schema_searches(pattern: str, text: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    constraint = schema_grammar(schema, strict=True, param="schema")
    expected = re.search(pattern, text, re.ASCII) is not None
    assert accepts(constraint.grammar_text, f'"{text}"') == expected
    assert (validate_document(constraint, f'"{text}"') is None) == expected


@given(st.text(alphabet=r"()[]{}|*+?.^$\-,a1bdwsWpLuxk=!<>:&~/", max_size=12))
def test_any_text_is_a_pattern_or_a_clear_error(pattern: str) -> None:
    with contextlib.suppress(ApiError):
        assert read_constraint({"regex": pattern}) is not None


@pytest.mark.parametrize("name", FORMATS)
def test_generated_texts_have_their_format(name: str) -> None:
    constraint = schema_grammar({"type": "string", "format": name}, strict=True, param="schema")
    validator = jsonschema_rs.validator_for({"format": name}, validate_formats=True)
    texts = [generate_text(constraint.grammar_text, random.Random(seed), 120) for seed in range(60)]
    finished = [text.strip('"') for text in texts if text is not None]
    assert len(finished) > 5
    assert [text for text in finished if not validator.is_valid(text)] == []
