"""Random updates of one linear layer by adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from argosy.engine.execution.kernels.torch.lora import LinearUpdate, OutputRun


def draw_updates(
    generator: torch.Generator,
    dtype: torch.dtype,
    ranks: Sequence[int],
    cols: int,
    splits: Sequence[tuple[int, int]],
    outs: int,
) -> list[LinearUpdate]:
    """Draw an update of several runs of outputs, and one of the first run with a gain and an offset.

    Args:
        generator: Source of the numbers.
        dtype: Type of A and B.
        ranks: Ranks of each module. A run beyond them has the ranks of the first one again.
        cols: Inputs of the layer.
        splits: First output and number of outputs of each run.
        outs: Outputs of the layer.
    """

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    firsts = [sum(ranks[:number]) for number in range(len(ranks))]
    runs = tuple(
        OutputRun(first, firsts[i % len(ranks)], draw(size, ranks[i % len(ranks)]).to(dtype))
        for i, (first, size) in enumerate(splits)
    )
    a = (draw(sum(ranks), cols) / cols**0.5).to(dtype)
    return [
        LinearUpdate(a, runs),
        LinearUpdate(a, runs[:1], gain=1 + 0.1 * draw(outs), offset=draw(outs)),
    ]
