"""The kernels of paged attention: keys and values stored, rows attended, ranges merged in order.

Online softmax: Milakov & Gimelshein 2018; tiling as in FlashAttention (Dao et al. 2022); ranges of keys
shared by programs as in Flash-Decoding (Dao et al. 2023), but at absolute positions. Where two kernels
must give the same bits, the multiply-adds are written out: a compiler may fuse a product either way.
"""

from __future__ import annotations

import triton
import triton.language as tl

RANGE_SIZE = 512
"""Keys whose sums are made together: few, so that one long sequence keeps many processors busy."""
KEY_TILE = tl.constexpr(64)
RANGE_KEYS = tl.constexpr(RANGE_SIZE)
RANGE_TILES = tl.constexpr(RANGE_SIZE // 64)
LOG2E = tl.constexpr(1.4426950408889634)


# Numbers that change from step to step must not make new kernels.
@triton.jit(do_not_specialize=["tokens"])
def store_kv(
    k,
    v,
    keys,
    values,
    slots,
    first,
    second,
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
    MOST: tl.constexpr,
):
    """Put keys, rotated, and values of ROWS heads of one or more tokens into the cache."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // KV_HEADS).to(tl.int64)
    head = row % KV_HEADS
    col = tl.arange(0, WIDTH)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    held = (slot >= 0)[:, None] & (col < HEAD_DIM)[None, :]
    origin = token * k_stride + head * HEAD_DIM
    key = _load_rotated(k, origin, token, col, held, first, second, ROTARY)
    place = (token * v_stride + head * HEAD_DIM)[:, None] + col[None, :]
    value = tl.load(v + place, mask=held, other=0.0)
    if FLOAT8:
        key = key.to(tl.float32) / tl.load(scales + head)[:, None]
        value = value.to(tl.float32) / tl.load(scales + KV_HEADS + head)[:, None]
        key = tl.clamp(key, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
        value = tl.clamp(value, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    place = ((slot // BLOCK * KV_HEADS + head) * BLOCK + slot % BLOCK)[:, None] * HEAD_DIM
    place += col[None, :]
    tl.store(keys + place, key.to(keys.dtype.element_ty), mask=held)
    tl.store(values + place, value.to(values.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["page_stride", "tokens", "sequences", "window"])
def attend(
    q,
    keys,
    values,
    out,
    sums,
    peaks,
    totals,
    cu_q,
    seq_lens,
    page_table,
    first,
    second,
    scales,
    q_stride,
    page_stride,
    tokens,
    sequences,
    window,
    scale,
    cap,
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
    ALONE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of TOKENS tokens and one KV head: all ranges (ALONE), or every num_programs(2)-th.

    `scale` and `cap` are in units of log 2. The last tiles, which see most keys, start first.
    """
    unit = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence, begin, end = _locate_unit(unit, cu_q, sequences, SINGLE, TOKENS)
    if begin >= end:
        return
    length = tl.load(seq_lens + sequence)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    token = begin + row // GROUP
    mine = (row < TOKENS * GROUP) & (token < end)
    position = tl.where(mine, length - end + token, -1)
    # [T, heads, ...]: where a row's results go, and the start of its query
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + row % GROUP
    origin = token.to(tl.int64) * q_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM
    held = mine[:, None] & (col < HEAD_DIM)[None, :]
    query = _load_rotated(q, origin, token, col, held, first, second, ROTARY)

    key_scale = tl.load(scales + kv_head) * scale
    value_scale = tl.load(scales + HEADS // GROUP + kv_head)
    pages = page_table + sequence.to(tl.int64) * page_stride
    newest = length - end + tl.minimum(begin + TOKENS, end) - 1
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(length - end + begin - window + 1, 0)
    stop = (newest + KEY_TILE) // KEY_TILE  # newest is -1 where a sequence has no length

    acc, peak, total = _empty_sums(ROWS, WIDTH)
    if ALONE:
        whole, whole_peak, whole_total = _empty_sums(ROWS, WIDTH)
        for tile in range(oldest // KEY_TILE, stop):
            start = tile * KEY_TILE
            if start % RANGE_KEYS == 0:
                whole, whole_peak, whole_total = _merge_sums(
                    whole, whole_peak, whole_total, acc, peak, total
                )
                acc, peak, total = _empty_sums(ROWS, WIDTH)
            acc, peak, total = _attend_tile(
                query, acc, peak, total, start, position, length, pages, keys, values, kv_head,
                window, key_scale, cap, col,
                HEADS // GROUP, HEAD_DIM, BLOCK, WINDOWED, SOFTCAP, PRECISION,
            )  # fmt: skip
        whole, whole_peak, whole_total = _merge_sums(
            whole, whole_peak, whole_total, acc, peak, total
        )
        place = at[:, None] * HEAD_DIM + col[None, :]
        tl.store(out + place, _normalize(whole, whole_total, value_scale, out), mask=held)
    else:
        range_stop = (stop + RANGE_TILES - 1) // RANGE_TILES
        for index in range(oldest // RANGE_KEYS + tl.program_id(2), range_stop, tl.num_programs(2)):
            acc, peak, total = _empty_sums(ROWS, WIDTH)
            from_tile = tl.maximum(oldest // KEY_TILE, index * RANGE_TILES)
            for tile in range(from_tile, tl.minimum(stop, (index + 1) * RANGE_TILES)):
                start = tile * KEY_TILE
                acc, peak, total = _attend_tile(
                    query, acc, peak, total, start, position, length, pages, keys, values, kv_head,
                    window, key_scale, cap, col,
                    HEADS // GROUP, HEAD_DIM, BLOCK, WINDOWED, SOFTCAP, PRECISION,
                )  # fmt: skip
            part = index * tokens * HEADS + at
            tl.store(sums + part[:, None] * HEAD_DIM + col[None, :], acc, mask=held)
            tl.store(peaks + part, peak, mask=mine)
            tl.store(totals + part, total, mask=mine)


@triton.jit(do_not_specialize=["tokens", "window"])
def merge_ranges(
    out,
    sums,
    peaks,
    totals,
    positions,
    scales,
    tokens,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Merge in order what `attend` made of the ranges that one token sees, for one KV head."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    position = tl.load(positions + token).to(tl.int32)
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(position - window + 1, 0)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    mine = row < GROUP
    held = mine[:, None] & (col < HEAD_DIM)[None, :]
    at = token * HEADS + kv_head * GROUP + row
    whole, whole_peak, whole_total = _empty_sums(ROWS, WIDTH)
    # Unrolled, the loads of the next ranges do not wait for the sums of this one.
    for index in tl.range(oldest // RANGE_KEYS, position // RANGE_KEYS + 1, loop_unroll_factor=4):
        part = index * tokens * HEADS + at
        acc = tl.load(sums + part[:, None] * HEAD_DIM + col[None, :], mask=held, other=0.0)
        peak = tl.load(peaks + part, mask=mine, other=0.0)
        total = tl.load(totals + part, mask=mine, other=1.0)
        whole, whole_peak, whole_total = _merge_sums(
            whole, whole_peak, whole_total, acc, peak, total
        )
    value_scale = tl.load(scales + HEADS // GROUP + kv_head)
    place = at[:, None] * HEAD_DIM + col[None, :]
    tl.store(out + place, _normalize(whole, whole_total, value_scale, out), mask=held)


@triton.jit
def _locate_unit(unit, cu_q, sequences, SINGLE: tl.constexpr, TOKENS: tl.constexpr):
    """The sequence that a unit of TOKENS flat tokens is of, its first token, and the sequence's end.

    Units of sequence i begin at number cu_q[i] // TOKENS + i, which leaves each enough of them
    without any count of tiles; a unit that has no tokens begins at or after the end.
    """
    if SINGLE:
        sequence = unit
        begin = unit
        end = unit + 1
    else:
        sequence = unit * 0
        above = sequences
        while above - sequence > 1:
            middle = (sequence + above) // 2
            here = tl.load(cu_q + middle) // TOKENS + middle <= unit
            sequence = tl.where(here, middle, sequence)
            above = tl.where(here, above, middle)
        first = tl.load(cu_q + sequence)
        begin = first + (unit - first // TOKENS - sequence) * TOKENS
        end = tl.load(cu_q + sequence + 1)
    return sequence, begin, end


@triton.jit
def _load_rotated(x, start, token, col, held, first, second, ROTARY: tl.constexpr):
    """Rows x[start + col]; their first ROTARY elements rotated in float32 and rounded once."""
    rows = tl.load(x + start[:, None] + col[None, :], mask=held, other=0.0)
    if ROTARY > 0:
        partner = tl.where(col < ROTARY // 2, col + ROTARY // 2, col - ROTARY // 2)
        turning = held & (col < ROTARY)[None, :]
        swapped = tl.load(x + start[:, None] + partner[None, :], mask=turning, other=0.0)
        place = token.to(tl.int64)[:, None] * ROTARY + col[None, :]
        cos = tl.load(first + place, mask=turning, other=1.0)
        sin = tl.load(second + place, mask=turning, other=0.0)
        turned = tl.fma(rows.to(tl.float32), cos, swapped.to(tl.float32) * sin)
        rows = turned.to(rows.dtype)
    return rows


@triton.jit
def _empty_sums(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sums, peaks and totals of no keys."""
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
    length,
    pages,
    keys,
    values,
    kv_head,
    window,
    scale,
    cap,
    col,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile of keys to the online softmax. A row that sees nothing of it stays as it is.

    What lies in the cache past the sequence's end is taken as zero: it may be another's, not all of
    it finite.
    """
    key = start + tl.arange(0, KEY_TILE)
    known = key < length
    page = tl.load(pages + key // BLOCK, mask=known, other=0).to(tl.int64)
    row = (page * KV_HEADS + kv_head) * BLOCK + key % BLOCK
    wide = col < HEAD_DIM
    held = known[None, :] & wide[:, None]
    panel = tl.load(keys + row[None, :] * HEAD_DIM + col[:, None], mask=held, other=0.0)
    scores = tl.dot(query, panel.to(query.dtype), input_precision=PRECISION) * scale
    if SOFTCAP:
        # cap * tanh(x / cap); tanh(u) is 1 - 2 / (exp(2 u) + 1)
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / cap)) + 1.0))
    seen = key[None, :] <= position[:, None]
    if WINDOWED:
        seen &= key[None, :] > position[:, None] - window
    scores = tl.where(seen, scores, float("-inf"))
    now = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(now == float("-inf"), 0.0, now)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    held = known[:, None] & wide[None, :]
    panel = tl.load(values + row[:, None] * HEAD_DIM + col[None, :], mask=held, other=0.0)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(query.dtype), panel.to(query.dtype), acc, input_precision=PRECISION)
    return acc, now, tl.fma(total, fade, tl.sum(weights, axis=1))


@triton.jit
def _merge_sums(acc, peak, total, next_acc, next_peak, next_total):
    """Add what the next range gave. What saw nothing adds nothing, exactly."""
    now = tl.maximum(peak, next_peak)
    base = tl.where(now == float("-inf"), 0.0, now)
    old = tl.exp2(peak - base)
    new = tl.exp2(next_peak - base)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), next_acc * new[:, None])
    return acc, now, tl.fma(total, old, next_total * new)


@triton.jit
def _normalize(acc, total, scale, out):
    """The weighted mean of the values. Adding zero turns -0, which masked keys may leave, into 0."""
    safe = tl.where(total == 0.0, 1.0, total)
    return ((acc / safe[:, None]) * scale + 0.0).to(out.dtype.element_ty)
