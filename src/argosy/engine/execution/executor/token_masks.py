"""Masks of the rows of a step on the device, and their expansion from bits to numbers that are added to logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of M of the rows of logits."""

    index: NDArray[np.int64]
    """[M], ascending indices of the rows, in host memory."""
    words: Tensor
    """[M, W] int32, on the device. Bit i of the words, low bits first, is set if token i is allowed."""

    def expand(self, logits: Tensor) -> Tensor:
        """Return a tensor [M, V] with 0 for allowed tokens and -infinity for others, in the dtype of `logits` [S, V].

        Bits beyond the vocabulary are ignored.
        """
        octets = self.words.view(torch.uint8).flatten().to(torch.int32)
        expanded = _octet_table(logits.dtype, logits.device).index_select(0, octets)
        return expanded.view(len(self.words), -1)[:, : logits.shape[1]]


@lru_cache
def _octet_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the table [256, 8] of the numbers that the eight bits of an octet stand for."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    table = torch.zeros(256, 8).masked_fill_(torch.from_numpy(bits == 0), float("-inf"))
    return table.to(device, dtype)
