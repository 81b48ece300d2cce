"""Properties of the policy for the number of drafts in a step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.engine.scheduling.draft_length import (
    FIRST_PROBE_WAIT,
    MAX_DRAFT_TOKENS,
    MAX_RIDGES,
    MAX_SLOWDOWN,
    DraftCandidate,
    DraftHistory,
    DraftLengthPolicy,
    DraftSource,
)

RIDGE = 24
LOOKUP = DraftSource("prompt_lookup", 4)

step_seconds = st.floats(1e-4, 10.0)
step_records = st.lists(
    st.tuples(st.integers(1, 64), st.integers(0, 64), step_seconds), max_size=20
)
acceptances = st.lists(st.tuples(st.integers(0, 40), st.floats(0.0, 1.0)), min_size=1, max_size=6)


def train(policy: DraftLengthPolicy, acceptance: float) -> DraftHistory:
    """Return the history of a sequence with a given fraction of accepted drafts."""
    history = DraftHistory()
    accepted = 0.0
    for _ in range(40):
        accepted += acceptance
        policy.record_drafts(history, LOOKUP, 1, int(accepted))
        accepted -= int(accepted)
    return history


def create_measured(
    steps: list[tuple[int, int, float]],
    sequences: list[tuple[int, float]],
    num_decodes: int,
    ridge: int = RIDGE,
) -> tuple[DraftLengthPolicy, list[DraftCandidate]]:
    """Return a policy with measured steps, one without drafts among them, and a candidate for each sequence."""
    policy = DraftLengthPolicy(ridge)
    for step in steps:
        policy.record_step(*step)
    candidates = [
        DraftCandidate(train(policy, acceptance), LOOKUP, size) for size, acceptance in sequences
    ]
    policy.record_step(num_decodes, 0, 0.02)
    return policy, candidates


@given(step_records, acceptances, st.integers(0, 20), st.integers(0, 30), st.integers(4, 300))
def test_lengths_are_within_all_bounds(
    steps: list[tuple[int, int, float]],
    sequences: list[tuple[int, float]],
    others: int,
    prefill_tokens: int,
    ridge: int,
) -> None:
    num_decodes = len(sequences) + others
    policy, candidates = create_measured(steps, sequences, num_decodes, ridge)
    for _ in range(FIRST_PROBE_WAIT + 2):
        lengths = policy.select_lengths(candidates, num_decodes, prefill_tokens)
        assert len(lengths) == len(candidates)
        for length, candidate in zip(lengths, candidates, strict=True):
            assert 0 <= length <= min(candidate.size, MAX_DRAFT_TOKENS)
        rows = num_decodes + prefill_tokens
        if sum(lengths):
            assert prefill_tokens < ridge
            assert rows + sum(lengths) <= MAX_RIDGES * ridge
            if others or 0 in lengths:
                cost = policy.step_cost(rows + sum(lengths)) / policy.step_cost(rows)
                assert cost <= MAX_SLOWDOWN * (1 + 1e-9)


@given(step_records, acceptances, st.integers(0, 20))
def test_drafts_never_lower_the_expected_rate(
    steps: list[tuple[int, int, float]], sequences: list[tuple[int, float]], others: int
) -> None:
    num_decodes = len(sequences) + others
    policy, candidates = create_measured(steps, sequences, num_decodes)
    lengths = policy.select_lengths(candidates, num_decodes)
    tokens = float(num_decodes)
    for length, candidate in zip(lengths, candidates, strict=True):
        chance = 1.0
        for _ in range(length):
            chance *= candidate.history.sources[LOOKUP].acceptance
            tokens += chance
    rate = tokens / policy.step_cost(num_decodes + sum(lengths))
    assert rate >= num_decodes / policy.step_cost(num_decodes)


@pytest.mark.parametrize(("size", "sequences"), [(1, 1), (16, 1), (5, 4)])
def test_a_sequence_whose_drafts_fail_probes_ever_more_rarely(size: int, sequences: int) -> None:
    policy = DraftLengthPolicy(RIDGE)
    histories = [DraftHistory() for _ in range(sequences)]
    drafted_by_period = []
    for steps in (100, 1000, 5000):
        drafted = 0
        for _ in range(steps):
            candidates = [DraftCandidate(history, LOOKUP, size) for history in histories]
            lengths = policy.select_lengths(candidates, sequences)
            for history, length in zip(histories, lengths, strict=True):
                policy.record_drafts(history, LOOKUP, length, 0)
                drafted += length
        drafted_by_period.append(drafted / sequences)
    assert drafted_by_period[1] <= 8
    assert drafted_by_period[2] <= 4


@pytest.mark.parametrize("sequences", [1, 4])
def test_a_failed_sequence_recovers_when_its_drafts_are_accepted(sequences: int) -> None:
    policy = DraftLengthPolicy(RIDGE)
    histories = [train(policy, 0.0) for _ in range(sequences)]
    lengths = [0] * sequences
    policy.record_step(sequences, 0, 0.02)
    for _ in range(400):
        candidates = [DraftCandidate(history, LOOKUP, 8) for history in histories]
        lengths = policy.select_lengths(candidates, sequences)
        for history, length in zip(histories, lengths, strict=True):
            policy.record_drafts(history, LOOKUP, length, length)
    assert min(lengths) >= 2


@pytest.mark.parametrize("num_decodes", [1, 2, 5, 20, 30, 33])
@pytest.mark.parametrize("slowdown", [1.1, 1.5])
def test_measured_durations_become_the_estimate(num_decodes: int, slowdown: float) -> None:
    policy = DraftLengthPolicy(RIDGE)
    for _ in range(400):
        policy.record_step(num_decodes, 0, 0.02)
        policy.record_step(num_decodes, 6, 0.02 * slowdown)
    estimate = policy.step_cost(num_decodes + 6) / policy.step_cost(num_decodes)
    assert abs(estimate - slowdown) < 0.35 * (slowdown - 1.0)


@pytest.mark.parametrize("acceptance", [0.0, 0.1])
@pytest.mark.parametrize("num_sequences", [1, 8, 32])
@pytest.mark.parametrize("pass_cost", [0.0, 0.4])
def test_text_that_defeats_its_drafter_is_hardly_slower(
    num_sequences: int, acceptance: float, pass_cost: float
) -> None:
    """Each sequence has drafts in every step, and each token adds a twentieth to the duration of a step.

    With a `pass_cost`, a draft model computes one draft of each sequence in as much of a step.
    """
    policy, rng = DraftLengthPolicy(RIDGE, 0.003 * pass_cost), random.Random(3)
    rates = []
    for _ in range(3):  # one batch after another, the first of which teaches the policy
        duration = plain = 0.0
        histories = [policy.create_history(b"domain") for _ in range(num_sequences)]
        for _ in range(130):
            candidates = [
                DraftCandidate(history, LOOKUP, 16, needs_passes=pass_cost > 0)
                for history in histories
            ]
            lengths = policy.select_lengths(candidates, num_sequences)
            tokens = num_sequences
            for history, length in zip(histories, lengths, strict=True):
                accepted = next((i for i in range(length) if rng.random() >= acceptance), length)
                policy.record_drafts(history, LOOKUP, length, accepted, needed_passes=pass_cost > 0)
                tokens += accepted
            plain_step = 0.95 + 0.05 * num_sequences
            step = plain_step + 0.05 * sum(lengths)
            policy.record_step(num_sequences, sum(lengths), 0.003 * step)
            duration += step + pass_cost * max(lengths)
            plain += plain_step * tokens / num_sequences
        rates.append(plain / duration)
    assert min(rates[1:]) > 0.985


def test_measured_durations_decide() -> None:
    for slowdown, is_worthwhile in ((1.01, True), (3.0, False)):
        policy = DraftLengthPolicy(RIDGE)
        history = train(policy, 0.5)
        for _ in range(100):
            policy.record_step(1, 0, 0.02)
            for drafts in (1, 3, 7, 15):
                policy.record_step(1, drafts, 0.02 * slowdown)
        lengths = policy.select_lengths([DraftCandidate(history, LOOKUP, 8)], 1)
        assert (lengths[0] > 0) == is_worthwhile


def test_passes_of_a_draft_model_must_pay() -> None:
    for pass_s, shortest, longest in ((0.0001, 8, 16), (0.005, 1, 7), (0.1, 0, 0)):
        policy = DraftLengthPolicy(RIDGE, pass_s)
        history = train(policy, 0.75)
        candidates = [DraftCandidate(history, LOOKUP, 16, needs_passes=True)]
        assert policy.select_lengths(candidates, 1) == [0], "no step was measured"
        for _ in range(100):
            policy.record_step(1, 0, 0.02)
            policy.record_passes(2, 2 * pass_s)
        assert shortest <= policy.select_lengths(candidates, 1)[0] <= longest


@given(step_records, acceptances, st.floats(-1.0, 3.0))
def test_steps_are_no_longer_than_their_sequences_may_lose(
    steps: list[tuple[int, int, float]], sequences: list[tuple[int, float]], max_loss: float
) -> None:
    policy, candidates = create_measured(steps, sequences, len(sequences))
    drafted = sum(policy.select_lengths(candidates, len(candidates), 0, max_loss))
    cost = policy.step_cost(len(candidates) + drafted) / policy.step_cost(len(candidates))
    assert drafted <= 1 or cost <= 1.0 + max_loss
    assert max_loss > 0 or not drafted


def test_durations_without_drafts_are_measured_first_and_again() -> None:
    """Nothing is drafted before it is known what it costs, nor for ever without comparing."""
    policy = DraftLengthPolicy(RIDGE)
    history = train(policy, 1.0)
    drafted = []
    for num_decodes in [*[4] * 200, 8, 8]:
        candidate = DraftCandidate(history, LOOKUP, 4)
        (length,) = policy.select_lengths([candidate], num_decodes)
        drafted.append(length)
        policy.record_step(num_decodes, length, 0.02)
        policy.record_drafts(history, LOOKUP, length, length)
    plain = [step for step, length in enumerate(drafted) if not length]
    assert plain == [0, 65, 130, 195, 200]
