"""Paged attention on the GPU: the KV cache, and the division of the work among programs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from argosy.engine.execution.architectures.architecture import AttentionParams
from argosy.engine.execution.kernels.attention import Attention, contiguous_heads
from argosy.engine.execution.kernels.batch import Batch, KvCacheShape
from argosy.engine.execution.kernels.gpu.attention_kernels import (
    RANGE_SIZE,
    attend,
    merge_ranges,
    store_kv,
)
from argosy.engine.execution.kernels.rope import RopeRotation

KV_FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
"""Largest number of e4m3. Larger keys and values are stored as this."""
STORE_TILE_ROWS = 16
"""Number of token heads that one program stores. Its 128 threads copy 16 bytes of a key and of a value at a time."""
MAX_HEAD_BYTES = 512
"""Maximum bytes of a head's padded row."""
MAX_SCRATCH_BYTES = 128 << 20
"""Maximum memory for unmerged sums of ranges. If they need more, each program processes all ranges of its rows."""


class TritonAttention(Attention):
    """Paged attention over [layers, num_blocks, kv_heads, block_size, head_dim] keys and values.

    A program takes a tile of neighbouring tokens of one sequence, with all query heads of one KV head, and processes
    their keys in tiles at absolute positions. The sums restart every RANGE_SIZE keys and are merged in order, by the
    same program, or by a second kernel if there are few programs. A row's result therefore depends only on its own
    sequence. See docs/decisions/0006-gpu-kernels.md.

    Captured graphs may have unused rows. A token with a negative slot is not stored. A token of a sequence with length
    0 attends to no key, and its result is undefined.
    """

    def __init__(
        self,
        shape: KvCacheShape,
        *,
        device: torch.device,
        num_multiprocessors: int,
        scales: Tensor | None = None,
    ) -> None:
        """Allocate the cache.

        Args:
            shape: Sizes of the KV cache. With dtype float8_e4m3fn, it needs half the memory of bfloat16.
            device: Device of the cache.
            num_multiprocessors: Number of multiprocessors of the device, all of which should be busy.
            scales: float32 [layers, 2, kv_heads], factors of a float8 cache's keys and values. None is 1.

        Raises:
            ValueError: The heads are too large for the kernels.
        """
        head_dim, dtype = shape.head_dim, shape.dtype
        if shape.value_dim is not None:
            raise ValueError(
                "there are no GPU kernels for multi-head latent attention (DeepSeek, Kimi); set device to cpu"
            )
        if _padded_head_dim(head_dim) * dtype.itemsize > MAX_HEAD_BYTES:
            raise ValueError(
                f"a head of {head_dim} in {dtype} does not fit into a GPU's shared memory; serve it in bfloat16"
            )
        sizes = (shape.num_layers, shape.num_blocks, shape.num_kv_heads, shape.block_size, head_dim)
        self._keys = torch.zeros(sizes, dtype=dtype, device=device)
        self._values = torch.zeros(sizes, dtype=dtype, device=device)
        super().__init__(self._keys, self._values)
        if scales is None:
            scales = torch.ones(shape.num_layers, 2, shape.num_kv_heads)
        self._scales = scales.to(device, torch.float32).contiguous()
        self._block_size = shape.block_size
        self._num_multiprocessors = num_multiprocessors
        self._float8 = dtype == KV_FLOAT8
        self.name = "triton, float8 cache" if self._float8 else "triton"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> Tensor:
        if v is None:
            raise TypeError("values are missing")
        q, k, v = contiguous_heads(q), contiguous_heads(k), contiguous_heads(v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if len(q):
            self._store(k, v, batch, params, rope)
            self._attend(q, out, batch, params, rope)
        return out

    def _store(
        self, k: Tensor, v: Tensor, batch: Batch, params: AttentionParams, rope: RopeRotation | None
    ) -> None:
        tokens, kv_heads, head_dim = k.shape
        store_kv[(triton.cdiv(tokens * kv_heads, STORE_TILE_ROWS),)](
            k,
            v,
            self._keys[params.layer],
            self._values[params.layer],
            batch.slot_mappings[params.group],
            *(rope or (k, k)),
            self._scales[params.layer],
            k.stride(0),
            v.stride(0),
            tokens,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            WIDTH=_padded_head_dim(head_dim),
            ROWS=STORE_TILE_ROWS,
            BLOCK=self._block_size,
            ROTARY=0 if rope is None else rope[0].shape[-1],
            FLOAT8=self._float8,
            MAX_VALUE=FLOAT8_MAX,
            num_warps=4,
        )

    def _attend(
        self,
        q: Tensor,
        out: Tensor,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> None:
        tokens, heads, head_dim = q.shape
        sequences, kv_heads = len(batch.seq_lens), self._keys.shape[2]
        single = tokens == sequences
        tile = _tile(
            heads // kv_heads, _padded_head_dim(head_dim) * q.element_size(), single=single
        )
        units = tokens if single else tokens // tile.tokens + sequences
        window = params.sliding_window or 0
        block_table = batch.block_tables[params.group]
        ranges = triton.cdiv(block_table.shape[1] * self._block_size, RANGE_SIZE)
        splits = self._num_splits(units * kv_heads, ranges, window, q.numel())
        scratch = _scratch(ranges if splits > 1 else 0, out)
        log2e = math.log2(math.e)
        shared = {
            "HEADS": heads,
            "GROUP": heads // kv_heads,
            "HEAD_DIM": head_dim,
            "WIDTH": _padded_head_dim(head_dim),
            "WINDOWED": window > 0,
            "SINKS": params.sinks is not None,
        }
        sinks = self._scales if params.sinks is None else params.sinks
        attend[(units, kv_heads, splits)](
            q,
            self._keys[params.layer],
            self._values[params.layer],
            out,
            *scratch,
            batch.query_start_loc,
            batch.seq_lens,
            block_table,
            *(rope or (q, q)),
            sinks,
            self._scales[params.layer],
            q.stride(0),
            block_table.stride(0),
            tokens,
            sequences,
            window,
            params.scale * log2e,
            (params.softcap or 0.0) * log2e,
            **shared,
            SINGLE=single,
            TOKENS=tile.tokens,
            ROWS=tile.rows,
            BLOCK=self._block_size,
            ROTARY=0 if rope is None else rope[0].shape[-1],
            SOFTCAP=params.softcap is not None,
            SINGLE_PROGRAM=splits == 1,
            PRECISION="tf32x3",  # for float32: three products with 22 bits in total
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            merge_ranges[(tokens, kv_heads)](
                out,
                *scratch,
                batch.positions,
                sinks,
                self._scales[params.layer],
                tokens,
                window,
                **shared,
                ROWS=triton.next_power_of_2(heads // kv_heads),
                num_warps=4,
            )

    def _num_splits(self, programs: int, ranges: int, window: int, numel: int) -> int:
        """Return how many programs share the ranges of a tile, so that every multiprocessor has four programs."""
        visible_ranges = min(ranges, triton.cdiv(window, RANGE_SIZE) + 1) if window else ranges
        if visible_ranges == 1 or 4 * ranges * numel > MAX_SCRATCH_BYTES:
            return 1
        return int(min(visible_ranges, triton.cdiv(4 * self._num_multiprocessors, programs)))


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows and tokens of one program of `attend`, and its numbers of warps and pipeline stages."""

    rows: int
    tokens: int
    warps: int
    stages: int


def _tile(group: int, head_bytes: int, *, single: bool) -> _Tile:
    """Return the tile for `group` query heads per KV head, and for one token per sequence (decode) or several.

    Hopper's matrix unit takes at least 64 rows. Decode, which waits for memory, is padded to 64, so that decode and
    prefill sum with the same instruction. 128 rows halve the cache reads of prefill. A head above 256 bytes leaves room
    for 64 rows only. Three stages keep about 64 KiB of keys and values in flight to a multiprocessor, twice what its
    share of the bandwidth needs.
    """
    min_rows = max(64, triton.next_power_of_2(group))
    if head_bytes > 256:
        return _Tile(min_rows, 1 if single else min_rows // group, warps=8, stages=2)
    rows = min_rows if single else max(128, min_rows)
    return _Tile(rows, 1 if single else rows // group, warps=rows // 16, stages=3)


def _scratch(ranges: int, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate sums, peaks and totals for each range and row. They are empty if `ranges` is 0."""
    sums = torch.empty((ranges, *out.shape), dtype=torch.float32, device=out.device)
    peaks, totals = torch.empty((2, *sums.shape[:3]), dtype=torch.float32, device=out.device)
    return sums, peaks, totals


def _padded_head_dim(head_dim: int) -> int:
    """Return the head dimension padded to the sizes of matrix instructions."""
    return int(max(16, triton.next_power_of_2(head_dim)))
