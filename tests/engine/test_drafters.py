"""The drafters of a core change no output, and have drafts that are accepted."""

from __future__ import annotations

from typing import Any

import msgspec

from argosy.engine.engine_request import EngineRequest
from argosy.protocol import SamplingParams
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


def count_drafts(first: dict[str, Any], second: dict[str, Any]) -> int:
    """Return how many tokens are drafted for a second request of the same text after a first one."""
    core = create(0, warmup=True, speculation="domain_window")
    speculation = core.speculation
    assert speculation is not None
    for number, fields in enumerate((first, second)):
        request = EngineRequest(
            id=str(number),
            prompt=[*range(300, 340)],
            params=SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
            **fields,
        )
        (output,) = run_requests(core, [request]).values()
        assert len(output.tokens) == 24
        assert number or not speculation.draft_tokens
    return speculation.draft_tokens["domain_window"]


def test_outputs_are_drafts_within_their_cache_domain_only() -> None:
    """A tenant who guesses the beginning of another's output sees no faster answer."""
    shared: dict[str, Any] = {"cache_domain": "a", "shares_outputs": True}
    assert count_drafts(shared, shared) > 0
    for first, second in (
        (shared, shared | {"cache_domain": "b"}),
        (shared, {"cache_domain": "a"}),
        ({"cache_domain": "a"}, shared),
    ):
        assert count_drafts(first, second) == 0
