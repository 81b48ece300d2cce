"""Many small arrays of integers as one buffer: a step goes from host to device in one copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

ARRAY_ALIGNMENT_BYTES = 16
"""Bytes that every array begins at a multiple of: kernels are compiled for the alignment they see."""


class ArrayLayout(NamedTuple):
    """How many 64-bit and then 32-bit integers each array has; equal layouts have equal addresses."""

    int64_lengths: tuple[int, ...]
    int32_lengths: tuple[int, ...]

    def word_offsets(self) -> list[int]:
        """Where each array begins, and the end of the last, in 64-bit words."""
        words = ARRAY_ALIGNMENT_BYTES // 8
        at, found = 0, [0]
        for length in self.int64_lengths:
            at += (length + words - 1) // words * words
            found.append(at)
        for length in self.int32_lengths:
            at += (length + 2 * words - 1) // (2 * words) * words
            found.append(at)
        return found


def pack_arrays(
    longs: Sequence[NDArray[Any]], ints: Sequence[NDArray[Any]]
) -> tuple[NDArray[np.int64], ArrayLayout]:
    """One buffer with these arrays, the first as 64-bit and the second as 32-bit integers."""
    layout = ArrayLayout(tuple(map(len, longs)), tuple(map(len, ints)))
    starts = layout.word_offsets()
    buffer = np.zeros(starts[-1], dtype=np.int64)
    for at, array in zip(starts, longs, strict=False):
        if len(array):
            buffer[at : at + len(array)] = array
    halves = buffer.view(np.int32)
    for at, array in zip(starts[len(longs) :], ints, strict=False):
        halves[2 * at : 2 * at + len(array)] = array
    return buffer, layout


def unpack_arrays(buffer: Tensor, layout: ArrayLayout) -> tuple[list[Tensor], list[Tensor]]:
    """The arrays again, as views of the buffer (int64, and int32)."""
    starts = layout.word_offsets()
    halves = buffer.view(torch.int32)
    nothing = buffer[:0]
    longs = [
        buffer[at : at + n] if n else nothing
        for at, n in zip(starts, layout.int64_lengths, strict=False)
    ]
    rest = zip(starts[len(layout.int64_lengths) :], layout.int32_lengths, strict=False)
    return longs, [halves[2 * at : 2 * at + n] for at, n in rest]
