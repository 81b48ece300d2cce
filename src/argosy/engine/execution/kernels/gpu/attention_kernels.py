"""Triton kernels of paged attention: rotate and store, list the work, attend, and merge ranges in order.

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
SCALE_BYTES = tl.constexpr(4)
MIN_PEAK = tl.constexpr(1e-30)
"""Magnitude below which the elements of a row are rounded to zeros."""
LOG2E = tl.constexpr(1.4426950408889634)
WORK_FIELDS = 5
"""Numbers of a record of the work list, see `list_work`."""
RECORD_SIZE = tl.constexpr(WORK_FIELDS)


# Numbers that change from step to step are not specialized, because each value would compile a new kernel.
@triton.jit(do_not_specialize=["tokens", "query_tiles"])
def rotate_and_store(
    q,
    k,
    v,
    queries,
    keys,
    values,
    slot_mapping,
    cos,
    sin,
    q_weight,
    k_weight,
    scales,
    q_stride,
    k_stride,
    v_stride,
    tokens,
    query_tiles,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    FLOAT8: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    INT8: tl.constexpr,
):
    """Normalize (NORMED) and rotate ROWS heads of tokens, and store them.

    The first `query_tiles` programs write queries to `queries` [tokens, HEADS, HEAD_DIM]. The others store keys, and
    values as they are, in the cache.
    """
    tile = tl.program_id(0)
    col = tl.arange(0, WIDTH)
    if tile < query_tiles:
        query_row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        token = query_row // HEADS
        mask = (token < tokens)[:, None] & (col < HEAD_DIM)[None, :]
        query = _load_heads(
            q, token * q_stride + query_row % HEADS * HEAD_DIM, token, col, mask, cos, sin, q_weight, eps,
            HEAD_DIM, ROTARY, NORMED, ROUND_BEFORE_WEIGHT,
        )  # fmt: skip
        tl.store(queries + query_row[:, None] * HEAD_DIM + col[None, :], query, mask=mask)
    else:
        row = (tile - query_tiles) * ROWS + tl.arange(0, ROWS)
        token = (row // KV_HEADS).to(tl.int64)
        head = row % KV_HEADS
        slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1)
        mask = (slot >= 0)[:, None] & (col < HEAD_DIM)[None, :]
        key = _load_heads(
            k, token * k_stride + head * HEAD_DIM, token, col, mask, cos, sin, k_weight, eps,
            HEAD_DIM, ROTARY, NORMED, ROUND_BEFORE_WEIGHT,
        )  # fmt: skip
        offset = (token * v_stride + head * HEAD_DIM)[:, None] + col[None, :]
        value = tl.load(v + offset, mask=mask, other=0.0)
        if FLOAT8:
            key = key.to(tl.float32) / tl.load(scales + head)[:, None]
            value = value.to(tl.float32) / tl.load(scales + KV_HEADS + head)[:, None]
            key = tl.clamp(key, -MAX_VALUE, MAX_VALUE, propagate_nan=tl.PropagateNan.ALL)
            value = tl.clamp(value, -MAX_VALUE, MAX_VALUE, propagate_nan=tl.PropagateNan.ALL)
        start = (slot // BLOCK * KV_HEADS + head) * BLOCK
        if INT8:
            key, key_scale = _round_rows(key)
            value, value_scale = _round_rows(value)
            start *= HEAD_DIM + SCALE_BYTES
            scale = (start + BLOCK * HEAD_DIM) // SCALE_BYTES + slot % BLOCK
            tl.store(keys.to(tl.pointer_type(tl.float32)) + scale, key_scale, mask=slot >= 0)
            tl.store(values.to(tl.pointer_type(tl.float32)) + scale, value_scale, mask=slot >= 0)
        else:
            start *= HEAD_DIM
        offset = (start + slot % BLOCK * HEAD_DIM)[:, None] + col[None, :]
        tl.store(keys + offset, key.to(keys.dtype.element_ty), mask=mask)
        tl.store(values + offset, value.to(values.dtype.element_ty), mask=mask)


@triton.jit
def _round_rows(rows):
    """Round rows to integers -127..127 times their scales, as `quantize_rows` does. Returns both, in float32."""
    rows = rows.to(tl.float32)
    peak = tl.max(tl.abs(rows), axis=1)
    is_finite = tl.max(tl.where(rows - rows == 0.0, 0, 1), axis=1) == 0
    inverse = tl.where(peak >= MIN_PEAK, tl.div_rn(1.0, peak) * 127.0, 0.0)
    # The sum with 1.5 * 2^23 has no fractional bits.
    integers = rows * inverse[:, None] + 12582912.0 - 12582912.0
    scale = tl.where(peak >= MIN_PEAK, tl.div_rn(peak, 127.0), 0.0)
    return tl.where(is_finite[:, None], integers, 0.0), tl.where(is_finite, scale, float("nan"))


@triton.jit
def _load_heads(
    x,
    start,
    token,
    col,
    mask,
    cos,
    sin,
    weight,
    eps,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
):
    """Load rows x[start + col]. Their RMS norm is rounded, and so is the rotation of the first ROTARY elements."""
    rows = tl.load(x + start[:, None] + col[None, :], mask=mask, other=0.0)
    factor = tl.full((rows.shape[0],), 1.0, tl.float32)
    if NORMED:
        squares = rows.to(tl.float32) * rows.to(tl.float32)
        factor = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / HEAD_DIM + eps)
        rows = _scale_rows(rows, factor, weight + col, col < HEAD_DIM, ROUND_BEFORE_WEIGHT)
    if ROTARY > 0:
        partner = tl.where(col < ROTARY // 2, col + ROTARY // 2, col - ROTARY // 2)
        is_rotary = col < ROTARY
        rotary_mask = mask & is_rotary[None, :]
        swapped = tl.load(x + start[:, None] + partner[None, :], mask=rotary_mask, other=0.0)
        if NORMED:
            swapped = _scale_rows(swapped, factor, weight + partner, is_rotary, ROUND_BEFORE_WEIGHT)
        offset = token.to(tl.int64)[:, None] * ROTARY + col[None, :]
        cosine = tl.load(cos + offset, mask=rotary_mask, other=1.0)
        sine = tl.load(sin + offset, mask=rotary_mask, other=0.0)
        result = tl.fma(rows.to(tl.float32), cosine, swapped.to(tl.float32) * sine)
        rows = result.to(rows.dtype)
    return rows


@triton.jit
def _scale_rows(rows, factor, weight, mask, ROUND_BEFORE_WEIGHT: tl.constexpr):
    """Multiply rows by their factors and by the weights of the columns, and round to the dtype of the rows."""
    normed = rows.to(tl.float32) * factor[:, None]
    if ROUND_BEFORE_WEIGHT:
        normed = normed.to(rows.dtype).to(tl.float32)
    return (normed * tl.load(weight, mask=mask, other=0.0)[None, :]).to(rows.dtype)


@triton.jit(
    do_not_specialize=[
        *("units", "sequences", "window", "target", "scratch_rows", "first_merge"),
    ]
)
def list_work(
    work,
    query_start_loc,
    seq_lens,
    units,
    sequences,
    window,
    target,
    scratch_rows,
    first_merge,
    TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Divide the ranges of all tiles among about `target` items of nearly equal size. One program does all.

    Record 0 of `work` has the numbers of items and of merges. The items are the records from 1 on. The merges are the
    records from `first_merge` on, one for each tile with several items.

    A record has the sequence, the first token of the tile, the first range, the end of the ranges, and a scratch row. A
    tile with several items has a row for each token of each range, and the record has that of its first range. Row -1
    is that of a tile with a single item.

    An item has at most `grain` ranges, which grows until the rows of all tiles with several items fit.
    """
    total = 0
    for start in range(0, units, LANES):
        _, _, _, first, stop = _locate_tiles(
            start, query_start_loc, seq_lens, sequences, window, TOKENS, WINDOWED, LANES
        )
        total += tl.sum(stop - first)
    grain = tl.maximum((total + target - 1) // target, 1)
    rows = scratch_rows + 1
    while rows > scratch_rows:
        rows = 0
        for start in range(0, units, LANES):
            _, _, tokens, first, stop = _locate_tiles(
                start, query_start_loc, seq_lens, sequences, window, TOKENS, WINDOWED, LANES
            )
            ranges = stop - first
            rows += tl.sum(tl.where(ranges > grain, ranges * tokens, 0))
        grain = tl.where(rows > scratch_rows, 2 * grain, grain)
    items, merges, rows = 0, 0, 0
    for start in range(0, units, LANES):
        sequence, begin, tokens, first, stop = _locate_tiles(
            start, query_start_loc, seq_lens, sequences, window, TOKENS, WINDOWED, LANES
        )
        ranges = stop - first
        is_split = ranges > grain
        parts = (ranges + grain - 1) // grain
        size = tl.maximum((ranges + parts - 1) // tl.maximum(parts, 1), 1)
        parts = (ranges + size - 1) // size
        used_rows = tl.where(is_split, ranges * tokens, 0)
        row = rows + tl.cumsum(used_rows) - used_rows
        item = items + tl.cumsum(parts) - parts
        for part in range(tl.max(parts)):
            from_range = first + part * size
            item_row = tl.where(is_split, row + part * size * tokens, -1)
            to_range = tl.minimum(from_range + size, stop)
            mask = part < parts
            _store_record(
                work, 1 + item + part, sequence, begin, from_range, to_range, item_row, mask
            )
        merge = first_merge + merges + tl.cumsum(is_split.to(tl.int32)) - is_split.to(tl.int32)
        _store_record(work, merge, sequence, begin, first, stop, row, is_split)
        items += tl.sum(parts)
        merges += tl.sum(is_split.to(tl.int32))
        rows += tl.sum(used_rows)
    tl.store(work, items)
    tl.store(work + 1, merges)


@triton.jit
def _locate_tiles(
    start,
    query_start_loc,
    seq_lens,
    sequences,
    window,
    TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return the sequences, first tokens, numbers of tokens, and first and last ranges of LANES tiles.

    Tiles of sequence i start at number query_start_loc[i] // TOKENS + i. Every sequence thereby has enough, and they
    need not be counted. A number that is not in use has no tokens and no ranges. Any other tile has a range, even if
    its sequence has length 0.
    """
    tile = start + tl.arange(0, LANES)
    sequence = tl.zeros((LANES,), tl.int32)
    upper = tl.zeros((LANES,), tl.int32) + sequences
    size = sequences
    while size > 1:
        middle = (sequence + upper) // 2
        is_below = tl.load(query_start_loc + middle) // TOKENS + middle <= tile
        sequence = tl.where(is_below, middle, sequence)
        upper = tl.where(is_below, upper, middle)
        size = (size + 1) // 2
    first_token = tl.load(query_start_loc + sequence)
    end = tl.load(query_start_loc + sequence + 1)
    begin = first_token + (tile - first_token // TOKENS - sequence) * TOKENS
    tokens = tl.minimum(tl.maximum(end - begin, 0), TOKENS)
    position = tl.load(seq_lens + sequence) - end + begin
    first = tl.zeros((LANES,), tl.int32)
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0) // RANGE_KEYS
    stop = tl.maximum((position + tokens + RANGE_KEYS - 1) // RANGE_KEYS, first + 1)
    return sequence, begin, tokens, first, tl.where(tokens > 0, stop, first)


@triton.jit
def _store_record(work, index, sequence, begin, first, stop, row, mask):
    """Store records of a work list."""
    record = work + index * RECORD_SIZE
    tl.store(record, sequence, mask=mask)
    tl.store(record + 1, begin, mask=mask)
    tl.store(record + 2, first, mask=mask)
    tl.store(record + 3, stop, mask=mask)
    tl.store(record + 4, row, mask=mask)


@triton.jit
def _load_record(work, index, query_start_loc, TOKENS: tl.constexpr):
    """Return a record of a work list, with the end of the sequence and the tile's number of tokens after its first."""
    record = work + index * RECORD_SIZE
    sequence, begin = tl.load(record), tl.load(record + 1)
    end = tl.load(query_start_loc + sequence + 1)
    tokens = tl.minimum(end - begin, TOKENS)
    first, stop, row = tl.load(record + 2), tl.load(record + 3), tl.load(record + 4)
    return sequence, begin, end, tokens, first, stop, row


@triton.jit(do_not_specialize=["block_table_stride", "window"])
def attend(
    q,
    keys,
    values,
    out,
    sums,
    peaks,
    totals,
    work,
    query_start_loc,
    seq_lens,
    block_table,
    sinks,
    scales,
    q_stride,
    block_table_stride,
    window,
    scale,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    INT8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend the tokens of one item of the work list, and one KV head, to the item's ranges.

    `scale` and `softcap` include the factor log2(e). The last items, which attend to the most keys, start first.
    """
    item = tl.load(work) - tl.program_id(0)
    if item <= 0:
        return
    kv_head = tl.program_id(1)
    sequence, begin, end, tokens, first, stop, scratch_row = _load_record(
        work, item, query_start_loc, TOKENS
    )
    length = tl.load(seq_lens + sequence)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    token = begin + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_mask = row < tokens * GROUP
    position = tl.where(row_mask, length - end + token, -1)
    mask = row_mask[:, None] & (col < HEAD_DIM)[None, :]
    origin = token.to(tl.int64) * q_stride + head * HEAD_DIM
    query = tl.load(q + origin[:, None] + col[None, :], mask=mask, other=0.0)

    key_scale = tl.load(scales + kv_head) * scale
    block_row = block_table + sequence.to(tl.int64) * block_table_stride
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(length - end + begin - window + 1, 0)
    first_tile = tl.maximum(oldest // KEY_TILE, first * RANGE_TILES)
    # The position after the tile's newest token is 0 or less if the sequence has length 0.
    stop_tile = (length - end + begin + tokens + KEY_TILE - 1) // KEY_TILE
    stop_tile = tl.minimum(stop_tile, stop * RANGE_TILES)
    acc, peak, total = _empty_sums(ROWS, WIDTH)
    if scratch_row < 0:
        merged, merged_peak, merged_total = _empty_sums(ROWS, WIDTH)
        for tile in range(first_tile, stop_tile):
            start = tile * KEY_TILE
            if start % RANGE_KEYS == 0:
                merged, merged_peak, merged_total = _merge_sums(
                    merged, merged_peak, merged_total, acc, peak, total
                )
                acc, peak, total = _empty_sums(ROWS, WIDTH)
            acc, peak, total = _attend_tile(
                query, acc, peak, total, start, position, oldest, length, block_row, keys, values, kv_head,
                window, key_scale, softcap, col,
                HEADS // GROUP, HEAD_DIM, BLOCK, WINDOWED, SOFTCAP, INT8, PRECISION,
            )  # fmt: skip
        merged, merged_peak, merged_total = _merge_sums(
            merged, merged_peak, merged_total, acc, peak, total
        )
        if SINKS:
            merged_total = _add_sinks(sinks, head, merged_peak, merged_total)
        value_scale = tl.load(scales + HEADS // GROUP + kv_head)
        offset = (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + col[None, :]
        tl.store(out + offset, _normalize(merged, merged_total, value_scale, out), mask=mask)
    else:
        # Index of a row's sums in [rows, heads].
        index = (scratch_row + row // GROUP).to(tl.int64) * HEADS + head
        while first_tile < stop_tile:
            acc, peak, total = _empty_sums(ROWS, WIDTH)
            next_tile = (first_tile // RANGE_TILES + 1) * RANGE_TILES
            for tile in range(first_tile, tl.minimum(next_tile, stop_tile)):
                acc, peak, total = _attend_tile(
                    query, acc, peak, total, tile * KEY_TILE, position, oldest, length, block_row, keys, values,
                    kv_head, window, key_scale, softcap, col,
                    HEADS // GROUP, HEAD_DIM, BLOCK, WINDOWED, SOFTCAP, INT8, PRECISION,
                )  # fmt: skip
            tl.store(sums + index[:, None] * HEAD_DIM + col[None, :], acc, mask=mask)
            tl.store(peaks + index, peak, mask=row_mask)
            tl.store(totals + index, total, mask=row_mask)
            index += tokens * HEADS
            first_tile = next_tile


@triton.jit(do_not_specialize=["first_merge", "row_tiles"])
def merge_ranges(
    out,
    sums,
    peaks,
    totals,
    work,
    query_start_loc,
    sinks,
    scales,
    first_merge,
    row_tiles,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the sums of `attend` in order, for ROWS of the heads of a tile, and one KV head."""
    index = tl.program_id(0) // row_tiles
    if index >= tl.load(work + 1):
        return
    kv_head = tl.program_id(1)
    _, begin, _, tokens, first, stop, scratch_row = _load_record(
        work, first_merge + index, query_start_loc, TOKENS
    )
    row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    head = kv_head * GROUP + row % GROUP
    row_mask = row < tokens * GROUP
    mask = row_mask[:, None] & (col < HEAD_DIM)[None, :]
    scratch = (scratch_row + row // GROUP).to(tl.int64) * HEADS + head
    merged, merged_peak, merged_total = _empty_sums(ROWS, WIDTH)
    # The loop is unrolled so that the loads of the next ranges do not wait for the sums of this one.
    for number in tl.range(0, stop - first, loop_unroll_factor=8):
        source = scratch + number * tokens * HEADS
        acc = tl.load(sums + source[:, None] * HEAD_DIM + col[None, :], mask=mask, other=0.0)
        peak = tl.load(peaks + source, mask=row_mask, other=0.0)
        total = tl.load(totals + source, mask=row_mask, other=1.0)
        merged, merged_peak, merged_total = _merge_sums(
            merged, merged_peak, merged_total, acc, peak, total
        )
    if SINKS:
        merged_total = _add_sinks(sinks, head, merged_peak, merged_total)
    value_scale = tl.load(scales + HEADS // GROUP + kv_head)
    offset = ((begin + row // GROUP).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + col[None, :]
    tl.store(out + offset, _normalize(merged, merged_total, value_scale, out), mask=mask)


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
    INT8: tl.constexpr,
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
    row = (block * KV_HEADS + kv_head) * BLOCK
    if INT8:
        row *= HEAD_DIM + SCALE_BYTES
        scale_index = (row + BLOCK * HEAD_DIM) // SCALE_BYTES + key % BLOCK
    else:
        row *= HEAD_DIM
    row += key % BLOCK * HEAD_DIM
    col_mask = col < HEAD_DIM
    mask = key_mask[None, :] & col_mask[:, None]
    panel = tl.load(keys + row[None, :] + col[:, None], mask=mask, other=0.0)
    scores = tl.dot(query, panel.to(query.dtype), input_precision=PRECISION) * scale
    if INT8:
        key_scales = keys.to(tl.pointer_type(tl.float32)) + scale_index
        scores *= tl.load(key_scales, mask=key_mask, other=0.0)[None, :]
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
    panel = tl.load(values + row[:, None] + col[None, :], mask=mask, other=0.0)
    scaled = weights
    if INT8:
        value_scales = values.to(tl.pointer_type(tl.float32)) + scale_index
        scaled *= tl.load(value_scales, mask=key_mask, other=0.0)[None, :]
    acc = acc * rescale[:, None]
    acc = tl.dot(scaled.to(query.dtype), panel.to(query.dtype), acc, input_precision=PRECISION)
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
