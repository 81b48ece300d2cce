"""Parameters of the attention of one layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Attention parameters of one layer."""

    layer: int
    """Index of the layer within a block."""
    scale: float
    sliding_window: int | None = None
    """Number of tokens that a token attends to, including itself. None is all tokens before it."""
    softcap: float | None = None
    """Soft cap of the scores, which become softcap * tanh(scores / softcap)."""
    sinks: Tensor | None = field(default=None, compare=False)
    """Attention sinks, float32 [heads]: scores of a key without value that every token attends to."""
    group: int = 0
    """KV cache group of the layer."""
