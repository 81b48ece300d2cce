"""The GPU's draw beside the sampler's: the same token from the same seed and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from argosy.engine.execution.gpu.sampling import VOCAB_TILE, draw
from argosy.engine.execution.randomness import uniform
from tests.engine.gpu.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy plays the GPU here
VOCABS = (1, 5, 160, VOCAB_TILE, 2 * VOCAB_TILE + 77)


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator) * 3


def run(
    logits: torch.Tensor, temperature: list[float], seeds: list[int], at: list[int]
) -> list[int]:
    words = torch.from_numpy(np.array(seeds, np.uint64).view(np.int64))
    arguments = (logits, torch.tensor(temperature), words, torch.tensor(at))
    tokens = draw(*(x.to(DEVICE) for x in arguments))
    assert tokens.dtype == torch.int64
    return [int(token) for token in tokens]


def inverted(logits: torch.Tensor, temperature: float, seed: int, at: int) -> int:
    """As sampler.py does it, in float64 all the way."""
    chances = (logits.double() / temperature).softmax(-1).cumsum(-1)
    number = uniform(np.array([seed], np.uint64), np.array([at]))[0]
    return int(torch.searchsorted(chances, number * chances[-1], right=True))


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_rows_take_the_likeliest(vocab: int) -> None:
    logits = drawn(4, vocab)
    logits[1] = 0.0  # of equals the lower id
    logits[2, : vocab // 2] = -torch.inf
    logits[3, -1] = 99.0
    wanted = logits.argmax(-1).tolist()
    wanted[1] = 0
    assert run(logits, [0.0] * 4, [1] * 4, [5] * 4) == wanted


@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_invert_the_distribution(vocab: int) -> None:
    rows = 12
    logits = drawn(rows, vocab)
    logits[3, 1:] = -torch.inf
    seeds = [0, 1, 2**63, 2**64 - 1, *range(100, 100 + rows - 4)]
    at = [0, 7, 2**31, 12345, *range(rows - 4)]
    temperature = [0.3 + row / 8 for row in range(rows)]
    wanted = [inverted(*row) for row in zip(logits, temperature, seeds, at, strict=True)]
    assert run(logits, temperature, seeds, at) == wanted


def test_a_token_that_may_not_come_never_does() -> None:
    logits = torch.full((40, VOCAB_TILE + 9), -torch.inf)
    logits[:, [3, VOCAB_TILE + 4]] = 0.0
    tokens = run(logits, [1.0] * 40, list(range(40)), [3] * 40)
    assert set(tokens) == {3, VOCAB_TILE + 4}


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = drawn(6, 300)
    whole = run(logits, [0.7] * 6, list(range(6)), list(range(6)))
    assert [run(logits[i : i + 1], [0.7], [i], [i])[0] for i in range(6)] == whole
    assert run(logits[:0], [], [], []) == []
