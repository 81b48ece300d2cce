"""Sampling on the GPU: exactly the tokens of torch's reference implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from argosy.engine.execution.kernels.gpu.device import create_cuda_device
from argosy.engine.execution.kernels.gpu.sampling import VOCAB_TILE
from argosy.engine.execution.kernels.torch.sampling_ops import (
    LOG2E,
    SamplingMetadata,
    TorchSamplingOps,
)
from tests.engine.gpu.device import DEVICE, INTERPRETED
from tests.engine.gpu.host_device import HostDevice
from tests.engine.pairwise import pairwise
from tests.engine.test_sampler import NEG_INF, random_wide_logits
from tests.engine.test_sampler import random_metadata as random_sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy replaces the GPU here
GPU = HostDevice() if INTERPRETED else create_cuda_device()
VOCABS = (1, 5, 160, VOCAB_TILE, 2 * VOCAB_TILE + 77)


def random_logits(rows: int, vocab: int, spread: float = 3.0) -> torch.Tensor:
    return random_wide_logits(rows + vocab, rows, vocab, spread, torch.float32)


def random_metadata(rows: int, vocab: int, scale: float | None = None) -> SamplingMetadata:
    """Return random combinations of all parameters, of which some have extreme random values."""
    rng = np.random.default_rng(rows)
    metadata = random_sampling(rows + vocab, rows, vocab)
    metadata.random_values[:] = rng.choice([*metadata.random_values, 0.0, 1 - 2**-53], rows)
    if scale is not None:
        metadata.logit_scale[:] = scale
    return metadata


def sample_on_gpu(logits: torch.Tensor, metadata: SamplingMetadata) -> list[int]:
    tokens = GPU.create_sampling_ops().sample(logits.to(DEVICE), metadata)
    assert tokens.dtype == torch.int64
    return [int(token) for token in tokens]


@pairwise(vocab=VOCABS, spread=[0.0, 0.3, 3.0, 60.0], dtype=[torch.float32, torch.bfloat16])
def test_sampling_matches_torch(vocab: int, spread: float, dtype: torch.dtype) -> None:
    logits = random_logits(12, vocab, spread).to(dtype)
    logits[3, 1:] = NEG_INF
    logits[4, : vocab // 2] = NEG_INF
    logits[5] = -0.0  # equal to 0, but not in its bits
    logits[5, ::3] = 0.0
    logits[6:9] = logits[6:9].round()  # ties at the cut, in several tiles
    metadata = random_metadata(12, vocab)
    assert sample_on_gpu(logits, metadata) == TorchSamplingOps().sample(logits, metadata).tolist()


CUTS = [(1, 1.0), (7, 1.0), (2999, 1.0), (3000, 0.0), (3000, 0.5), (50, 0.9), (2999, 0.999)]
"""Pairs of top-k and top-p."""


@pytest.mark.parametrize("top_k", [True, False])
@pytest.mark.parametrize("top_p", [True, False])
def test_every_set_of_cuts_matches_torch(top_k: bool, top_p: bool) -> None:
    """The number of passes depends on whether a row has both."""
    cuts = [(k, p) for k, p in CUTS if (k < 3000) <= top_k and (p < 1.0) <= top_p]
    logits, metadata = random_logits(len(cuts) + 1, 3000), random_metadata(len(cuts) + 1, 3000, 1.0)
    metadata.top_k[:], metadata.top_p[:] = zip(*cuts, (3000, 1.0), strict=True)
    assert sample_on_gpu(logits, metadata) == TorchSamplingOps().sample(logits, metadata).tolist()


def test_greedy_selects_first_of_equal_logits() -> None:
    vocab = 2 * VOCAB_TILE + 77
    logits = random_logits(4, vocab)
    logits[1] = 0.0
    logits[2, [5, VOCAB_TILE + 1]] = 99.0
    logits[3, -1] = 99.0
    tokens = sample_on_gpu(logits, random_metadata(4, vocab, scale=0.0))
    assert tokens == [int(logits[0].argmax()), 0, 5, vocab - 1]


@pytest.mark.parametrize(
    "value", [float("nan"), -float("nan"), float("inf")], ids=["nan", "-nan", "inf"]
)
def test_invalid_logits_give_no_token(value: float) -> None:
    logits = random_logits(6, VOCAB_TILE + 9)
    logits[1, -1], logits[2, 0], logits[4] = value, value, NEG_INF
    for scale in (LOG2E, 0.0):
        tokens = sample_on_gpu(logits, random_metadata(6, VOCAB_TILE + 9, scale))
        assert [token < 0 for token in tokens] == [False, True, True, False, True, False]


def test_batch_does_not_change_sampled_token() -> None:
    logits, metadata = random_logits(6, 300), random_metadata(6, 300)
    unbatched = [
        sample_on_gpu(logits[i : i + 1], metadata.select_rows(np.array([i])))[0] for i in range(6)
    ]
    assert unbatched == sample_on_gpu(logits, metadata)
    assert sample_on_gpu(logits[:0], metadata.select_rows(np.arange(0))) == []
