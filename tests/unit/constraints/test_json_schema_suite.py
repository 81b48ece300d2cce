"""The JSON-Schema-Test-Suite: a table of outcomes, and finished documents of relaxed schemas."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.byte_matcher import accepts
from tests.support.json_schema_suite import describe_outcomes, read_suite, write_document

from argosy.constraints import schema_grammar, validate_document
from argosy.protocol import ApiError

TABLE = Path(__file__).with_name("json_schema_suite_table.txt")
EXTERNAL_REFERENCE = "the reference leads to another document, which is not fetched"


def test_outcomes_are_those_of_the_table() -> None:
    assert list(describe_outcomes()) == TABLE.read_text(encoding="utf-8").splitlines()


def test_no_strict_grammar_is_too_wide() -> None:
    outcomes = TABLE.read_text(encoding="utf-8").splitlines()
    assert len(outcomes) > 700
    assert [line for line in outcomes if line.startswith("too wide")] == []


def test_documents_that_a_relaxed_grammar_accepts_are_validated() -> None:
    unnoticed = []
    for group in read_suite():
        try:
            constraint = schema_grammar(group["schema"], strict=False, param="schema")
        except ApiError:
            continue
        if any(relaxation.reason == EXTERNAL_REFERENCE for relaxation in constraint.relaxations):
            continue
        unnoticed += [
            (group["group"], document)
            for document, is_valid in group["tests"]
            if not is_valid
            and accepts(constraint.grammar_text, write_document(document))
            and validate_document(constraint, write_document(document)) is None
        ]
    assert unnoticed == []


def test_relaxed_grammars_accept_all_that_strict_ones_do() -> None:
    narrower = []
    for group in read_suite():
        try:
            strict = schema_grammar(group["schema"], strict=True, param="schema")
        except ApiError:
            continue
        relaxed = schema_grammar(group["schema"], strict=False, param="schema")
        if relaxed.grammars != strict.grammars or relaxed.relaxations:
            narrower.append(group["group"])
    assert narrower == []


@pytest.mark.parametrize("draft", ["draft2020-12", "draft7"])
def test_both_drafts_have_their_groups(draft: str) -> None:
    assert sum(group["draft"] == draft for group in read_suite()) > 250
