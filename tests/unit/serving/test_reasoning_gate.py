"""Reasoning gate: where a block begins and ends, and how many tokens are inside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.engine.reasoning_gate import ReasoningGate
from argosy.protocol import ReasoningBlock

OPEN, CLOSE = 8, 9


def run(block: ReasoningBlock, tokens: list[int]) -> tuple[ReasoningGate, list[bool]]:
    gate = ReasoningGate(block)
    return gate, [gate.accept(token) for token in tokens]


@pytest.mark.parametrize(
    ("start_ids", "tokens", "inside", "count"),
    [
        ((), [1, 2, CLOSE, 3], [True, True, True, False], 2),
        ((OPEN,), [OPEN, 1, CLOSE, 3], [True, True, True, False], 1),
        ((OPEN,), [3, OPEN, 1], [False, False, False], 0),
        ((), [CLOSE, CLOSE], [True, False], 0),
    ],
)
def test_the_block_ends_at_its_closing_token(
    start_ids: tuple[int, ...], tokens: list[int], inside: list[bool], count: int
) -> None:
    gate, belongs = run(ReasoningBlock(end_ids=(CLOSE,), start_ids=start_ids), tokens)
    assert belongs == inside
    assert gate.tokens == count
    assert gate.is_past


@given(st.lists(st.integers(0, 2), max_size=30))
def test_a_closing_sequence_is_found_where_it_first_occurs(tokens: list[int]) -> None:
    end_ids = (1, 1, 2)
    gate, belongs = run(ReasoningBlock(end_ids=end_ids), tokens)
    found = next(
        (i for i in range(len(tokens)) if tuple(tokens[i : i + len(end_ids)]) == end_ids), None
    )
    assert gate.is_past == (found is not None)
    if found is not None:
        assert gate.tokens == found
        assert sum(belongs) == found + len(end_ids)
