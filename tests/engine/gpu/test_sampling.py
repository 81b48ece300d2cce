"""The GPU's draw beside torch's definition of it, with equality: the same tokens as on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from argosy.engine.execution.gpu.sampling import VOCAB_TILE, TritonSamplingOps
from argosy.engine.execution.sampling_ops import LOG2E, SamplingMetadata, TorchSamplingOps
from tests.engine.gpu.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy plays the GPU here
VOCABS = (1, 5, 160, VOCAB_TILE, 2 * VOCAB_TILE + 77)
OFF = float("-inf")


def logits_of(rows: int, vocab: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + vocab)
    return torch.randn(rows, vocab, generator=generator) * spread


def draws_of(
    rows: int, vocab: int, temperatures: tuple[float, ...] = (0.01, 0.7, 1.0, 3.0, np.inf)
) -> SamplingMetadata:
    """Temperature, min-p and (at infinite temperature) greedy rows, with neither top-k nor top-p."""
    rng = np.random.default_rng(rows + vocab)
    return SamplingMetadata(
        (LOG2E / rng.choice(temperatures, rows)).astype(np.float32),
        np.full(rows, vocab),
        np.ones(rows, np.float32),
        rng.choice([OFF, OFF, -3.0, 0.0], rows).astype(np.float32),
        rng.choice([*rng.random(rows), 0.0, 1 - 2**-53], rows),
    )


def drawn(logits: torch.Tensor, draws: SamplingMetadata) -> list[int]:
    tokens = TritonSamplingOps().sample(logits.to(DEVICE), draws)
    assert tokens.dtype == torch.int64
    return [int(token) for token in tokens]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 60.0])
@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_are_those_of_torch(vocab: int, spread: float, dtype: torch.dtype) -> None:
    logits = logits_of(16, vocab, spread).to(dtype)
    logits[3, 1:] = OFF
    logits[4, : vocab // 2] = OFF
    draws = draws_of(16, vocab)
    assert drawn(logits, draws) == TorchSamplingOps().sample(logits, draws).tolist()


def test_rows_with_top_k_and_top_p_draw_beside_the_others() -> None:
    logits, draws = logits_of(12, 3000), draws_of(12, 3000)
    draws.top_k[[1, 2, 8]] = [1, 50, 2999]
    draws.top_p[[2, 5, 9]] = [0.5, 0.9, 0.0]
    assert drawn(logits, draws) == TorchSamplingOps().sample(logits, draws).tolist()


def test_greedy_rows_take_the_first_of_the_likeliest() -> None:
    vocab = 2 * VOCAB_TILE + 77
    logits = logits_of(4, vocab)
    logits[1] = 0.0
    logits[2, [5, VOCAB_TILE + 1]] = 99.0
    logits[3, -1] = 99.0
    tokens = drawn(logits, draws_of(4, vocab, (np.inf,)))
    assert tokens == [int(logits[0].argmax()), 0, 5, vocab - 1]


@pytest.mark.parametrize(
    "bad", [float("nan"), -float("nan"), float("inf")], ids=["nan", "-nan", "inf"]
)
def test_rows_that_are_not_sound_give_no_token(bad: float) -> None:
    logits = logits_of(6, VOCAB_TILE + 9)
    logits[1, -1], logits[2, 0], logits[4] = bad, bad, OFF
    for temperatures in ((1.0,), (np.inf,)):
        tokens = drawn(logits, draws_of(6, VOCAB_TILE + 9, temperatures))
        assert [token < 0 for token in tokens] == [False, True, True, False, True, False]


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits, draws = logits_of(6, 300), draws_of(6, 300)
    alone = [drawn(logits[i : i + 1], draws.select_rows(np.array([i])))[0] for i in range(6)]
    assert alone == drawn(logits, draws)
    assert drawn(logits[:0], draws.select_rows(np.arange(0))) == []
