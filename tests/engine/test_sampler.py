"""Sampling: each parameter against its definition, native operations against torch's, and independence of rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.engine.execution.executor.sampler import Sampler, uniform_random
from argosy.engine.execution.kernels.cpu.native_kernels import load_kernels
from argosy.engine.execution.kernels.cpu.sampling_ops import (
    NativeSamplingOps,
    create_cpu_sampling_ops,
)
from argosy.engine.execution.kernels.torch.logit_edits import TorchLogitSampler
from argosy.engine.execution.kernels.torch.sampling_ops import (
    LOG2E,
    SamplingMetadata,
    SamplingOps,
    TorchSamplingOps,
    compute_weights,
)
from argosy.engine.scheduling import AdmittedSequence
from argosy.native import NativeUnavailableError
from argosy.protocol import SamplingParams

VOCAB = 40


def create_sampler(*params: SamplingParams, tokens: list[int] | None = None) -> Sampler:
    size = (len(params), VOCAB)
    sampler = Sampler(*size, TorchLogitSampler(create_cpu_sampling_ops(1), *size))
    tokens = tokens or [1, 2, 3]
    for row, row_params in enumerate(params):
        sampler.admit(AdmittedSequence(row, tokens, min(3, len(tokens)), row_params, []), [0])
    return sampler


def sample(sampler: Sampler, logits: torch.Tensor, position: int = 3) -> list[int]:
    rows = np.arange(len(logits))
    positions = np.full(len(logits), position)
    tokens, _ = sampler(logits.clone(), rows, positions)
    return list(tokens.tolist())


def random_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def sample_counts(
    params: SamplingParams, logits: torch.Tensor, samples: int = 4000
) -> Counter[int]:
    params_by_seed = [msgspec.structs.replace(params, seed=seed) for seed in range(samples)]
    return Counter(sample(create_sampler(*params_by_seed), logits.expand(samples, -1)))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=3), lambda p: p.topk(3).indices.tolist()),
        (SamplingParams(top_p=0.5), "nucleus"),
        (SamplingParams(min_p=0.2), lambda p: torch.nonzero(p >= 0.2 * p.max()).flatten().tolist()),
        (SamplingParams(temperature=0.5), lambda _: range(VOCAB)),
    ],
)
def test_samples_follow_restricted_distribution(params: SamplingParams, kept: object) -> None:
    logits = random_logits(1)
    probs = torch.softmax(logits[0] / params.temperature, -1)
    if kept == "nucleus":
        sorted_probs, order = probs.sort(descending=True)
        size = int((sorted_probs.cumsum(0) < params.top_p).sum()) + 1
        allowed = set(order[:size].tolist())
    else:
        allowed = set(kept(probs))  # type: ignore[operator]
    counts = sample_counts(params, logits)
    assert set(counts) <= allowed
    total = sum(float(probs[i]) for i in allowed)
    for token in allowed:
        share = float(probs[token]) / total
        slack = 5 * math.sqrt(share * (1 - share) / 4000) + 1e-3
        assert abs(counts[token] / 4000 - share) < slack


def test_sampled_token_depends_on_seed_and_position_only() -> None:
    logits = random_logits(2)
    params = SamplingParams(seed=7)
    unbatched = [sample(create_sampler(params), logits, position)[0] for position in range(30)]
    other = SamplingParams(seed=8, top_p=0.9, frequency_penalty=1.0)
    sampler = create_sampler(other, params, SamplingParams(temperature=0.0))
    batch = torch.cat([random_logits(3), logits, random_logits(4)])
    assert [sample(sampler, batch, position)[1] for position in range(30)] == unbatched
    assert len(set(unbatched)) > 3


def test_uniform_random_is_uniform_and_reproducible() -> None:
    seeds = np.array([0, 2**63 - 1, *range(1, 99)], np.uint64).repeat(100)
    positions = np.tile(np.arange(100), 100)
    values = uniform_random(seeds, positions)
    assert np.array_equal(values, uniform_random(seeds, positions))
    assert not np.any(values == uniform_random(seeds, positions + 1))
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert abs(values.mean() - 0.5) < 0.01
    assert counts.min() > 400


def test_penalties_count_prompt_and_output_tokens() -> None:
    tokens = [1, 2, 3, 4, 4]  # three prompt tokens and two output tokens
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
        assert sample(create_sampler(params, tokens=tokens), logits, 5) == [expected]


def test_sampled_tokens_count_for_penalties() -> None:
    sampler = create_sampler(SamplingParams(temperature=0.0, presence_penalty=1.5))
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 6]] = torch.tensor([2.0, 1.0])
    assert [sample(sampler, logits, position)[0] for position in (3, 4)] == [5, 6]


def test_logit_bias_allowed_tokens_and_min_tokens_edit_logits() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 0] = 5.0  # the end-of-sequence token
    logits[:, 7] = 4.0
    sampler = create_sampler(
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logit_bias={7: 2.0}),
        SamplingParams(temperature=0.0, allowed_token_ids=(11, 12), logit_bias={12: 1.0}),
        SamplingParams(temperature=0.0, min_tokens=2),
    )
    assert sample(sampler, logits, 3) == [0, 7, 12, 7]
    assert sample(sampler, logits, 5) == [0, 7, 12, 0]


def test_logprobs_use_unedited_logits() -> None:
    logits = random_logits(5, rows=2)
    sampler = create_sampler(
        SamplingParams(temperature=0.0, logprobs=3, logit_bias={4: 100.0}), SamplingParams(seed=1)
    )
    tokens, read_logprobs = sampler(logits.clone(), np.arange(2), np.array([3, 3]))
    logprobs = read_logprobs(tokens.tolist())
    raw = torch.log_softmax(logits[0], -1)
    assert list(logprobs) == [0]
    logprob = logprobs[0]
    assert logprob.token == 4
    assert logprob.logprob == pytest.approx(float(raw[4]))
    assert logprob.rank == int((raw > raw[4]).sum()) + 1
    assert [token for token, _ in logprob.top_logprobs] == raw.topk(3).indices.tolist()


def test_invalid_row_is_reported_and_others_are_sampled() -> None:
    logits = random_logits(6, rows=3)
    expected = logits.argmax(-1).tolist()
    logits[1, 3] = float("nan")
    sampler = create_sampler(*[SamplingParams(temperature=0.0)] * 3)
    tokens, _ = sampler(logits, np.arange(3), np.array([3, 3, 3]))
    assert tokens.tolist() == [expected[0], -1, expected[2]]


def test_reused_row_forgets_previous_params() -> None:
    sampler = create_sampler(
        SamplingParams(temperature=0.0, logit_bias={3: 9.0}, presence_penalty=2.0, logprobs=1)
    )
    sampler.admit(AdmittedSequence(0, [1], 1, SamplingParams(temperature=0.0), []), [0])
    logits = random_logits(8)
    sampled, read_logprobs = sampler(logits.clone(), np.array([0]), np.array([1]))
    assert sampled.tolist() == logits.argmax(-1).tolist()
    assert not read_logprobs(sampled.tolist())


EDITING_PARAMS = (
    SamplingParams(seed=1, logit_bias={4: 3.0, 2: -1.0}),
    SamplingParams(seed=2, allowed_token_ids=(5, 2, 9), logit_bias={5: 1.0}, min_tokens=4),
    SamplingParams(seed=3, repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=4),
    SamplingParams(seed=4, presence_penalty=0.4, logit_bias={1: 2.0, 3: 1.0}),
    SamplingParams(seed=5),
)
"""Parameters with every kind of logit edit, and without any."""


def test_logits_are_restored_bit_for_bit() -> None:
    logits = random_logits(9, rows=len(EDITING_PARAMS))
    logits[2, 1] = -0.0
    logits[3, 3] = math.nan
    before = logits.view(torch.int32).clone()
    tokens = [1, 2, 3, 3, 1]
    sampler = create_sampler(*EDITING_PARAMS, tokens=tokens)
    sampler(logits, np.arange(len(EDITING_PARAMS)), np.full(len(EDITING_PARAMS), len(tokens)))
    assert torch.equal(logits.view(torch.int32), before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("token", [0, 1, 4, 7])  # suppressed, penalised, biased, not allowed
def test_edits_do_not_hide_invalid_logits(value: float, token: int) -> None:
    logits = random_logits(10, rows=len(EDITING_PARAMS))
    logits[:, token] = value
    rows = np.arange(len(EDITING_PARAMS))
    sampled, _ = create_sampler(*EDITING_PARAMS)(logits, rows, np.full_like(rows, 3))
    assert sampled.tolist() == [-1] * len(rows)


NEG_INF = float("-inf")


def native_ops(threads: int = 2) -> NativeSamplingOps:
    try:
        return NativeSamplingOps(load_kernels(), threads)
    except NativeUnavailableError:
        pytest.skip("no compiler")


def torch_and_native_ops() -> list[SamplingOps]:
    return [TorchSamplingOps(), native_ops()]


def random_wide_logits(
    seed: int, rows: int, vocab: int, spread: float, dtype: torch.dtype
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)


def random_metadata(seed: int, rows: int, vocab: int) -> SamplingMetadata:
    """Return random combinations of greedy, temperature, top-k, top-p and min-p sampling."""
    rng = np.random.default_rng(seed)
    return SamplingMetadata(
        (LOG2E / rng.choice([0.01, 0.7, 1.0, 3.0, np.inf], rows)).astype(np.float32),
        rng.choice([1, 2, 50, vocab // 2 + 1, vocab, vocab], rows).clip(max=vocab),
        rng.choice([0.0, 1e-6, 0.5, 0.9, 0.999, 1.0, 1.0], rows).astype(np.float32),
        rng.choice([NEG_INF, NEG_INF, -3.0, 0.0], rows).astype(np.float32),
        rng.random(rows),
    )


def sample_by_sorting(row: torch.Tensor, metadata: SamplingMetadata, i: int) -> int:
    """Sample one row as `SamplingOps.sample` specifies, with sorted tokens."""
    values, vocab = row.float(), len(row)
    order = torch.sort(values, descending=True, stable=True).indices.tolist()
    if metadata.logit_scale[i] == 0:
        return int(order[0])
    exponents = (values - values.max()) * metadata.logit_scale[i]
    weights = compute_weights(exponents).tolist()
    head = order[: int(metadata.top_k[i])]
    limit = int(float(metadata.top_p[i]) * float(sum(weights[t] for t in head)))
    kept: list[int] = []
    before = 0
    for token in head:
        if kept and before >= limit:
            break
        kept.append(token)
        before += weights[token]
    allowed = {t for t in kept if float(exponents[t]) >= metadata.log2_min_p[i]}
    total = sum(weights[t] for t in allowed)
    target = min(int(float(metadata.random_values[i]) * float(total)), total - 1)
    for token in range(vocab):
        target -= weights[token] if token in allowed else 0
        if target < 0:
            return token
    raise AssertionError("target exceeds the total weight")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 5, 16, 40, 513, 1500]),
    spread=st.sampled_from([0.0, 0.1, 3.0, 60.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_sampling_matches_sorting_reference(
    seed: int, vocab: int, spread: float, dtype: torch.dtype
) -> None:
    logits = random_wide_logits(seed, 6, vocab, spread, dtype)
    logits[1, 1:] = NEG_INF
    metadata = random_metadata(seed, 6, vocab)
    expected = [sample_by_sorting(row, metadata, i) for i, row in enumerate(logits)]
    for ops in torch_and_native_ops():
        assert ops.sample(logits, metadata).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_native_matches_torch_for_large_vocabulary(spread: float, dtype: torch.dtype) -> None:
    logits = random_wide_logits(3, 16, 40000, spread, dtype)
    metadata = random_metadata(5, 16, 40000)
    torch_tokens, native_tokens = (
        ops.sample(logits, metadata).tolist() for ops in torch_and_native_ops()
    )
    assert native_tokens == torch_tokens


@pytest.mark.parametrize("create_ops", [TorchSamplingOps, native_ops])
def test_batch_and_threads_do_not_change_sampled_token(
    create_ops: Callable[[], SamplingOps],
) -> None:
    ops = create_ops()
    logits = random_wide_logits(7, 80, 3000, 3.0, torch.bfloat16)
    metadata = random_metadata(8, 80, 3000)
    batched = ops.sample(logits, metadata).tolist()
    unbatched = [
        ops.sample(logits[i : i + 1], metadata.select_rows(np.array([i])))[0].item()
        for i in range(80)
    ]
    assert batched == unbatched
    assert native_ops(threads=1).sample(logits, metadata).tolist() == batched


@pytest.mark.parametrize("create_ops", [TorchSamplingOps, native_ops])
@pytest.mark.parametrize(
    "value", [float("nan"), -float("nan"), float("inf")], ids=["nan", "-nan", "inf"]
)
def test_invalid_logits_give_no_token(create_ops: Callable[[], SamplingOps], value: float) -> None:
    ops = create_ops()
    logits = random_wide_logits(9, 6, 700, 1.0, torch.float32)
    logits[1, 699], logits[3] = value, NEG_INF
    tokens = ops.sample(logits, random_metadata(1, 6, 700))
    assert (tokens < 0).tolist() == [False, True, False, True, False, False]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 7, 600, 2000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_logprobs_match_log_softmax(seed: int, vocab: int, dtype: torch.dtype) -> None:
    logits = random_wide_logits(seed, 4, vocab, 3.0, dtype)
    rows = np.array([2, 0, 3])
    tokens = torch.tensor([vocab - 1, -1, 0, vocab // 2])
    counts = np.array([min(5, vocab), 0, min(20, vocab)])
    exact = torch.log_softmax(logits[torch.from_numpy(rows)].double(), -1)
    for ops in torch_and_native_ops():
        result = ops.launch_logprobs(logits, tokens, rows, counts)()
        assert result.tokens.tolist() == tokens[rows].tolist()
        for i, row in enumerate(exact):
            assert result.token_logprobs[i] == pytest.approx(float(row[result.tokens[i]]), abs=2e-6)
            assert result.ranks[i] == int((row > row[result.tokens[i]]).sum()) + 1
            order = torch.sort(row, descending=True, stable=True).indices[: counts[i]].tolist()
            assert result.top_ids[i, : counts[i]].tolist() == order
            assert result.top_logprobs[i, : counts[i]] == pytest.approx(
                row[order].tolist(), abs=2e-6
            )
