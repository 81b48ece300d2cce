"""Multi-head latent attention (DeepSeek-V2, 2024) on the GPU, over the compressed cache.

All query heads share one key: a rotated part, and the latent, which is also the value. A program takes a tile of rows,
which are up to 64 heads of a token, and up to PART_WIDTH elements of the value. Its sums and those of the ranges before
then fit into registers. A wider value has several programs, which all compute the same scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.engine.execution.architectures.architecture import AttentionParams
from argosy.engine.execution.kernels.attention import contiguous_heads
from argosy.engine.execution.kernels.batch import Batch, KvCacheShape
from argosy.engine.execution.kernels.gpu.attention import (
    MERGE_TILE_ELEMENTS,
    TritonAttention,
)
from argosy.engine.execution.kernels.gpu.attention_kernels import (
    RANGE_KEYS,
    RANGE_SIZE,
    _empty_sums,
    _load_record,
    _merge_sums,
    _normalize,
    merge_ranges,
)
from argosy.engine.execution.kernels.rope import RopeRotation

TILE_ROWS = 64
"""Rows of a program, which is the smallest number of Hopper's matrix unit."""
PART_WIDTH = 256
"""Maximum elements of the value in one program. Sums of the ranges before and of this one take 128 KiB of registers."""
LATENT_TILE_KEYS = 32
"""Number of keys of a tile. With 576 elements of bfloat16, queries and stages take 176 KiB of shared memory."""
MAX_KEY_BYTES = 1152
"""Maximum bytes of a key, which are 576 elements of bfloat16."""
STORE_TILE_ROWS = 4
"""Number of tokens that one program stores."""
RANGE_TILES = tl.constexpr(RANGE_SIZE // LATENT_TILE_KEYS)


@dataclass(frozen=True, slots=True)
class LatentTile:
    """Division of the heads and of the value among programs."""

    group: int
    """Heads of a program. They divide the heads."""
    tokens: int
    """Tokens of a program."""
    width: int
    """Elements of a latent, padded."""
    part_width: int
    """Elements of the value in one program."""
    parts: int
    """Programs that share the elements of a value."""

    @property
    def constants(self) -> dict[str, int]:
        """Return the constants of `attend_latents`."""
        return {
            "GROUP": self.group,
            "TOKENS": self.tokens,
            "ROWS": TILE_ROWS,
            "KEYS": LATENT_TILE_KEYS,
            "WIDTH": self.width,
            "PART_WIDTH": self.part_width,
            "PARTS": self.parts,
        }


class TritonLatentAttention(TritonAttention):
    """Paged attention over [layers, num_blocks, 1, block_size, head_dim] keys, whose last elements are the values.

    The work is divided among programs, and ranges are merged, as in `TritonAttention`.
    """

    def __init__(
        self, shape: KvCacheShape, *, device: torch.device, num_multiprocessors: int
    ) -> None:
        if shape.value_dim is None or shape.num_kv_heads != 1:
            raise ValueError("latent attention has one KV head, which is also its value")
        if shape.dtype.itemsize == 1:
            raise ValueError(
                "there are no GPU kernels for latent attention (DeepSeek, Kimi, GLM-4.7-Flash) with a KV cache of "
                "bytes; set kv_dtype to auto"
            )
        if shape.head_dim * shape.dtype.itemsize > MAX_KEY_BYTES:
            raise ValueError(
                f"a latent of {shape.head_dim} in {shape.dtype} does not fit into a GPU's shared memory; "
                "serve it in bfloat16"
            )
        super().__init__(shape, device=device, num_multiprocessors=num_multiprocessors)
        self._value_dim = shape.value_dim
        self._tile = latent_tile(shape.num_heads, shape.value_dim)
        self._programs_per_item = shape.num_heads // self._tile.group * self._tile.parts
        self._ones = torch.ones(2 * shape.num_heads, device=device)
        self.name += ", latent"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> Tensor:
        if v is not None or params.sliding_window or params.softcap or params.sinks is not None:
            raise NotImplementedError(
                "latent attention on a GPU has no window, softcap, sinks and values of its own"
            )
        q, k = contiguous_heads(q), contiguous_heads(k)
        out = torch.empty(*q.shape[:2], self._value_dim, dtype=q.dtype, device=q.device)
        if len(q):
            self._store_latents(k, batch, params, rope)
            self._attend_latents(q, out, batch, params, rope)
        return out

    def _store_latents(
        self, k: Tensor, batch: Batch, params: AttentionParams, rope: RopeRotation | None
    ) -> None:
        tokens, _, head_dim = k.shape
        store_latents[(triton.cdiv(tokens, STORE_TILE_ROWS),)](
            k,
            self._keys[params.layer],
            batch.slot_mappings[params.group],
            *(rope or (k, k)),
            k.stride(0),
            tokens,
            HEAD_DIM=head_dim,
            WIDTH=triton.next_power_of_2(head_dim),
            ROWS=STORE_TILE_ROWS,
            ROTARY=0 if rope is None else rope[0].shape[-1],
            num_warps=4,
        )

    def _attend_latents(
        self,
        q: Tensor,
        out: Tensor,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> None:
        tokens, heads, head_dim = q.shape
        tile, rope_dim = self._tile, head_dim - self._value_dim
        work = self._list_work(batch, tile.tokens, 0, heads, self._value_dim)
        block_table = batch.block_tables[params.group]
        sums = torch.empty(
            (work.scratch_rows, heads, self._value_dim), dtype=torch.float32, device=q.device
        )
        peaks, totals = torch.empty((2, *sums.shape[:2]), dtype=torch.float32, device=q.device)
        attend_latents[(work.max_items * self._programs_per_item,)](
            q,
            self._keys[params.layer],
            out,
            sums,
            peaks,
            totals,
            work.records,
            batch.query_start_loc,
            batch.seq_lens,
            block_table,
            *(rope or (q, q)),
            q.stride(0),
            block_table.stride(0),
            params.scale * math.log2(math.e),
            HEADS=heads,
            ROPE_DIM=rope_dim,
            ROPE_WIDTH=max(16, triton.next_power_of_2(rope_dim)),
            VALUE_DIM=self._value_dim,
            BLOCK=self._block_size,
            ROTARY=0 if rope is None else rope[0].shape[-1],
            PRECISION="tf32x3",  # for float32: three products with 22 bits in total
            **tile.constants,
            num_warps=8,
            num_stages=3,
        )
        if not work.max_merges:
            return
        rows = max(1, MERGE_TILE_ELEMENTS // tile.width)
        max_tokens = 1 if tokens == len(batch.seq_lens) else tile.tokens
        row_tiles = triton.cdiv(max_tokens * tile.group, rows)
        merge_ranges[(work.max_merges * row_tiles, heads // tile.group)](
            out,
            sums,
            peaks,
            totals,
            work.records,
            batch.query_start_loc,
            self._ones,
            self._ones,
            1 + work.max_items,
            row_tiles,
            HEADS=heads,
            GROUP=tile.group,
            HEAD_DIM=self._value_dim,
            WIDTH=tile.width,
            TOKENS=tile.tokens,
            SINKS=False,
            ROWS=rows,
            num_warps=4,
        )


def latent_tile(heads: int, value_dim: int) -> LatentTile:
    """Return the tile for a number of heads and of elements of a value.

    Decode and prefill have the same one, and so sum alike.
    """
    group = next(size for size in range(min(heads, TILE_ROWS), 0, -1) if heads % size == 0)
    width = int(max(16, triton.next_power_of_2(value_dim)))
    part_width = min(width, PART_WIDTH)
    return LatentTile(
        group, TILE_ROWS // group, width, part_width, triton.cdiv(value_dim, part_width)
    )


@triton.jit(do_not_specialize=["tokens"])
def store_latents(
    k,
    keys,
    slot_mapping,
    cos,
    sin,
    k_stride,
    tokens,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """Store the rotated keys of ROWS tokens in the cache."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, WIDTH)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1)
    mask = (slot >= 0)[:, None] & (col < HEAD_DIM)[None, :]
    key = _load_and_rotate(k, token * k_stride, token, col, mask, cos, sin, ROTARY)
    offset = slot[:, None] * HEAD_DIM + col[None, :]
    tl.store(keys + offset, key.to(keys.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["block_table_stride"])
def attend_latents(
    q,
    keys,
    out,
    sums,
    peaks,
    totals,
    work,
    query_start_loc,
    seq_lens,
    block_table,
    cos,
    sin,
    q_stride,
    block_table_stride,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PART_WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend GROUP heads of the tokens of one item of the work list to the item's ranges, for a part of the value.

    `scale` includes the factor log2(e). The programs of an item are neighbours, so that its keys are in the cache of
    the GPU for all but one. The last items, which attend to the most keys, start first.
    """
    program = tl.program_id(0)
    item = tl.load(work) - program // (HEADS // GROUP * PARTS)
    if item <= 0:
        return
    head_tile = program // PARTS % (HEADS // GROUP)
    sequence, begin, end, tokens, first, stop, scratch_row = _load_record(
        work, item, query_start_loc, TOKENS
    )
    head_dim: tl.constexpr = ROPE_DIM + VALUE_DIM
    length = tl.load(seq_lens + sequence)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    rope_col = tl.arange(0, ROPE_WIDTH)
    value_col = program % PARTS * PART_WIDTH + tl.arange(0, PART_WIDTH)
    token = begin + row // GROUP
    head = head_tile * GROUP + row % GROUP
    row_mask = row < tokens * GROUP
    position = tl.where(row_mask, length - end + token, -1)
    origin = token.to(tl.int64) * q_stride + head * head_dim
    mask = row_mask[:, None] & (rope_col < ROPE_DIM)[None, :]
    rope_query = _load_and_rotate(q, origin, token, rope_col, mask, cos, sin, ROTARY)
    mask = row_mask[:, None] & (col < VALUE_DIM)[None, :]
    query = tl.load(q + ROPE_DIM + origin[:, None] + col[None, :], mask=mask, other=0.0)

    block_row = block_table + sequence.to(tl.int64) * block_table_stride
    first_tile = first * RANGE_TILES
    # The position after the tile's newest token is 0 or less if the sequence has length 0.
    stop_tile = (length - end + begin + tokens + KEYS - 1) // KEYS
    stop_tile = tl.minimum(stop_tile, stop * RANGE_TILES)
    value_mask = row_mask[:, None] & (value_col < VALUE_DIM)[None, :]
    acc, peak, total = _empty_sums(ROWS, PART_WIDTH)
    if scratch_row < 0:
        merged, merged_peak, merged_total = _empty_sums(ROWS, PART_WIDTH)
        for tile in range(first_tile, stop_tile):
            start = tile * KEYS
            if start % RANGE_KEYS == 0:
                merged, merged_peak, merged_total = _merge_sums(
                    merged, merged_peak, merged_total, acc, peak, total
                )
                acc, peak, total = _empty_sums(ROWS, PART_WIDTH)
            acc, peak, total = _attend_latent_tile(
                rope_query, query, acc, peak, total, start, position, length, block_row, keys, scale,
                rope_col, col, value_col, KEYS, ROPE_DIM, VALUE_DIM, BLOCK, PRECISION,
            )  # fmt: skip
        merged, merged_peak, merged_total = _merge_sums(
            merged, merged_peak, merged_total, acc, peak, total
        )
        offset = (token.to(tl.int64) * HEADS + head)[:, None] * VALUE_DIM + value_col[None, :]
        tl.store(out + offset, _normalize(merged, merged_total, 1.0, out), mask=value_mask)
    else:
        # Index of a row's sums in [rows, heads]. All parts of a value store the same peaks and totals.
        index = (scratch_row + row // GROUP).to(tl.int64) * HEADS + head
        while first_tile < stop_tile:
            acc, peak, total = _empty_sums(ROWS, PART_WIDTH)
            next_tile = (first_tile // RANGE_TILES + 1) * RANGE_TILES
            for tile in range(first_tile, tl.minimum(next_tile, stop_tile)):
                acc, peak, total = _attend_latent_tile(
                    rope_query, query, acc, peak, total, tile * KEYS, position, length, block_row, keys, scale,
                    rope_col, col, value_col, KEYS, ROPE_DIM, VALUE_DIM, BLOCK, PRECISION,
                )  # fmt: skip
            tl.store(sums + index[:, None] * VALUE_DIM + value_col[None, :], acc, mask=value_mask)
            tl.store(peaks + index, peak, mask=row_mask)
            tl.store(totals + index, total, mask=row_mask)
            index += tokens * HEADS
            first_tile = next_tile


@triton.jit
def _load_and_rotate(x, start, token, col, mask, cos, sin, ROTARY: tl.constexpr):
    """Load rows x[start + col], with the first ROTARY elements rotated in float32 and rounded once."""
    rows = tl.load(x + start[:, None] + col[None, :], mask=mask, other=0.0)
    if ROTARY > 0:
        partner = tl.where(col < ROTARY // 2, col + ROTARY // 2, col - ROTARY // 2)
        rotary_mask = mask & (col < ROTARY)[None, :]
        swapped = tl.load(x + start[:, None] + partner[None, :], mask=rotary_mask, other=0.0)
        offset = token.to(tl.int64)[:, None] * ROTARY + col[None, :]
        cosine = tl.load(cos + offset, mask=rotary_mask, other=1.0)
        sine = tl.load(sin + offset, mask=rotary_mask, other=0.0)
        rows = tl.fma(rows.to(tl.float32), cosine, swapped.to(tl.float32) * sine).to(rows.dtype)
    return rows


@triton.jit
def _attend_latent_tile(
    rope_query,
    query,
    acc,
    peak,
    total,
    start,
    position,
    length,
    block_row,
    keys,
    scale,
    rope_col,
    col,
    value_col,
    KEYS: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile of keys to the online softmax. A row that sees no key of the tile keeps its sums.

    Cache entries past the end of the sequence are read as zero. They may belong to another sequence, and may not be
    finite.
    """
    key = start + tl.arange(0, KEYS)
    key_mask = key < length
    block = tl.load(block_row + key // BLOCK, mask=key_mask, other=0).to(tl.int64)
    row = (block * BLOCK + key % BLOCK) * (ROPE_DIM + VALUE_DIM)
    mask = key_mask[None, :] & (rope_col < ROPE_DIM)[:, None]
    panel = tl.load(keys + row[None, :] + rope_col[:, None], mask=mask, other=0.0)
    scores = tl.dot(rope_query, panel, input_precision=PRECISION)
    mask = key_mask[None, :] & (col < VALUE_DIM)[:, None]
    panel = tl.load(keys + ROPE_DIM + row[None, :] + col[:, None], mask=mask, other=0.0)
    scores = tl.dot(query, panel, scores, input_precision=PRECISION) * scale
    scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(peak - base)
    mask = key_mask[:, None] & (value_col < VALUE_DIM)[None, :]
    panel = tl.load(keys + ROPE_DIM + row[:, None] + value_col[None, :], mask=mask, other=0.0)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(query.dtype), panel, acc, input_precision=PRECISION)
    return acc, new_peak, tl.fma(total, rescale, tl.sum(weights, axis=1))
