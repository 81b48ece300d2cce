"""The position of an output in a predicted text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.engine.execution.drafting.prediction import PredictionCursor

PREDICTION = list(range(100, 120))
tokens = st.integers(0, 3)


@pytest.mark.parametrize(
    ("output", "proposed", "accepted"),
    [
        ([], [100, 101, 102], 0),
        (PREDICTION[:5], [105, 106, 107], 5),
        (PREDICTION, [], 20),
        ([*PREDICTION[:5], 7], [106, 107, 108], 5),
        ([*PREDICTION[:5], 7, *PREDICTION[6:9]], [109, 110, 111], 8),
        ([*PREDICTION[:5], 7, 8], [], 5),
        ([*PREDICTION[:5], 7, 8, *PREDICTION[5:8]], [108, 109, 110], 5),
        ([*PREDICTION[:5], *PREDICTION[9:12]], [112, 113, 114], 5),
        ([1, 2, *PREDICTION[3:8]], [108, 109, 110], 2),
        ([*PREDICTION, *PREDICTION[2:6]], [106, 107, 108], 21),
    ],
    ids=[
        "start",
        "equal",
        "end",
        "mismatch",
        "replaced",
        "lost",
        "inserted",
        "deleted",
        "later",
        "again",
    ],
)
def test_follows_an_edited_output(output: list[int], proposed: list[int], accepted: int) -> None:
    cursor = PredictionCursor(PREDICTION)
    cursor.advance(output)
    assert (cursor.propose(3), cursor.accepted) == (proposed, accepted)


@given(st.lists(tokens, max_size=60), st.lists(tokens, max_size=60), st.lists(st.integers(1, 8)))
def test_does_not_depend_on_the_steps_of_the_output(
    prediction: list[int], output: list[int], sizes: list[int]
) -> None:
    whole, stepwise = PredictionCursor(prediction), PredictionCursor(prediction)
    whole.advance(output)
    rest, accepted = output, 0
    for size in (*sizes, len(output)):
        expected = stepwise.propose(1)[:1]
        accepted += bool(expected) and expected == rest[:1] and size == 1
        stepwise.advance(rest[:size])
        rest = rest[size:]
    assert stepwise.propose(16) == whole.propose(16)
    assert accepted <= stepwise.accepted == whole.accepted <= len(output)
