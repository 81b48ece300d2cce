"""Paged attention on the GPU: the KV cache, and the division of the work among programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from argosy.engine.execution.architectures.architecture import SCALE_BYTES, AttentionParams
from argosy.engine.execution.kernels.attention import Attention, contiguous_heads
from argosy.engine.execution.kernels.batch import Batch, KvCacheShape
from argosy.engine.execution.kernels.gpu.attention_kernels import (
    RANGE_SIZE,
    WORK_FIELDS,
    attend,
    list_work,
    merge_ranges,
    rotate_and_store,
)
from argosy.engine.execution.kernels.gpu.block_copies import copy_staged_blocks
from argosy.engine.execution.kernels.rope import RopeRotation

KV_FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
"""Largest number of e4m3. Larger keys and values are stored as this."""
ROTATE_TILE_ROWS = 16
"""Number of token heads that one program rotates. Its 128 threads copy 16 bytes of a key and of a value at a time."""
MAX_HEAD_BYTES = 512
"""Maximum bytes of a head's padded row."""
MAX_SCRATCH_BYTES = 128 << 20
"""Maximum memory for unmerged sums of ranges. If they need more, fewer tiles are divided among programs."""
PROGRAMS_PER_MULTIPROCESSOR = 4
"""Number of programs that a multiprocessor should have, so that it is busy until the last of them ends."""
SHORT_CHUNK_TOKENS = 16
"""Average tokens of a sequence up to which a step decodes or verifies drafts."""
MERGE_TILE_ELEMENTS = 1024
"""Number of elements that one program merges. Each of 128 threads has eight, and loads 16 bytes at a time."""
WORK_LANES = 256
"""Number of tiles that the work list is made of at a time."""


class TritonAttention(Attention):
    """Paged attention over [layers, num_blocks, kv_heads, block_size, head_dim] keys and values.

    A program takes a tile of neighbouring tokens of one sequence, with all query heads of one KV head, and processes
    their keys in tiles at absolute positions. The sums restart every RANGE_SIZE keys and are merged in order, by the
    same program, or by a second kernel if several programs share the ranges of a tile. A row's result therefore depends
    only on its own sequence. In each step, the device lists which programs process which ranges. See
    docs/decisions/0006-gpu-kernels.md.

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
            shape: Sizes of the KV cache. With dtype float8_e4m3fn, it needs half the memory of bfloat16. With int8, the
                rows of a block and head are followed by their float32 scales.
            device: Device of the cache.
            num_multiprocessors: Number of multiprocessors of the device, all of which should be busy.
            scales: float32 [layers, 2, kv_heads], factors of a float8 cache's keys and values. None is 1.

        Raises:
            ValueError: The heads are too large for the kernels.
        """
        head_dim, dtype = shape.head_dim, shape.dtype
        is_latent = shape.value_dim is not None
        if not is_latent and _padded_head_dim(head_dim) * dtype.itemsize > MAX_HEAD_BYTES:
            raise ValueError(
                f"a head of {head_dim} in {dtype} does not fit into a GPU's shared memory; serve it in bfloat16"
            )
        self._int8 = dtype == torch.int8
        if self._int8 and (shape.block_size * head_dim) % SCALE_BYTES:
            raise ValueError(
                f"int8 blocks of {shape.block_size} tokens leave their scales unaligned; choose block_size 16"
            )
        row_bytes = head_dim + SCALE_BYTES if self._int8 else head_dim
        sizes = (
            shape.num_layers,
            shape.num_blocks,
            shape.num_kv_heads,
            shape.block_size,
            row_bytes,
        )
        self._keys = torch.zeros(sizes, dtype=dtype, device=device)
        self._values = self._keys if is_latent else torch.zeros_like(self._keys)
        super().__init__(self._keys, None if is_latent else self._values)
        if scales is None:
            scales = torch.ones(shape.num_layers, 2, shape.num_kv_heads)
        self._scales = scales.to(device, torch.float32).contiguous()
        self._block_size = shape.block_size
        self._num_multiprocessors = num_multiprocessors
        self._programs_per_item = shape.num_kv_heads
        self._float8 = dtype == KV_FLOAT8
        self._listed_batch: Batch | None = None
        self._work_lists: dict[tuple[int, int], _WorkList] = {}
        """Work lists of `_listed_batch` by the tokens of a tile and the window."""
        self.name = "triton"
        if dtype.itemsize == 1:
            self.name += ", float8 cache" if self._float8 else ", int8 cache"

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
            self._attend(self._rotate_and_store(q, k, v, batch, params, rope), out, batch, params)
        return out

    def read_blocks(self, blocks: Tensor, out: Tensor) -> None:
        self._copy_staged(blocks, out, gather=True)

    def write_blocks(self, blocks: Tensor, data: Tensor) -> None:
        self._copy_staged(blocks, data, gather=False)

    def _copy_staged(self, blocks: Tensor, staged: Tensor, *, gather: bool) -> None:
        self._check_data(staged)
        offset = 0
        for part in self._parts:
            octets = part.view(torch.uint8).view(*part.shape[:2], -1)
            copy_staged_blocks(octets, blocks, staged, offset, gather=gather)
            offset += octets.shape[0] * octets.shape[2]

    def _rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> Tensor:
        """Store keys and values, and return the queries, all normalized and rotated as the layer needs it."""
        tokens, heads, head_dim = q.shape
        kv_heads, norm = k.shape[1], params.head_norm
        queries = (
            q
            if rope is None and norm is None
            else torch.empty_like(q, memory_format=torch.contiguous_format)
        )
        query_tiles = 0 if queries is q else -(-tokens * heads // ROTATE_TILE_ROWS)
        key_tiles = -(-tokens * kv_heads // ROTATE_TILE_ROWS)
        rotate_and_store[(query_tiles + key_tiles,)](
            q,
            k,
            v,
            queries,
            self._keys[params.layer],
            self._values[params.layer],
            batch.slot_mappings[params.group],
            *(rope or (k, k)),
            *((self._scales, self._scales) if norm is None else (norm.q_weight, norm.k_weight)),
            self._scales[params.layer],
            q.stride(0),
            k.stride(0),
            v.stride(0),
            tokens,
            query_tiles,
            0.0 if norm is None else norm.eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            WIDTH=_padded_head_dim(head_dim),
            ROWS=ROTATE_TILE_ROWS,
            BLOCK=self._block_size,
            ROTARY=0 if rope is None else rope[0].shape[-1],
            NORMED=norm is not None,
            ROUND_BEFORE_WEIGHT=norm is not None and norm.rounds_before_weight,
            FLOAT8=self._float8,
            MAX_VALUE=FLOAT8_MAX,
            INT8=self._int8,
            num_warps=4,
        )
        return queries

    def _attend(self, q: Tensor, out: Tensor, batch: Batch, params: AttentionParams) -> None:
        tokens, heads, head_dim = q.shape
        kv_heads = self._keys.shape[2]
        group, width = heads // kv_heads, _padded_head_dim(head_dim)
        is_short = tokens <= SHORT_CHUNK_TOKENS * len(batch.seq_lens)
        tile = _tile(group, width * q.element_size(), is_short=is_short)
        window = params.sliding_window or 0
        work = self._list_work(batch, tile.tokens, window, heads, head_dim)
        block_table = batch.block_tables[params.group]
        scratch = _allocate_scratch(work.scratch_rows, heads, head_dim, q.device)
        log2e = math.log2(math.e)
        shared = {
            "HEADS": heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "WIDTH": width,
            "TOKENS": tile.tokens,
            "SINKS": params.sinks is not None,
        }
        sinks = self._scales if params.sinks is None else params.sinks
        attend[(work.max_items, kv_heads)](
            q,
            self._keys[params.layer],
            self._values[params.layer],
            out,
            *scratch,
            work.records,
            batch.query_start_loc,
            batch.seq_lens,
            block_table,
            sinks,
            self._scales[params.layer],
            q.stride(0),
            block_table.stride(0),
            window,
            params.scale * log2e,
            (params.softcap or 0.0) * log2e,
            **shared,
            ROWS=tile.rows,
            BLOCK=self._block_size,
            WINDOWED=window > 0,
            SOFTCAP=params.softcap is not None,
            INT8=self._int8,
            PRECISION="tf32x3",  # for float32: three products with 22 bits in total
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if work.max_merges:
            rows = max(1, MERGE_TILE_ELEMENTS // width)
            max_tokens = 1 if tokens == len(batch.seq_lens) else tile.tokens
            row_tiles = -(-max_tokens * group // rows)
            merge_ranges[(work.max_merges * row_tiles, kv_heads)](
                out,
                *scratch,
                work.records,
                batch.query_start_loc,
                sinks,
                self._scales[params.layer],
                1 + work.max_items,
                row_tiles,
                **shared,
                ROWS=rows,
                num_warps=4,
            )

    def _list_work(
        self, batch: Batch, tile_tokens: int, window: int, heads: int, head_dim: int
    ) -> _WorkList:
        """Return the division of the batch's work, which all layers with the same window share.

        The device makes it from the lengths of the sequences. The host knows only the shapes of the batch, from which
        all sizes follow, so that a captured graph divides the work anew in each step.
        """
        if self._listed_batch is not batch:
            self._listed_batch, self._work_lists = batch, {}
        key = tile_tokens, window
        if key not in self._work_lists:
            self._work_lists[key] = self._create_work_list(
                batch, tile_tokens, window, heads, head_dim
            )
        return self._work_lists[key]

    def _create_work_list(
        self, batch: Batch, tile_tokens: int, window: int, heads: int, head_dim: int
    ) -> _WorkList:
        tokens, sequences = len(batch.positions), len(batch.seq_lens)
        tile_numbers = tokens // tile_tokens + sequences
        max_tiles = min(tokens, tile_numbers)
        ranges = -(-batch.block_tables.shape[2] * self._block_size // RANGE_SIZE)
        programs = PROGRAMS_PER_MULTIPROCESSOR * self._num_multiprocessors
        target = -(-programs // self._programs_per_item)
        # Every tile has a range, so no item has fewer than its share of them.
        min_grain = -(-max(sequences, -(-tokens // tile_tokens)) // target)
        max_items, max_merges, scratch_rows = max_tiles, 0, 0
        if ranges > min_grain and not 0 < window <= RANGE_SIZE:
            max_items += target
            max_merges = min(max_tiles, target)
            max_rows = MAX_SCRATCH_BYTES // (4 * heads * (head_dim + 2))
            scratch_rows = min(tokens * ranges, max_rows)
        records = torch.empty(
            (1 + max_items + max_merges, WORK_FIELDS),
            dtype=torch.int32,
            device=batch.seq_lens.device,
        )
        list_work[(1,)](
            records,
            batch.query_start_loc,
            batch.seq_lens,
            tile_numbers,
            sequences,
            window,
            target,
            scratch_rows,
            1 + max_items,
            TOKENS=tile_tokens,
            WINDOWED=window > 0,
            LANES=WORK_LANES,
            num_warps=4,
        )
        return _WorkList(records, max_items, max_merges, scratch_rows)


@dataclass(frozen=True, slots=True)
class _WorkList:
    """Division of the attention of a batch among programs, see `list_work`."""

    records: Tensor
    """int32 [1 + max_items + max_merges, WORK_FIELDS]."""
    max_items: int
    max_merges: int
    """Maximum number of tiles that several programs share. 0 if there cannot be any."""
    scratch_rows: int
    """Tokens times ranges whose sums wait for a merge."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows and tokens of one program of `attend`, and its numbers of warps and pipeline stages."""

    rows: int
    tokens: int
    warps: int
    stages: int


@cache
def _tile(group: int, head_bytes: int, *, is_short: bool) -> _Tile:
    """Return the tile for `group` query heads per KV head, and for short chunks of sequences (decode) or long ones.

    Hopper's matrix unit takes at least 64 rows. Decode, which waits for memory, is padded to 64, so that decode and
    prefill sum with the same instruction. Several tokens of a sequence, as in the verification of drafts, fill the same
    tile. 128 rows halve the cache reads of prefill. A head above 256 bytes leaves room for 64 rows only. Three stages
    keep about 64 KiB of keys and values in flight to a multiprocessor, twice what its share of the bandwidth needs.
    """
    min_rows = max(64, triton.next_power_of_2(group))
    if head_bytes > 256:
        return _Tile(min_rows, min_rows // group, warps=8, stages=2)
    rows = min_rows if is_short else max(128, min_rows)
    return _Tile(rows, rows // group, warps=rows // 16, stages=3)


def _allocate_scratch(
    rows: int, heads: int, head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate sums [rows, heads, head_dim], and peaks and totals [rows, heads], of ranges that wait for a merge."""
    sums = torch.empty((rows, heads, head_dim), dtype=torch.float32, device=device)
    peaks, totals = torch.empty((2, rows, heads), dtype=torch.float32, device=device)
    return sums, peaks, totals


@cache
def _padded_head_dim(head_dim: int) -> int:
    """Return the head dimension padded to the sizes of matrix instructions."""
    return int(max(16, triton.next_power_of_2(head_dim)))
