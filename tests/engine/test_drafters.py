"""The drafters of a core change no output, and have drafts that are accepted."""

from __future__ import annotations

import msgspec

from tests.engine.core_driver import run_requests
from tests.engine.test_equivalence import (
    assert_equal_to_reference,
    create,
    reference_output,
    requests,
)


def test_predictions_are_accepted_and_change_no_output() -> None:
    predicted = []
    for number, request in enumerate(requests()):
        tokens = list(reference_output(number).tokens)
        tokens[3:4] = [(tokens[3] + 1) % 4096]
        del tokens[8:10]
        predicted.append(msgspec.structs.replace(request, prediction=tokens + [7] * number))
    core = create(0, warmup=True)
    assert_equal_to_reference(run_requests(core, predicted))
    assert core.speculation is not None
    accepted, drafted = core.speculation.accepted_tokens, core.speculation.draft_tokens
    assert accepted["prediction"] > 0.4 * drafted["prediction"] > 40


def test_tokens_that_a_grammar_forces_are_accepted() -> None:
    core = create(0, warmup=True)
    constrained = [request for request in requests() if request.params.grammar]
    assert_equal_to_reference(run_requests(core, constrained))
    assert core.speculation is not None
    accepted, drafted = core.speculation.accepted_tokens, core.speculation.draft_tokens
    assert accepted["forced_tokens"] > 0.5 * drafted["forced_tokens"] > 5
