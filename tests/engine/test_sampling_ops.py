"""The draw without a sort: against sorting, native against torch, and a row against the crowd; all with equality."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.engine.execution.native_kernels import load_kernels
from argosy.engine.execution.sampling_ops import (
    LOG2E,
    SamplingMetadata,
    SamplingOps,
    TorchSamplingOps,
    compute_weights,
)
from argosy.engine.execution.sampling_ops_cpu import NativeSamplingOps, create_cpu_sampling_ops
from argosy.native import NativeUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

OFF = float("-inf")


def native(threads: int = 2) -> NativeSamplingOps:
    try:
        return NativeSamplingOps(load_kernels(), threads)
    except NativeUnavailableError:
        pytest.skip("no compiler")


def both() -> list[SamplingOps]:
    return [TorchSamplingOps(), native()]


def logits_of(seed: int, rows: int, vocab: int, spread: float, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)


def draws_of(seed: int, rows: int, vocab: int) -> SamplingMetadata:
    """Every mixture of greedy, temperature, top-k, top-p and min-p."""
    rng = np.random.default_rng(seed)
    return SamplingMetadata(
        (LOG2E / rng.choice([0.01, 0.7, 1.0, 3.0, np.inf], rows)).astype(np.float32),
        rng.choice([1, 2, 50, vocab // 2 + 1, vocab, vocab], rows).clip(max=vocab),
        rng.choice([0.0, 1e-6, 0.5, 0.9, 0.999, 1.0, 1.0], rows).astype(np.float32),
        rng.choice([OFF, OFF, -3.0, 0.0], rows).astype(np.float32),
        rng.random(rows),
    )


def by_sorting(row: torch.Tensor, draws: SamplingMetadata, i: int) -> int:
    """What `DrawOps.draw` promises, of one row, in so many words."""
    values, vocab = row.float(), len(row)
    order = torch.sort(values, descending=True, stable=True).indices.tolist()
    if draws.logit_scale[i] == 0:
        return int(order[0])
    exponents = (values - values.max()) * draws.logit_scale[i]
    weights = compute_weights(exponents).tolist()
    head = order[: int(draws.top_k[i])]
    limit = int(float(draws.top_p[i]) * float(sum(weights[t] for t in head)))
    kept: list[int] = []
    before = 0
    for token in head:
        if kept and before >= limit:
            break
        kept.append(token)
        before += weights[token]
    left = {t for t in kept if float(exponents[t]) >= draws.log2_min_p[i]}
    total = sum(weights[t] for t in left)
    target = min(int(float(draws.random_values[i]) * float(total)), total - 1)
    for token in range(vocab):
        target -= weights[token] if token in left else 0
        if target < 0:
            return token
    raise AssertionError("the total was not reached")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 5, 16, 40, 513, 1500]),
    spread=st.sampled_from([0.0, 0.1, 3.0, 60.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_draws_are_those_of_sorting(
    seed: int, vocab: int, spread: float, dtype: torch.dtype
) -> None:
    logits = logits_of(seed, 6, vocab, spread, dtype)
    logits[1, 1:] = OFF
    draws = draws_of(seed, 6, vocab)
    expected = [by_sorting(row, draws, i) for i, row in enumerate(logits)]
    for ops in both():
        assert ops.sample(logits, draws).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_native_and_torch_draw_the_same_of_a_large_vocabulary(
    spread: float, dtype: torch.dtype
) -> None:
    logits = logits_of(3, 16, 40000, spread, dtype)
    draws = draws_of(5, 16, 40000)
    first, second = (ops.sample(logits, draws).tolist() for ops in both())
    assert first == second


@pytest.mark.parametrize("make", [TorchSamplingOps, native])
def test_a_draw_is_its_rows_own(make: Callable[[], SamplingOps]) -> None:
    ops = make()
    logits = logits_of(7, 80, 3000, 3.0, torch.bfloat16)
    draws = draws_of(8, 80, 3000)
    crowd = ops.sample(logits, draws).tolist()
    alone = [
        ops.sample(logits[i : i + 1], draws.select_rows(np.array([i])))[0].item() for i in range(80)
    ]
    assert crowd == alone
    assert native(threads=1).sample(logits, draws).tolist() == crowd


@pytest.mark.parametrize("make", [TorchSamplingOps, native])
@pytest.mark.parametrize(
    "bad", [float("nan"), -float("nan"), float("inf")], ids=["nan", "-nan", "inf"]
)
def test_rows_that_are_not_sound_give_no_token(make: Callable[[], SamplingOps], bad: float) -> None:
    ops = make()
    logits = logits_of(9, 6, 700, 1.0, torch.float32)
    logits[1, 699], logits[3] = bad, OFF
    tokens = ops.sample(logits, draws_of(1, 6, 700))
    assert (tokens < 0).tolist() == [False, True, False, True, False, False]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 7, 600, 2000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_probabilities_are_those_of_softmax(seed: int, vocab: int, dtype: torch.dtype) -> None:
    logits = logits_of(seed, 4, vocab, 3.0, dtype)
    which = np.array([2, 0, 3])
    tokens = torch.tensor([0, vocab - 1, vocab // 2])
    counts = np.array([min(5, vocab), 0, min(20, vocab)])
    exact = torch.log_softmax(logits[torch.from_numpy(which)].double(), -1)
    for ops in both():
        told = ops.compute_logprobs(logits, which, tokens, counts)
        for i, row in enumerate(exact):
            assert told.token_logprobs[i] == pytest.approx(float(row[tokens[i]]), abs=2e-6)
            assert told.ranks[i] == int((row > row[tokens[i]]).sum()) + 1
            order = torch.sort(row, descending=True, stable=True).indices[: counts[i]].tolist()
            assert told.top_ids[i, : counts[i]].tolist() == order
            assert told.top_logprobs[i, : counts[i]] == pytest.approx(row[order].tolist(), abs=2e-6)


def test_without_a_compiler_torch_draws() -> None:
    def none() -> None:
        raise NativeUnavailableError("no compiler")

    assert isinstance(create_cpu_sampling_ops(1, none), TorchSamplingOps)  # type: ignore[arg-type]
