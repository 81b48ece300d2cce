"""Kernel that gathers KV blocks into a buffer, or scatters them from it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE_BYTES = 4096
"""Bytes that one program copies. Each of 128 threads has 32, in loads of 16 bytes if blocks are aligned."""


def copy_staged_blocks(
    part: Tensor, blocks: Tensor, staged: Tensor, offset: int, *, gather: bool
) -> None:
    """Copy blocks of a part of the cache into a buffer (`gather`), or back.

    Args:
        part: Keys or values, uint8 [layers, num_blocks, bytes], contiguous.
        blocks: Blocks, int64 [n].
        staged: Buffer, uint8 [n, bytes of a block], contiguous.
        offset: First byte of the part within a block of the buffer.
        gather: Whether to copy into the buffer.
    """
    layers, _, size = part.shape
    move_blocks[(len(blocks), layers, triton.cdiv(size, TILE_BYTES))](
        part,
        blocks,
        staged,
        part.stride(0),
        size,
        staged.stride(0),
        offset,
        GATHER=gather,
        TILE=TILE_BYTES,
        num_warps=4,
    )


@triton.jit
def move_blocks(
    cache,
    blocks,
    staged,
    layer_stride,
    block_stride,
    staged_stride,
    offset,
    GATHER: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy a tile of one layer of a block, whose layers lie one after the other in the buffer."""
    number = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    byte = tl.program_id(2) * TILE + tl.arange(0, TILE)
    mask = byte < block_stride
    block = tl.load(blocks + number)
    in_cache = cache + layer * layer_stride + block * block_stride + byte
    in_buffer = staged + number * staged_stride + offset + layer * block_stride + byte
    if GATHER:
        tl.store(in_buffer, tl.load(in_cache, mask=mask), mask=mask)
    else:
        tl.store(in_cache, tl.load(in_buffer, mask=mask), mask=mask)
