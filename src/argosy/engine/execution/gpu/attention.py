"""Paged attention on the GPU: a cache in blocks, and how the work on it is shared out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from argosy.engine.execution.gpu.attention_kernels import RANGE_SIZE, attend, merge_ranges, store_kv
from argosy.engine.execution.kv_cache_tensor import KvCacheTensor

if TYPE_CHECKING:
    from torch import Tensor

    from argosy.engine.execution.batch import AttentionParams, Batch, KvCacheShape
    from argosy.engine.execution.rope import RopeRotation

KV_FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
"""The largest number of e4m3; what is beyond it is stored as it."""
STORE_TILE_ROWS = 16
"""Heads of tokens that one program stores: 128 threads with 16 bytes of each of two at a time."""
MAX_HEAD_BYTES = 512
"""Most bytes of a head's row."""
MAX_SCRATCH_BYTES = 128 << 20
"""Most memory for ranges that await merging; beyond it each program does all ranges of its rows."""


class TritonAttention(KvCacheTensor):
    """Paged attention over [layers, num_blocks, kv_heads, block_size, head_dim] keys and values.

    A program takes a tile of neighbouring tokens of one sequence, with all query heads of one KV head,
    and walks their keys in tiles at absolute positions. Every RANGE keys the sums begin anew and are
    merged in order, by the same program or, where programs are few, by a second kernel. So a row's
    result depends on nothing but its own sequence. See docs/decisions/0006-gpu-kernels.md.

    A token whose slot is negative is not stored, and one of a sequence of length 0 sees nothing (its
    result means nothing either): a captured graph may carry rows that are not in use.
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

        A cache of float8_e4m3fn takes half of it. processors: of the device, to keep them all busy.
        scales: float32 [layers, 2, kv_heads], what a float8 cache's keys and values are multiplied by
        when read; 1 where None. Raises ValueError for heads that the kernels have no room for.
        """
        head_dim, dtype = shape.head_dim, shape.dtype
        if _padded_head_dim(head_dim) * dtype.itemsize > MAX_HEAD_BYTES:
            raise ValueError(
                f"a head of {head_dim} in {dtype} has no room on a GPU's processor; serve it in bfloat16"
            )
        sizes = (shape.num_layers, shape.num_blocks, shape.num_kv_heads, shape.block_size, head_dim)
        super().__init__(
            torch.zeros(sizes, dtype=dtype, device=device),
            torch.zeros(sizes, dtype=dtype, device=device),
        )
        if scales is None:
            scales = torch.ones(shape.num_layers, 2, shape.num_kv_heads)
        self._scales = scales.to(device, torch.float32).contiguous()
        self._block_size = shape.block_size
        self._num_multiprocessors = num_multiprocessors
        self._float8 = dtype == KV_FLOAT8

    @property
    def name(self) -> str:
        """What is in use, for the log."""
        return "triton, float8 cache" if self._float8 else "triton"

    def read_block(self, block: int) -> Tensor:
        """See `Attention`."""
        return super().read_block(block).cpu()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> Tensor:
        """See `Attention`."""
        q, k, v = _contiguous_heads(q), _contiguous_heads(k), _contiguous_heads(v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if len(q):
            self._store(k, v, batch, params, rope)
            self._attend(q, out, batch, params, rope)
        return out

    def _store(
        self, k: Tensor, v: Tensor, batch: Batch, spec: AttentionParams, rope: RopeRotation | None
    ) -> None:
        tokens, kv_heads, head_dim = k.shape
        store_kv[(triton.cdiv(tokens * kv_heads, STORE_TILE_ROWS),)](
            k,
            v,
            self.keys[spec.layer],
            self.values[spec.layer],
            batch.slot_mapping,
            *(rope or (k, k)),
            self._scales[spec.layer],
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
            MOST=FLOAT8_MAX,
            num_warps=4,
        )

    def _attend(
        self, q: Tensor, out: Tensor, batch: Batch, spec: AttentionParams, rope: RopeRotation | None
    ) -> None:
        tokens, heads, head_dim = q.shape
        sequences, kv_heads = len(batch.seq_lens), self.keys.shape[2]
        single = tokens == sequences
        tile = _tile(
            heads // kv_heads, _padded_head_dim(head_dim) * q.element_size(), single=single
        )
        units = tokens if single else tokens // tile.tokens + sequences
        window = spec.sliding_window or 0
        ranges = triton.cdiv(batch.block_table.shape[1] * self._block_size, RANGE_SIZE)
        hands = self._num_splits(units * kv_heads, ranges, window, q.numel())
        scratch = _scratch(ranges if hands > 1 else 0, out)
        log2e = math.log2(math.e)
        shared = {
            "HEADS": heads,
            "GROUP": heads // kv_heads,
            "HEAD_DIM": head_dim,
            "WIDTH": _padded_head_dim(head_dim),
            "WINDOWED": window > 0,
        }
        attend[(units, kv_heads, hands)](
            q,
            self.keys[spec.layer],
            self.values[spec.layer],
            out,
            *scratch,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            *(rope or (q, q)),
            self._scales[spec.layer],
            q.stride(0),
            batch.block_table.stride(0),
            tokens,
            sequences,
            window,
            spec.scale * log2e,
            (spec.softcap or 0.0) * log2e,
            **shared,
            SINGLE=single,
            TOKENS=tile.tokens,
            ROWS=tile.rows,
            BLOCK=self._block_size,
            ROTARY=0 if rope is None else rope[0].shape[-1],
            SOFTCAP=spec.softcap is not None,
            ALONE=hands == 1,
            PRECISION="tf32x3",  # of float32: three products that together carry 22 bits
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if hands > 1:
            merge_ranges[(tokens, kv_heads)](
                out,
                *scratch,
                batch.positions,
                self._scales[spec.layer],
                tokens,
                window,
                **shared,
                ROWS=triton.next_power_of_2(heads // kv_heads),
                num_warps=4,
            )

    def _num_splits(self, programs: int, ranges: int, window: int, numel: int) -> int:
        """How many programs share the ranges of a tile, so that every processor has four."""
        seen = min(ranges, triton.cdiv(window, RANGE_SIZE) + 1) if window else ranges
        if seen == 1 or 4 * ranges * numel > MAX_SCRATCH_BYTES:
            return 1
        return int(min(seen, triton.cdiv(4 * self._num_multiprocessors, programs)))


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one program of `attend` takes, and with how many warps and stages of its pipeline."""

    rows: int
    tokens: int
    warps: int
    stages: int


def _tile(group: int, head_bytes: int, *, single: bool) -> _Tile:
    """The tile for `group` query heads a KV head, one token a sequence (decode) or several.

    64 rows are the least that Hopper's matrix unit takes, and decode, which waits for memory, pads
    to them: the same instruction then sums for decode and for prefill. 128 rows halve what prefill
    reads of the cache. A head above 256 bytes leaves room for 64 rows only. Three stages keep about
    64 KiB of keys and values on their way to a processor, twice what its share of the bandwidth needs.
    """
    least = max(64, triton.next_power_of_2(group))
    if head_bytes > 256:
        return _Tile(least, 1 if single else least // group, warps=8, stages=2)
    rows = least if single else max(128, least)
    return _Tile(rows, 1 if single else rows // group, warps=rows // 16, stages=3)


def _scratch(ranges: int, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums, peaks and totals of each range and row; empty where they are not needed."""
    sums = torch.empty((ranges, *out.shape), dtype=torch.float32, device=out.device)
    peaks, totals = torch.empty((2, *sums.shape[:3]), dtype=torch.float32, device=out.device)
    return sums, peaks, totals


def _contiguous_heads(rows: Tensor) -> Tensor:
    """[T, heads, D] with each token's heads side by side; tokens may lie apart."""
    side_by_side = rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
    return rows if side_by_side else rows.contiguous()


def _padded_head_dim(head_dim: int) -> int:
    """The head dimension padded to what a matrix instruction takes."""
    return int(max(16, triton.next_power_of_2(head_dim)))
