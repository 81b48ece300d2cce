"""Sampling operations: exact equality with a sorting reference, of native and torch, and of a row in any batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.engine.execution.kernels.cpu.native_kernels import load_kernels
from argosy.engine.execution.kernels.cpu.sampling_ops import (
    NativeSamplingOps,
    create_cpu_sampling_ops,
)
from argosy.engine.execution.kernels.torch.sampling_ops import (
    LOG2E,
    SamplingMetadata,
    SamplingOps,
    TorchSamplingOps,
    compute_weights,
)
from argosy.native import NativeUnavailableError

NEG_INF = float("-inf")


def native_ops(threads: int = 2) -> NativeSamplingOps:
    try:
        return NativeSamplingOps(load_kernels(), threads)
    except NativeUnavailableError:
        pytest.skip("no compiler")


def torch_and_native_ops() -> list[SamplingOps]:
    return [TorchSamplingOps(), native_ops()]


def random_logits(
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
    logits = random_logits(seed, 6, vocab, spread, dtype)
    logits[1, 1:] = NEG_INF
    metadata = random_metadata(seed, 6, vocab)
    expected = [sample_by_sorting(row, metadata, i) for i, row in enumerate(logits)]
    for ops in torch_and_native_ops():
        assert ops.sample(logits, metadata).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_native_matches_torch_for_large_vocabulary(spread: float, dtype: torch.dtype) -> None:
    logits = random_logits(3, 16, 40000, spread, dtype)
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
    logits = random_logits(7, 80, 3000, 3.0, torch.bfloat16)
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
    logits = random_logits(9, 6, 700, 1.0, torch.float32)
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
    logits = random_logits(seed, 4, vocab, 3.0, dtype)
    logit_rows = np.array([2, 0, 3])
    tokens = torch.tensor([0, vocab - 1, vocab // 2])
    counts = np.array([min(5, vocab), 0, min(20, vocab)])
    exact = torch.log_softmax(logits[torch.from_numpy(logit_rows)].double(), -1)
    for ops in torch_and_native_ops():
        result = ops.compute_logprobs(logits, logit_rows, tokens, counts)
        for i, row in enumerate(exact):
            assert result.token_logprobs[i] == pytest.approx(float(row[tokens[i]]), abs=2e-6)
            assert result.ranks[i] == int((row > row[tokens[i]]).sum()) + 1
            order = torch.sort(row, descending=True, stable=True).indices[: counts[i]].tolist()
            assert result.top_ids[i, : counts[i]].tolist() == order
            assert result.top_logprobs[i, : counts[i]] == pytest.approx(
                row[order].tolist(), abs=2e-6
            )


def test_missing_compiler_falls_back_to_torch() -> None:
    def fail_to_load() -> None:
        raise NativeUnavailableError("no compiler")

    assert isinstance(create_cpu_sampling_ops(1, fail_to_load), TorchSamplingOps)  # type: ignore[arg-type]
