"""Sampling: each option against its plain definition, and rows that do not feel their neighbours."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.engine.execution.random_numbers import uniform_random
from argosy.engine.execution.sampler import Sampler
from argosy.engine.scheduling import AdmittedSequence
from argosy.protocol import SamplingParams

VOCAB = 40
CPU = torch.device("cpu")


def sampler_of(*params: SamplingParams, tokens: list[int] | None = None) -> Sampler:
    sampler = Sampler(len(params), VOCAB, CPU)
    known = tokens or [1, 2, 3]
    for row, one in enumerate(params):
        sampler.admit(AdmittedSequence(row, known, min(3, len(known)), one, []), [0])
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, position: int = 3) -> list[int]:
    rows = torch.arange(len(logits))
    positions = torch.full((len(logits),), position)
    return list(sampler(logits.clone(), rows, positions).tokens.tolist())


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def frequencies(params: SamplingParams, logits: torch.Tensor, draws: int = 4000) -> Counter[int]:
    many = [
        SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seed,
        )
        for seed in range(draws)
    ]
    return Counter(draw(sampler_of(*many), logits.expand(draws, -1)))


def test_greedy_takes_the_likeliest() -> None:
    logits = logits_of(0, rows=5)
    sampler = sampler_of(*[SamplingParams(temperature=0.0)] * 5)
    assert draw(sampler, logits) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=3), lambda p: p.topk(3).indices.tolist()),
        (SamplingParams(top_p=0.5), "nucleus"),
        (SamplingParams(min_p=0.2), lambda p: torch.nonzero(p >= 0.2 * p.max()).flatten().tolist()),
        (SamplingParams(temperature=0.5), lambda _: range(VOCAB)),
    ],
)
def test_draws_follow_the_restricted_distribution(params: SamplingParams, kept: object) -> None:
    logits = logits_of(1)
    probs = torch.softmax(logits[0] / params.temperature, -1)
    if kept == "nucleus":
        falling, order = probs.sort(descending=True)
        size = int((falling.cumsum(0) < params.top_p).sum()) + 1
        allowed = set(order[:size].tolist())
    else:
        allowed = set(kept(probs))  # type: ignore[operator]
    found = frequencies(params, logits)
    assert set(found) <= allowed
    total = sum(float(probs[i]) for i in allowed)
    for token in allowed:
        share = float(probs[token]) / total
        slack = 5 * math.sqrt(share * (1 - share) / 4000) + 1e-3
        assert abs(found[token] / 4000 - share) < slack


def test_the_draw_depends_on_seed_and_position_alone() -> None:
    logits = logits_of(2)
    one = SamplingParams(seed=7)
    alone = [draw(sampler_of(one), logits, position)[0] for position in range(30)]
    other = SamplingParams(seed=8, top_p=0.9, frequency_penalty=1.0)
    both = sampler_of(other, one, SamplingParams(temperature=0.0))
    crowd = torch.cat([logits_of(3), logits, logits_of(4)])
    assert [draw(both, crowd, position)[1] for position in range(30)] == alone
    assert len(set(alone)) > 3


@settings(max_examples=50)
@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_uniform_numbers(seed: int, position: int) -> None:
    seeds, positions = np.array([seed], np.uint64), np.array([position])
    value = uniform_random(seeds, positions)[0]
    assert 0.0 <= value < 1.0
    assert value == uniform_random(seeds, positions)[0]
    assert value != uniform_random(seeds, positions + 1)[0]


def test_uniform_numbers_are_uniform() -> None:
    values = uniform_random(
        np.arange(100, dtype=np.uint64).repeat(100), np.tile(np.arange(100), 100)
    )
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert abs(values.mean() - 0.5) < 0.01
    assert counts.min() > 400


def test_penalties_count_prompt_and_output_as_documented() -> None:
    tokens = [1, 2, 3, 4, 4]  # a prompt of three, an output of two
    logits = torch.zeros(1, VOCAB)
    logits[0, [1, 4, 9]] = torch.tensor([2.0, 2.0, 1.5])
    cases = [
        (SamplingParams(temperature=0.0), 1),
        (SamplingParams(temperature=0.0, repetition_penalty=2.0), 9),
        (SamplingParams(temperature=0.0, presence_penalty=1.0), 1),
        (SamplingParams(temperature=0.0, frequency_penalty=0.3, logit_bias={1: -1.0}), 9),
        (SamplingParams(temperature=0.0, frequency_penalty=0.2, logit_bias={1: -1.0}), 4),
    ]
    for params, expected in cases:
        assert draw(sampler_of(params, tokens=tokens), logits, 5) == [expected]


def test_sampled_tokens_are_counted() -> None:
    sampler = sampler_of(SamplingParams(temperature=0.0, presence_penalty=1.5))
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 6]] = torch.tensor([2.0, 1.0])
    assert [draw(sampler, logits, position)[0] for position in (3, 4)] == [5, 6]


def test_bias_allowed_tokens_and_min_tokens() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 0] = 5.0  # the end-of-sequence token
    logits[:, 7] = 4.0
    sampler = sampler_of(
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logit_bias={7: 2.0}),
        SamplingParams(temperature=0.0, allowed_token_ids=(11, 12), logit_bias={12: 1.0}),
        SamplingParams(temperature=0.0, min_tokens=2),
    )
    assert draw(sampler, logits, 3) == [0, 7, 12, 7]
    assert draw(sampler, logits, 5) == [0, 7, 12, 0]


def test_logprobs_are_those_of_the_untouched_logits() -> None:
    logits = logits_of(5, rows=2)
    sampler = sampler_of(
        SamplingParams(temperature=0.0, logprobs=3, logit_bias={4: 100.0}), SamplingParams(seed=1)
    )
    sampled = sampler(logits.clone(), torch.arange(2), torch.tensor([3, 3]))
    raw = torch.log_softmax(logits[0], -1)
    assert list(sampled.logprobs) == [0]
    found = sampled.logprobs[0]
    assert found.token == 4
    assert found.logprob == pytest.approx(float(raw[4]))
    assert found.rank == int((raw > raw[4]).sum()) + 1
    assert [token for token, _ in found.top_logprobs] == raw.topk(3).indices.tolist()


def test_a_row_without_valid_numbers_is_reported_and_the_others_go_on() -> None:
    logits = logits_of(6, rows=3)
    expected = logits.argmax(-1).tolist()
    logits[1, 3] = float("nan")
    sampler = sampler_of(*[SamplingParams(temperature=0.0)] * 3)
    sampled = sampler(logits, torch.arange(3), torch.tensor([3, 3, 3]))
    assert sampled.invalid_rows == [1]
    assert sampled.tokens[[0, 2]].tolist() == [expected[0], expected[2]]


def test_rows_are_reused_cleanly() -> None:
    sampler = sampler_of(
        SamplingParams(temperature=0.0, logit_bias={3: 9.0}, presence_penalty=2.0, logprobs=1)
    )
    sampler.admit(AdmittedSequence(0, [1], 1, SamplingParams(temperature=0.0), []), [0])
    logits = logits_of(8)
    sampled = sampler(logits.clone(), torch.tensor([0]), torch.tensor([1]))
    assert sampled.tokens.tolist() == logits.argmax(-1).tolist()
    assert not sampled.logprobs


EDITING = (
    SamplingParams(seed=1, logit_bias={4: 3.0, 2: -1.0}),
    SamplingParams(seed=2, allowed_token_ids=(5, 2, 9), logit_bias={5: 1.0}, min_tokens=4),
    SamplingParams(seed=3, repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=4),
    SamplingParams(seed=4, presence_penalty=0.4, logit_bias={1: 2.0, 3: 1.0}),
    SamplingParams(seed=5),
)
"""Every way in which a row may ask for other logits than the model's, and none."""


def test_logits_come_back_bit_for_bit() -> None:
    logits = logits_of(9, rows=len(EDITING))
    logits[2, 1] = -0.0
    logits[3, 3] = math.nan
    before = logits.view(torch.int32).clone()
    known = [1, 2, 3, 3, 1]
    sampler = sampler_of(*EDITING, tokens=known)
    sampler(logits, torch.arange(len(EDITING)), torch.full((len(EDITING),), len(known)))
    assert torch.equal(logits.view(torch.int32), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("token", [0, 1, 4, 7])  # barred, penalised, biased, not allowed
def test_no_edit_hides_what_is_not_sound(bad: float, token: int) -> None:
    logits = logits_of(10, rows=len(EDITING))
    logits[:, token] = bad
    rows = torch.arange(len(EDITING))
    sampled = sampler_of(*EDITING)(logits, rows, torch.full_like(rows, 3))
    assert sampled.invalid_rows == rows.tolist()
