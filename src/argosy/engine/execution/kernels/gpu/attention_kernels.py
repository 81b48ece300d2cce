"""Triton kernels of paged attention: store keys and values, attend, and merge ranges in order.

The kernels use online softmax (Milakov & Gimelshein 2018) and the tiling of FlashAttention (Dao et al. 2022). Programs
share ranges of keys as in Flash-Decoding (Dao et al. 2023), but at absolute positions. Two kernels that must compute
the same bits use explicit multiply-adds, because the compiler may or may not fuse a product and a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

RANGE_SIZE = 512
"""Number of keys between merges of the sums. It is small, so that one long sequence keeps many multiprocessors busy."""
KEY_TILE = tl.constexpr(64)
RANGE_KEYS = tl.constexpr(RANGE_SIZE)
RANGE_TILES = tl.constexpr(RANGE_SIZE // 64)
LOG2E = tl.constexpr(1.4426950408889634)


# Numbers that change from step to step are not specialized, because each value would compile a new kernel.
@triton.jit(do_not_specialize=["tokens"])
def store_kv(
    k,
    v,
    keys,
    values,
    slot_mapping,
    cos,
    sin,
    scales,
    k_stride,
    v_stride,
    tokens,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    FLOAT8: tl.constexpr,
    MAX_VALUE: tl.constexpr,
):
    """Store rotated keys, and values, of ROWS heads of one or more tokens in the cache."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // KV_HEADS).to(tl.int64)
    head = row % KV_HEADS
    col = tl.arange(0, WIDTH)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1)
    mask = (slot >= 0)[:, None] & (col < HEAD_DIM)[None, :]
    origin = token * k_stride + head * HEAD_DIM
    key = _load_rotated(k, origin, token, col, mask, cos, sin, ROTARY)
    offset = (token * v_stride + head * HEAD_DIM)[:, None] + col[None, :]
    value = tl.load(v + offset, mask=mask, other=0.0)
    if FLOAT8:
        key = key.to(tl.float32) / tl.load(scales + head)[:, None]
        value = value.to(tl.float32) / tl.load(scales + KV_HEADS + head)[:, None]
        key = tl.clamp(key, -MAX_VALUE, MAX_VALUE, propagate_nan=tl.PropagateNan.ALL)
        value = tl.clamp(value, -MAX_VALUE, MAX_VALUE, propagate_nan=tl.PropagateNan.ALL)
    offset = ((slot // BLOCK * KV_HEADS + head) * BLOCK + slot % BLOCK)[:, None] * HEAD_DIM
    offset += col[None, :]
    tl.store(keys + offset, key.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + offset, value.to(values.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["block_table_stride", "tokens", "sequences", "window"])
def attend(
    q,
    keys,
    values,
    out,
    sums,
    peaks,
    totals,
    query_start_loc,
    seq_lens,
    block_table,
    cos,
    sin,
    sinks,
    scales,
    q_stride,
    block_table_stride,
    tokens,
    sequences,
    window,
    scale,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SINGLE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SINGLE_PROGRAM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend TOKENS tokens and one KV head to all ranges (SINGLE_PROGRAM) or to every num_programs(2)-th range.

    `scale` and `softcap` include the factor log2(e). The last tiles, which attend to the most keys, start first.
    """
    unit = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence, begin, end = _locate_unit(unit, query_start_loc, sequences, SINGLE, TOKENS)
    if begin >= end:
        return
    length = tl.load(seq_lens + sequence)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    token = begin + row // GROUP
    row_mask = (row < TOKENS * GROUP) & (token < end)
    position = tl.where(row_mask, length - end + token, -1)
    # Index of a row's results in [T, heads], and the start of its query.
    out_row = token.to(tl.int64) * HEADS + kv_head * GROUP + row % GROUP
    origin = token.to(tl.int64) * q_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM
    mask = row_mask[:, None] & (col < HEAD_DIM)[None, :]
    query = _load_rotated(q, origin, token, col, mask, cos, sin, ROTARY)

    key_scale = tl.load(scales + kv_head) * scale
    value_scale = tl.load(scales + HEADS // GROUP + kv_head)
    block_row = block_table + sequence.to(tl.int64) * block_table_stride
    newest = length - end + tl.minimum(begin + TOKENS, end) - 1
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(length - end + begin - window + 1, 0)
    stop = (newest + KEY_TILE) // KEY_TILE  # newest is -1 if the sequence has length 0

    acc, peak, total = _empty_sums(ROWS, WIDTH)
    if SINGLE_PROGRAM:
        merged, merged_peak, merged_total = _empty_sums(ROWS, WIDTH)
        for tile in range(oldest // KEY_TILE, stop):
            start = tile * KEY_TILE
            if start % RANGE_KEYS == 0:
                merged, merged_peak, merged_total = _merge_sums(
                    merged, merged_peak, merged_total, acc, peak, total
                )
                acc, peak, total = _empty_sums(ROWS, WIDTH)
            acc, peak, total = _attend_tile(
                query, acc, peak, total, start, position, oldest, length, block_row, keys, values, kv_head,
                window, key_scale, softcap, col,
                HEADS // GROUP, HEAD_DIM, BLOCK, WINDOWED, SOFTCAP, PRECISION,
            )  # fmt: skip
        merged, merged_peak, merged_total = _merge_sums(
            merged, merged_peak, merged_total, acc, peak, total
        )
        if SINKS:
            merged_total = _add_sinks(
                sinks, kv_head * GROUP + row % GROUP, merged_peak, merged_total
            )
        offset = out_row[:, None] * HEAD_DIM + col[None, :]
        tl.store(out + offset, _normalize(merged, merged_total, value_scale, out), mask=mask)
    else:
        range_stop = (stop + RANGE_TILES - 1) // RANGE_TILES
        for index in range(oldest // RANGE_KEYS + tl.program_id(2), range_stop, tl.num_programs(2)):
            acc, peak, total = _empty_sums(ROWS, WIDTH)
            from_tile = tl.maximum(oldest // KEY_TILE, index * RANGE_TILES)
            for tile in range(from_tile, tl.minimum(stop, (index + 1) * RANGE_TILES)):
                start = tile * KEY_TILE
                acc, peak, total = _attend_tile(
                    query, acc, peak, total, start, position, oldest, length, block_row, keys, values, kv_head,
                    window, key_scale, softcap, col,
                    HEADS // GROUP, HEAD_DIM, BLOCK, WINDOWED, SOFTCAP, PRECISION,
                )  # fmt: skip
            range_row = index * tokens * HEADS + out_row
            tl.store(sums + range_row[:, None] * HEAD_DIM + col[None, :], acc, mask=mask)
            tl.store(peaks + range_row, peak, mask=row_mask)
            tl.store(totals + range_row, total, mask=row_mask)


@triton.jit(do_not_specialize=["tokens", "window"])
def merge_ranges(
    out,
    sums,
    peaks,
    totals,
    positions,
    sinks,
    scales,
    tokens,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the sums of `attend` in order, for the ranges that one token attends to and one KV head."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    position = tl.load(positions + token).to(tl.int32)
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(position - window + 1, 0)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    row_mask = row < GROUP
    mask = row_mask[:, None] & (col < HEAD_DIM)[None, :]
    out_row = token * HEADS + kv_head * GROUP + row
    merged, merged_peak, merged_total = _empty_sums(ROWS, WIDTH)
    # The loop is unrolled so that the loads of the next ranges do not wait for the sums of this one.
    for index in tl.range(oldest // RANGE_KEYS, position // RANGE_KEYS + 1, loop_unroll_factor=4):
        range_row = index * tokens * HEADS + out_row
        acc = tl.load(sums + range_row[:, None] * HEAD_DIM + col[None, :], mask=mask, other=0.0)
        peak = tl.load(peaks + range_row, mask=row_mask, other=0.0)
        total = tl.load(totals + range_row, mask=row_mask, other=1.0)
        merged, merged_peak, merged_total = _merge_sums(
            merged, merged_peak, merged_total, acc, peak, total
        )
    if SINKS:
        merged_total = _add_sinks(sinks, kv_head * GROUP + row % GROUP, merged_peak, merged_total)
    value_scale = tl.load(scales + HEADS // GROUP + kv_head)
    offset = out_row[:, None] * HEAD_DIM + col[None, :]
    tl.store(out + offset, _normalize(merged, merged_total, value_scale, out), mask=mask)


@triton.jit
def _locate_unit(unit, query_start_loc, sequences, SINGLE: tl.constexpr, TOKENS: tl.constexpr):
    """Return the sequence of a unit of TOKENS flat tokens, the unit's first token, and the sequence's end.

    Units of sequence i start at number query_start_loc[i] // TOKENS + i. Every sequence thereby has enough units, and
    tiles need not be counted. A unit without tokens begins at or after the end.
    """
    if SINGLE:
        sequence = unit
        begin = unit
        end = unit + 1
    else:
        sequence = unit * 0
        upper = sequences
        while upper - sequence > 1:
            middle = (sequence + upper) // 2
            is_below = tl.load(query_start_loc + middle) // TOKENS + middle <= unit
            sequence = tl.where(is_below, middle, sequence)
            upper = tl.where(is_below, upper, middle)
        first = tl.load(query_start_loc + sequence)
        begin = first + (unit - first // TOKENS - sequence) * TOKENS
        end = tl.load(query_start_loc + sequence + 1)
    return sequence, begin, end


@triton.jit
def _load_rotated(x, start, token, col, mask, cos, sin, ROTARY: tl.constexpr):
    """Load rows x[start + col], with the first ROTARY elements rotated in float32 and rounded once."""
    rows = tl.load(x + start[:, None] + col[None, :], mask=mask, other=0.0)
    if ROTARY > 0:
        partner = tl.where(col < ROTARY // 2, col + ROTARY // 2, col - ROTARY // 2)
        rotary_mask = mask & (col < ROTARY)[None, :]
        swapped = tl.load(x + start[:, None] + partner[None, :], mask=rotary_mask, other=0.0)
        offset = token.to(tl.int64)[:, None] * ROTARY + col[None, :]
        cosine = tl.load(cos + offset, mask=rotary_mask, other=1.0)
        sine = tl.load(sin + offset, mask=rotary_mask, other=0.0)
        result = tl.fma(rows.to(tl.float32), cosine, swapped.to(tl.float32) * sine)
        rows = result.to(rows.dtype)
    return rows


@triton.jit
def _empty_sums(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sums, peaks and totals of no keys."""
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    return acc, peak, total


@triton.jit
def _attend_tile(
    query,
    acc,
    peak,
    total,
    start,
    position,
    oldest,
    length,
    block_row,
    keys,
    values,
    kv_head,
    window,
    scale,
    softcap,
    col,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile of keys to the online softmax. A row that sees no key of the tile keeps its sums.

    Cache entries before position `oldest` and past the end of the sequence are read as zero. They may belong to another
    sequence, and may not be finite.
    """
    key = start + tl.arange(0, KEY_TILE)
    key_mask = key < length
    if WINDOWED:
        key_mask &= key >= oldest
    block = tl.load(block_row + key // BLOCK, mask=key_mask, other=0).to(tl.int64)
    row = (block * KV_HEADS + kv_head) * BLOCK + key % BLOCK
    col_mask = col < HEAD_DIM
    mask = key_mask[None, :] & col_mask[:, None]
    panel = tl.load(keys + row[None, :] * HEAD_DIM + col[:, None], mask=mask, other=0.0)
    scores = tl.dot(query, panel.to(query.dtype), input_precision=PRECISION) * scale
    if SOFTCAP:
        # softcap * tanh(x / softcap), where tanh(u) is 1 - 2 / (exp(2 u) + 1)
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / softcap)) + 1.0))
    visible = key[None, :] <= position[:, None]
    if WINDOWED:
        visible &= key[None, :] > position[:, None] - window
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(peak - base)
    mask = key_mask[:, None] & col_mask[None, :]
    panel = tl.load(values + row[:, None] * HEAD_DIM + col[None, :], mask=mask, other=0.0)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(query.dtype), panel.to(query.dtype), acc, input_precision=PRECISION)
    return acc, new_peak, tl.fma(total, rescale, tl.sum(weights, axis=1))


@triton.jit
def _merge_sums(acc, peak, total, next_acc, next_peak, next_total):
    """Merge the sums of the next range. A range without visible keys adds exactly zero."""
    new_peak = tl.maximum(peak, next_peak)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    old = tl.exp2(peak - base)
    new = tl.exp2(next_peak - base)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), next_acc * new[:, None])
    return acc, new_peak, tl.fma(total, old, next_total * new)


@triton.jit
def _add_sinks(sinks, head, peak, total):
    """Return the totals plus the weights of the heads' attention sinks."""
    base = tl.where(peak == float("-inf"), 0.0, peak)
    sink = tl.load(sinks + head)
    return total + tl.exp2(tl.fma(sink, tl.full(sink.shape, LOG2E, tl.float32), -base))


@triton.jit
def _normalize(acc, total, scale, out):
    """Return the weighted mean of the values. Adding zero turns -0, which masked keys may cause, into 0."""
    safe = tl.where(total == 0.0, 1.0, total)
    return ((acc / safe[:, None]) * scale + 0.0).to(out.dtype.element_ty)
