"""The drafters of a core change no output, and have drafts that are accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.executor.draft_model import DraftModel
from argosy.engine.execution.executor.output_stage import StepHandle
from argosy.engine.scheduling import DraftLengthPolicy, StepPlan
from argosy.engine.serving.engine_core.core import EngineCore
from argosy.models import DRAFT_MODEL
from argosy.protocol import SamplingParams
from tests.engine.core_driver import run_requests
from tests.engine.test_equivalence import (
    assert_equal_to_reference,
    create,
    reference_output,
    requests,
)


class RooflineClock:
    """Clock of an engine on which each token of a step takes `row_cost` of a step of one token."""

    def __init__(self, core: EngineCore, row_cost: float) -> None:
        self.now = 0.0
        self.first_window = 0.0
        """Time that the first window of drafts took beyond its step."""
        submit = core.executor.submit

        def submit_timed(plan: StepPlan) -> StepHandle:
            self.now += 1.0 + row_cost * (plan.total_tokens - 1)
            self.first_window = self.first_window or row_cost * plan.num_drafts
            return submit(plan)

        core.executor.submit = submit_timed  # type: ignore[method-assign]
        core._clock = self  # noqa: SLF001 - the durations of steps decide how much is drafted
        if core.speculation is not None:
            core.speculation._clock = self  # noqa: SLF001 - the same

    def __call__(self) -> float:
        return self.now


def test_predictions_are_accepted_and_change_no_output() -> None:
    predicted = []
    for number, request in enumerate(requests()):
        tokens = list(reference_output(number).tokens)
        tokens[3:4] = [(tokens[3] + 1) % 4096]
        del tokens[8:10]
        predicted.append(msgspec.structs.replace(request, prediction=tokens + [7] * number))
    core = create(0, warmup=True)
    RooflineClock(core, row_cost=0.02)
    assert_equal_to_reference(run_requests(core, predicted))
    assert core.speculation is not None
    accepted, drafted = core.speculation.stats.accepted_tokens, core.speculation.stats.draft_tokens
    assert accepted["prediction"] > 0.4 * drafted["prediction"] > 20


def test_tokens_that_a_grammar_forces_are_accepted() -> None:
    core = create(0, warmup=True)
    RooflineClock(core, row_cost=0.02)
    constrained = [request for request in requests() if request.params.grammar]
    assert_equal_to_reference(run_requests(core, constrained))
    assert core.speculation is not None
    accepted, drafted = core.speculation.stats.accepted_tokens, core.speculation.stats.draft_tokens
    assert accepted["forced_tokens"] > 0.5 * drafted["forced_tokens"] > 2


LENGTH = 128
FEW_TOKENS = SamplingParams(
    temperature=1.0, max_tokens=LENGTH, ignore_eos=True, allowed_token_ids=[*range(700, 704)]
)
"""Any three of four tokens follow each other soon, and what follows them is random."""


def create_adversaries(count: int) -> dict[str, list[EngineRequest]]:
    """Return requests whose drafts are likely and wrong."""
    random_texts = [
        EngineRequest(
            id=str(seed),
            prompt=[*range(700, 704)] * 8 + [seed],
            params=msgspec.structs.replace(FEW_TOKENS, seed=seed),
        )
        for seed in range(count)
    ]
    core = create(0, warmup=True, speculation="off")
    outputs = run_requests(core, random_texts)

    def predict(change: Callable[[int], bool]) -> list[EngineRequest]:
        return [
            msgspec.structs.replace(
                request,
                prediction=[
                    705 if change(index) else token
                    for index, token in enumerate(outputs[request.id].tokens)
                ],
            )
            for request in random_texts
        ]

    return {
        "random text of few tokens": random_texts,
        "a prediction that is wrong at each fourth token": predict(lambda i: i % 4 == 3),
        "a prediction that is right, then wrong, then right": predict(lambda i: i // 20 % 2 == 1),
    }


@pytest.mark.parametrize(
    ("count", "row_cost"),
    [
        pytest.param(*case, marks=() if case == (8, 0.15) else pytest.mark.exhaustive)
        for case in [(1, 0.02), (1, 0.15), (8, 0.02), (8, 0.15), (32, 0.05)]
    ],
)
def test_adversarial_texts_take_hardly_longer(count: int, row_cost: float) -> None:
    """On the real engine, with durations that follow from the tokens of a step."""
    ratios = {}
    for name, adversaries in create_adversaries(count).items():
        totals = []
        for speculation in ("off", "auto"):
            core = create(0, warmup=True, speculation=speculation, max_seqs=count)
            clock = RooflineClock(core, row_cost)
            run_requests(core, adversaries)
            totals.append(clock.now - clock.first_window)
        ratios[name] = totals[1] / totals[0]
    assert max(ratios.values()) <= 1.05, ratios


SHARED: dict[str, Any] = {"cache_domain": "a", "shares_outputs": True}
PROMPT, OTHER_PROMPT = [*range(300, 340)], [*range(500, 540)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
REPETITIVE = msgspec.structs.replace(GREEDY, allowed_token_ids=[700, 701])


def observe_steps(
    victim: tuple[list[int], SamplingParams, dict[str, Any]],
    attacker: dict[str, Any],
    options: dict[str, Any],
) -> list[tuple[int, ...]]:
    """Return the steps of an attacker's answers after those of a victim: their tokens, and those that each delivers."""
    core = create(0, warmup=True, prefix_cache=False, **options)
    RooflineClock(core, row_cost=0.02)
    prompt, params, fields = victim
    for number in range(3):
        run_requests(core, [EngineRequest(id=f"{number}", prompt=prompt, params=params, **fields)])
    steps = []
    for _ in range(2):
        core.add(EngineRequest(id="attacker", prompt=PROMPT, params=GREEDY, **attacker))
        while core.has_work:
            outputs = core.step()
            delivered = (len(delta.tokens) for delta in outputs.deltas)
            steps.append((outputs.stats.step_tokens, *delivered))
    return steps


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "prediction,forced_tokens,prompt_lookup,domain_window"},
        {"speculation": "prompt_lookup", "draft_model": str(DRAFT_MODEL)},
    ],
    ids=["texts", "model"],
)
def test_drafts_reveal_nothing_of_texts_in_other_cache_domains(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant who guesses a text of another one, or how often it repeats itself, sees the steps of a wrong guess.

    The measured durations of steps, which all share, are taken to be equal.
    """
    record = DraftLengthPolicy.record_step
    monkeypatch.setattr(
        DraftLengthPolicy, "record_step", lambda policy, *_: record(policy, 1, 0, 0.02)
    )
    monkeypatch.setattr(DraftLengthPolicy, "record_passes", lambda *_: None)
    monkeypatch.setattr(DraftModel, "warm_up", lambda _: None)
    victims = [(PROMPT, GREEDY), (OTHER_PROMPT, GREEDY), (PROMPT, REPETITIVE)]
    attacker = SHARED | {"cache_domain": "b"}
    right, other, repetitive = (
        observe_steps((*victim, SHARED), attacker, options) for victim in victims
    )
    assert right == other == repetitive
    neighbours = [observe_steps((*victim, SHARED), SHARED, options) for victim in victims[:2]]
    assert neighbours[0] != neighbours[1], "within a domain the guess can be confirmed"


@pytest.mark.parametrize(
    ("victim", "attacker"),
    [(SHARED, {"cache_domain": "a"}), ({"cache_domain": "a"}, SHARED)],
    ids=["to nobody", "of nobody"],
)
def test_outputs_of_requests_that_share_none_are_no_drafts(
    victim: dict[str, Any], attacker: dict[str, Any]
) -> None:
    right, other = (
        observe_steps((prompt, GREEDY, victim), attacker, {"speculation": "domain_window"})
        for prompt in (PROMPT, OTHER_PROMPT)
    )
    assert right == other
