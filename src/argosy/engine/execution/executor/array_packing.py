"""Packing of small integer arrays into one buffer, so that a step's inputs reach the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ARRAY_ALIGNMENT_BYTES = 16
"""Alignment of every array, in bytes. Triton compiles kernels for the alignment of their arguments."""


class ArrayLayout(NamedTuple):
    """Lengths of the 64-bit and then the 32-bit arrays of a buffer. Equal layouts have equal offsets."""

    int64_lengths: tuple[int, ...]
    int32_lengths: tuple[int, ...]

    def word_offsets(self) -> list[int]:
        """Return the offset of each array, and the end of the last one, in 64-bit words."""
        words = ARRAY_ALIGNMENT_BYTES // 8
        offset, offsets = 0, [0]
        for length in self.int64_lengths:
            offset += (length + words - 1) // words * words
            offsets.append(offset)
        for length in self.int32_lengths:
            offset += (length + 2 * words - 1) // (2 * words) * words
            offsets.append(offset)
        return offsets


def pack_arrays(
    longs: Sequence[NDArray[Any]], ints: Sequence[NDArray[Any]]
) -> tuple[NDArray[np.int64], ArrayLayout]:
    """Pack `longs` as 64-bit and `ints` as 32-bit integers into one buffer, and return it with its layout."""
    layout = ArrayLayout(tuple(map(len, longs)), tuple(map(len, ints)))
    offsets = layout.word_offsets()
    buffer = np.zeros(offsets[-1], dtype=np.int64)
    for offset, array in zip(offsets, longs, strict=False):
        if len(array):
            buffer[offset : offset + len(array)] = array
    int32_view = buffer.view(np.int32)
    for offset, array in zip(offsets[len(longs) :], ints, strict=False):
        int32_view[2 * offset : 2 * offset + len(array)] = array
    return buffer, layout


def unpack_arrays(buffer: Tensor, layout: ArrayLayout) -> tuple[list[Tensor], list[Tensor]]:
    """Return the int64 arrays and the int32 arrays of a packed buffer, as views of it."""
    offsets = layout.word_offsets()
    int32_view = buffer.view(torch.int32)
    empty = buffer[:0]
    longs = [
        buffer[offset : offset + length] if length else empty
        for offset, length in zip(offsets, layout.int64_lengths, strict=False)
    ]
    int32_arrays = zip(offsets[len(layout.int64_lengths) :], layout.int32_lengths, strict=False)
    return longs, [int32_view[2 * offset : 2 * offset + length] for offset, length in int32_arrays]
