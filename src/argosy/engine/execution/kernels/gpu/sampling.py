"""Sampling on the GPU, with exactly the tokens that sampling_ops.py defines.

The weights of a row depend on its largest logit, and the sampled token on the sum of the weights. Each needs one pass,
in tiles of the vocabulary. Integer sums do not depend on the order. The kernels are compiled without fused
multiply-adds, so that the weights equal those of the CPU.

A radix select finds the cut of top-k and top-p. Logits become 32-bit keys in falling order. Each pass looks at one
digit of the keys that share the digits found before, and sums the number and the weight of the tokens with each value
of it. From these sums, the next pass reads which value the cut has. A row with top-k and top-p takes the four digits of
top-k first. Their weights give the limit of top-p, and the first digit of the second search. Of the tokens with the key
of the cut, those with the lowest ids are kept, which the tiles count. The host never waits, and knows all grids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.torch.sampling_ops import (
    EXP2_COEFFICIENTS,
    FRACTION_BITS,
    LOG2E,
    MIN_EXPONENT,
    LogprobResult,
    SamplingMetadata,
    log_probability,
)

VOCAB_TILE = 2048
"""Number of logits per program. A vocabulary of 128,000 gives 63 programs, so that two rows keep a GPU busy."""
KERNEL_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
DIGITS = 256
"""Values of a digit of a key, which has four."""
NUM_PASSES = 4
"""Passes that find the key of a cut, one for each digit."""
NUM_PASSES_OF_BOTH = 7
"""Passes for rows with top-k and top-p, whose second search begins with the sums of the first pass."""
LOG2_E: tl.constexpr = tl.constexpr(LOG2E)
CONSTANTS = {
    "TILE": VOCAB_TILE,
    "COEFFICIENTS": EXP2_COEFFICIENTS,
    "FRACTION_BITS": FRACTION_BITS,
    "MIN_EXPONENT": MIN_EXPONENT,
}


class TritonSamplingOps:
    """Sampling operations of a GPU."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        options = pack_options(metadata, logits.shape[1])
        return self.launch(
            logits, options, self._device.to_device(torch.from_numpy(options.columns))
        )

    def launch(self, logits: Tensor, options: PackedOptions, row_options: Tensor) -> Tensor:
        """Sample with the parameters `options`, whose columns are the first of `row_options` on the device."""
        rows, vocab = logits.shape
        device, passes = logits.device, options.passes
        tokens = torch.empty(rows, dtype=torch.int64, device=device)
        if not rows:
            return tokens
        tiles = triton.cdiv(vocab, VOCAB_TILE)
        peaks = torch.empty(rows, tiles, dtype=torch.float32, device=device)
        best_tokens = torch.empty_like(peaks, dtype=torch.int32)
        tie_counts = torch.empty_like(best_tokens)
        weight_sums = torch.empty(rows, tiles, dtype=torch.int64, device=device)
        size = (options.num_cuts, passes)
        digit_sums = torch.zeros(*size, 2, DIGITS, dtype=torch.int64, device=device)
        cut_states = torch.empty(size[0], passes + 1, 3, dtype=torch.int64, device=device)
        grid, row = (rows, tiles), (vocab, logits.stride(0))
        constants = CONSTANTS | {"TILES": tiles, "WIDTH": triton.next_power_of_2(tiles)}
        constants |= KERNEL_OPTIONS
        _find_peaks[grid](logits, peaks, best_tokens, *row, TILE=VOCAB_TILE, **KERNEL_OPTIONS)
        inputs = (logits, row_options, peaks, digit_sums, cut_states)
        for index in range(passes):
            _sum_digits[(options.num_cuts, tiles)](*inputs, rows, *row, passes, index, **constants)
        tile_sums = (weight_sums, tie_counts)
        _sum_weights[grid](*inputs, *tile_sums, *row, passes, **constants)
        _select_token[(rows,)](
            *inputs[:3], best_tokens, cut_states, *tile_sums, tokens, *row, passes, **constants
        )
        return tokens

    def launch_logprobs(
        self,
        logits: Tensor,
        tokens: Tensor,
        rows: NDArray[np.int64],
        top_counts: NDArray[np.int64],
    ) -> Callable[[], LogprobResult]:
        index = self._device.to_device(torch.from_numpy(rows))
        selected = logits.index_select(0, index)
        (count, vocab), num_top = selected.shape, int(top_counts.max(initial=0))
        tiles, device = triton.cdiv(vocab, VOCAB_TILE), logits.device
        peaks = torch.empty(count, tiles, dtype=torch.float32, device=device)
        best_tokens = torch.empty_like(peaks, dtype=torch.int32)
        num_larger = torch.empty_like(best_tokens)
        weight_sums = torch.empty(count, tiles, dtype=torch.int64, device=device)
        keys = torch.empty(count, vocab if num_top else 0, dtype=torch.int64, device=device)
        result = torch.empty(count, 5 + 2 * num_top, dtype=torch.float64, device=device)
        grid = (count, tiles)
        width = {"TILES": tiles, "WIDTH": triton.next_power_of_2(tiles)} | KERNEL_OPTIONS
        _find_peaks[grid](
            selected, peaks, best_tokens, vocab, vocab, TILE=VOCAB_TILE, **KERNEL_OPTIONS
        )
        inputs, tile_sums = (selected, index, tokens, peaks), (weight_sums, num_larger)
        _rank_tokens[grid](*inputs, *tile_sums, keys, vocab, num_top, **CONSTANTS, **width)
        top_ids = keys.topk(num_top, -1).indices if num_top else keys
        _collect_logprobs[(count,)](*inputs, *tile_sums, top_ids, result, vocab, num_top, **width)
        return partial(_read_logprobs, self._device.to_host(result))


def _read_logprobs(columns: Tensor) -> LogprobResult:
    """Return the result from the columns that `_collect_logprobs` stores."""
    numbers = columns.numpy()
    num_top = (numbers.shape[1] - 5) // 2
    tokens, token_logits, largest, total_weights, ranks = numbers[:, :5].T
    top_logits = numbers[:, 5 + num_top :]
    return LogprobResult(
        tokens.astype(np.int64),
        log_probability(token_logits, largest, total_weights),
        ranks.astype(np.int64),
        numbers[:, 5 : 5 + num_top].astype(np.int64),
        log_probability(top_logits, largest[:, None], total_weights[:, None]),
    )


@dataclass(frozen=True, slots=True)
class PackedOptions:
    """Parameters of S rows, packed by the host."""

    columns: NDArray[np.float64]
    """[7, S]: scale, log2 of min-p, random value, top-k, top-p, index of the cut or -1, and row of the i-th cut."""
    num_cuts: int
    """Number of rows that top-k or top-p cuts."""
    passes: int
    """Number of passes that find the cuts."""


def pack_options(metadata: SamplingMetadata, vocab: int) -> PackedOptions:
    """Pack the parameters, whose integers and float32 numbers float64 keeps exactly."""
    has_top_k, has_top_p = metadata.top_k < vocab, metadata.top_p < 1.0
    cut_rows = np.flatnonzero((has_top_k | has_top_p) & (metadata.logit_scale > 0))
    columns = np.zeros((7, len(metadata.top_k)))
    columns[:5] = (
        metadata.logit_scale,
        metadata.log2_min_p,
        metadata.random_values,
        metadata.top_k,
        metadata.top_p,
    )
    columns[5] = -1
    columns[5, cut_rows] = np.arange(len(cut_rows))
    columns[6, : len(cut_rows)] = cut_rows
    passes = 0
    if cut_rows.size:
        passes = NUM_PASSES_OF_BOTH if (has_top_k & has_top_p)[cut_rows].any() else NUM_PASSES
    return PackedOptions(columns, len(cut_rows), passes)


@triton.jit
def _find_peaks(logits, peaks, best_tokens, vocab, stride, TILE: tl.constexpr):
    """Store the largest logit of one tile of a row, or infinity if a logit is invalid, and its first token."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    x = _load_tile(logits + row * stride, tile, vocab, TILE)
    invalid = tl.max((x < float("inf")).to(tl.int32) ^ 1, axis=0)
    offset = row * tl.num_programs(1) + tile
    tl.store(peaks + offset, tl.where(invalid == 1, float("inf"), tl.max(x, axis=0)))
    tl.store(best_tokens + offset, tile * TILE + tl.argmax(x, axis=0, tie_break_left=True))


@triton.jit(do_not_specialize=["rows", "passes", "index"])
def _sum_digits(
    logits,
    row_options,
    peaks,
    digit_sums,
    cut_states,
    rows,
    vocab,
    stride,
    passes,
    index,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):
    """Add the tokens of one tile of a row to the counts and weights of the values of a digit."""
    cut = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = tl.load(row_options + 6 * rows + cut).to(tl.int64)
    options = row_options + row
    scale = tl.load(options).to(tl.float32)
    has_top_k = tl.load(options + 3 * rows) < vocab
    has_top_p = tl.load(options + 4 * rows) < 1.0
    largest = _find_largest(peaks + row * TILES, TILES, WIDTH)
    prefix, remaining, above = _find_prefix(
        options,
        largest,
        digit_sums + cut * (passes * 512),
        cut_states + cut * (3 * passes + 3),
        rows,
        vocab,
        index,
        COEFFICIENTS,
        FRACTION_BITS,
        MIN_EXPONENT,
    )
    if tile == 0:
        state = cut_states + cut * (3 * passes + 3) + 3 * index
        tl.store(state, prefix)
        tl.store(state + 1, remaining)
        tl.store(state + 2, above)
    if (tl.abs(largest) < float("inf")) & ((index < 4) | (has_top_k & has_top_p)):
        level = tl.where(index < 4, index, index - 3)
        x = _load_tile(logits + row * stride, tile, vocab, TILE)
        keys = _falling_keys(x)
        is_member = tile * TILE + tl.arange(0, TILE) < vocab
        is_member &= (keys >> (32 - 8 * level)) == prefix
        digits = ((keys >> (24 - 8 * level)) & 255).to(tl.int32)
        sums = digit_sums + (cut * passes + index) * 512
        if has_top_k & (index < 4):
            value = tl.arange(0, 512)
            counts = tl.histogram(tl.where(is_member, digits, 256), 512)
            mask = (counts > 0) & (value < 256)
            tl.atomic_add(sums + value, counts.to(tl.int64), mask=mask, sem="relaxed")
        if has_top_p:
            exponents = (x - largest) * scale
            weights = _compute_weights(
                exponents, float("-inf"), COEFFICIENTS, FRACTION_BITS, MIN_EXPONENT
            )
            is_member &= weights > 0
            if index == 0:  # few values, for which single additions would wait for each other
                digits = tl.where(is_member, digits, 256)
                digit = tl.min(digits, axis=0)
                while digit < 256:
                    weight = tl.sum(tl.where(digits == digit, weights, 0), axis=0)
                    tl.atomic_add(sums + 256 + digit, weight, sem="relaxed")
                    digits = tl.where(digits == digit, 256, digits)
                    digit = tl.min(digits, axis=0)
            else:
                tl.atomic_add(sums + 256 + digits, weights, mask=is_member, sem="relaxed")


@triton.jit
def _find_prefix(
    options,
    largest,
    digit_sums,
    cut_states,
    rows,
    vocab,
    index,
    COEFFICIENTS: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):
    """Return what the passes before number `index` have found for a row.

    Returns:
        The first digits of the key at which the row is cut. Then the count or weight to keep of the tokens whose keys
        begin with them, and the weight of the tokens before these.
    """
    top_k = tl.load(options + 3 * rows).to(tl.int64)
    top_p = tl.load(options + 4 * rows)
    has_top_k = top_k < vocab
    has_top_p = top_p < 1.0
    if index == 0:
        prefix = top_k * 0
        remaining = top_k
        above = top_k * 0
    elif (index > 4) & ((has_top_k & has_top_p) == 0):
        prefix = tl.load(cut_states + 12)
        remaining = tl.load(cut_states + 13)
        above = tl.load(cut_states + 14)
    else:
        prefix = tl.load(cut_states + 3 * index - 3)
        remaining = tl.load(cut_states + 3 * index - 2)
        above = tl.load(cut_states + 3 * index - 1)
        value = tl.arange(0, 256)
        counts = tl.load(digit_sums + (index - 1) * 512 + value)
        weights = tl.load(digit_sums + (index - 1) * 512 + 256 + value)
        if (index == 1) & (has_top_k == 0):
            remaining = _weight_limit(top_p, tl.sum(weights, axis=0))
        amounts = weights
        if has_top_k & (index <= 4):
            amounts = counts
        digit = tl.sum((tl.cumsum(amounts, axis=0) < remaining).to(tl.int64), axis=0)
        remaining -= tl.sum(tl.where(value < digit, amounts, 0), axis=0)
        above += tl.sum(tl.where(value < digit, weights, 0), axis=0)
        prefix = prefix * 256 + digit
        if (index == 4) & has_top_k & has_top_p:
            weight = _key_weight(
                prefix,
                largest,
                tl.load(options).to(tl.float32),
                float("-inf"),
                COEFFICIENTS,
                FRACTION_BITS,
                MIN_EXPONENT,
            )
            remaining = _weight_limit(top_p, above + remaining * weight)
            weights = tl.load(digit_sums + 256 + value)
            prefix = tl.sum((tl.cumsum(weights, axis=0) < remaining).to(tl.int64), axis=0)
            above = tl.sum(tl.where(value < prefix, weights, 0), axis=0)
            remaining -= above
    return prefix, remaining, above


@triton.jit
def _weight_limit(top_p, total):
    """Return the weight at which the nucleus ends. It is at least 1, since the first token always stays."""
    return tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _falling_keys(x):
    """Return unsigned integers that fall as the logits rise. Zeros of both signs have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _key_weight(
    key,
    largest,
    scale,
    log2_min_p,
    COEFFICIENTS: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):
    """Return the weight of a token with a key."""
    bits = key.to(tl.uint32).to(tl.int32, bitcast=True)
    x = tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    return _compute_weights(
        (x - largest) * scale, log2_min_p, COEFFICIENTS, FRACTION_BITS, MIN_EXPONENT
    )


@triton.jit
def _find_largest(peaks, TILES: tl.constexpr, WIDTH: tl.constexpr):
    """Return the largest logit of a row, or infinity if one is invalid."""
    tile = tl.arange(0, WIDTH)
    return tl.max(tl.load(peaks + tile, mask=tile < TILES, other=float("-inf")), axis=0)


@triton.jit(do_not_specialize=["passes"])
def _sum_weights(
    logits,
    row_options,
    peaks,
    digit_sums,
    cut_states,
    weight_sums,
    tie_counts,
    vocab,
    stride,
    passes,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):
    """Store the weight of the tokens of one tile of a row before the cut, and the number of those with its key.

    The first tile of a row with a cut also stores, as its last state, the cut's key and how many tokens with it stay.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    rows = tl.num_programs(0)
    options = row_options + row
    scale = tl.load(options).to(tl.float32)
    if scale > 0.0:
        log2_min_p = tl.load(options + rows).to(tl.float32)
        largest = _find_largest(peaks + row * TILES, TILES, WIDTH)
        x = _load_tile(logits + row * stride, tile, vocab, TILE)
        exponents = (x - largest) * scale
        weights = _compute_weights(exponents, log2_min_p, COEFFICIENTS, FRACTION_BITS, MIN_EXPONENT)
        cut = tl.load(options + 5 * rows).to(tl.int64)
        if cut >= 0:
            state = cut_states + cut * (3 * passes + 3)
            key, kept, _ = _find_prefix(
                options,
                largest,
                digit_sums + cut * (passes * 512),
                state,
                rows,
                vocab,
                passes,
                COEFFICIENTS,
                FRACTION_BITS,
                MIN_EXPONENT,
            )
            keys = _falling_keys(x)
            weights = tl.where(keys < key, weights, 0)
            is_tie = (keys == key) & (tile * TILE + tl.arange(0, TILE) < vocab)
            tl.store(tie_counts + row * TILES + tile, tl.sum(is_tie.to(tl.int32), axis=0))
            if tile == 0:
                if tl.load(options + 4 * rows) < 1.0:
                    weight = _key_weight(
                        key,
                        largest,
                        scale,
                        float("-inf"),
                        COEFFICIENTS,
                        FRACTION_BITS,
                        MIN_EXPONENT,
                    )
                    kept = (kept + weight - 1) // tl.maximum(weight, 1)
                tl.store(state + 3 * passes, key)
                tl.store(state + 3 * passes + 1, kept)
        tl.store(weight_sums + row * TILES + tile, tl.sum(weights, axis=0))


@triton.jit(do_not_specialize=["passes"])
def _select_token(
    logits,
    row_options,
    peaks,
    best_tokens,
    cut_states,
    weight_sums,
    tie_counts,
    tokens,
    vocab,
    stride,
    passes,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):
    """Select a row's token: first the tile in which the random number falls, then the token."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    options = row_options + row
    scale = tl.load(options).to(tl.float32)
    tile = tl.arange(0, WIDTH)
    peak = tl.load(peaks + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
    largest = tl.max(peak, axis=0)
    if tl.abs(largest) == float("inf"):
        tl.store(tokens + row, -1)
    elif scale == 0.0:
        best = tl.argmax(peak, axis=0, tie_break_left=True)
        tl.store(tokens + row, tl.load(best_tokens + row * TILES + best).to(tl.int64))
    else:
        log2_min_p = tl.load(options + rows).to(tl.float32)
        random_value = tl.load(options + 2 * rows)
        weight_sum = tl.load(weight_sums + row * TILES + tile, mask=tile < TILES, other=0)
        kept_ties = weight_sum * 0
        cut = tl.load(options + 5 * rows).to(tl.int64)
        key = cut
        if cut >= 0:
            state = cut_states + cut * (3 * passes + 3) + 3 * passes
            key = tl.load(state)
            kept = tl.load(state + 1)
            ties = tl.load(tie_counts + row * TILES + tile, mask=tile < TILES, other=0)
            ties = ties.to(tl.int64)
            kept_before = tl.minimum(tl.cumsum(ties, axis=0) - ties, kept)
            kept_ties = tl.minimum(ties, kept - kept_before)
            weight_sum += kept_ties * _key_weight(
                key,
                largest,
                scale,
                log2_min_p,
                COEFFICIENTS,
                FRACTION_BITS,
                MIN_EXPONENT,
            )
        total = tl.sum(weight_sum, axis=0)
        target = tl.minimum((random_value * total.to(tl.float64)).to(tl.int64), total - 1)
        cumulative = tl.cumsum(weight_sum, axis=0)
        chosen = tl.sum((cumulative <= target).to(tl.int32), axis=0)
        target -= tl.sum(tl.where(tile < chosen, weight_sum, 0), axis=0)
        x = _load_tile(logits + row * stride, chosen, vocab, TILE)
        weights = _compute_weights(
            (x - largest) * scale, log2_min_p, COEFFICIENTS, FRACTION_BITS, MIN_EXPONENT
        )
        if cut >= 0:
            keys = _falling_keys(x)
            is_tie = keys == key
            rank = tl.cumsum(is_tie.to(tl.int32), axis=0)
            kept_here = tl.sum(tl.where(tile == chosen, kept_ties, 0), axis=0)
            weights = tl.where((keys < key) | (is_tie & (rank <= kept_here)), weights, 0)
        position = tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)
        tl.store(tokens + row, (chosen * TILE + position).to(tl.int64))


@triton.jit(do_not_specialize=["num_top"])
def _rank_tokens(
    logits,
    sampled_rows,
    tokens,
    peaks,
    weight_sums,
    num_larger,
    keys,
    vocab,
    num_top,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):
    """Store the weight of one tile of a row at temperature 1, and the number of logits above that of its token.

    If there is a number of likeliest tokens to find, also store keys, which rise with the likelihood.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    largest = _find_largest(peaks + row * TILES, TILES, WIDTH)
    token = tl.maximum(tl.load(tokens + tl.load(sampled_rows + row)), 0)
    token_logit = tl.load(logits + row * vocab + token).to(tl.float32)
    x = _load_tile(logits + row * vocab, tile, vocab, TILE)
    weights = _compute_weights(
        (x - largest) * LOG2_E, float("-inf"), COEFFICIENTS, FRACTION_BITS, MIN_EXPONENT
    )
    tl.store(weight_sums + row * TILES + tile, tl.sum(weights, axis=0))
    tl.store(num_larger + row * TILES + tile, tl.sum((x > token_logit).to(tl.int32), axis=0))
    if num_top > 0:
        col = tile * TILE + tl.arange(0, TILE)
        rising = (0xFFFFFFFF - _falling_keys(x)) * vocab - col
        tl.store(keys + row * vocab + col, rising, mask=col < vocab)


@triton.jit(do_not_specialize=["num_top"])
def _collect_logprobs(
    logits,
    sampled_rows,
    tokens,
    peaks,
    weight_sums,
    num_larger,
    top_ids,
    result,
    vocab,
    num_top,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store what a row's log-probabilities are computed from.

    The first five numbers are the token, its logit, the largest logit (NaN if one is invalid), the sum of the weights,
    and the rank. Then follow the ids and the logits of the likeliest tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    out = result + row * (5 + 2 * num_top)
    tile = tl.arange(0, WIDTH)
    in_row = tile < TILES
    weights = tl.load(weight_sums + row * TILES + tile, mask=in_row, other=0)
    larger = tl.load(num_larger + row * TILES + tile, mask=in_row, other=0)
    largest = _find_largest(peaks + row * TILES, TILES, WIDTH)
    token = tl.maximum(tl.load(tokens + tl.load(sampled_rows + row)), 0)
    tl.store(out, token.to(tl.float64))
    tl.store(out + 1, tl.load(logits + row * vocab + token).to(tl.float64))
    tl.store(
        out + 2, tl.where(tl.abs(largest) < float("inf"), largest, float("nan")).to(tl.float64)
    )
    tl.store(out + 3, tl.sum(weights, axis=0).to(tl.float64))
    tl.store(out + 4, (tl.sum(larger, axis=0) + 1).to(tl.float64))
    for first in range(0, num_top, 32):
        col = first + tl.arange(0, 32)
        mask = col < num_top
        top_id = tl.load(top_ids + row * num_top + col, mask=mask, other=0)
        top_logit = tl.load(logits + row * vocab + top_id, mask=mask, other=0.0)
        tl.store(out + 5 + col, top_id.to(tl.float64), mask=mask)
        tl.store(out + 5 + num_top + col, top_logit.to(tl.float64), mask=mask)


@triton.jit
def _load_tile(row, tile, vocab, TILE: tl.constexpr):
    """Load one tile of a row's logits, with -infinity after the end of the vocabulary."""
    token = tile * TILE + tl.arange(0, TILE)
    return tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _compute_weights(
    exponents,
    log2_min_p,
    COEFFICIENTS: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):
    """Compute weights as `sampling_ops.compute_weights`, and 0 for exponents below `log2_min_p`."""
    y = tl.maximum(exponents, MIN_EXPONENT)
    whole = (y + 12582912.0) - 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
    y -= whole
    power = y * COEFFICIENTS[0] + COEFFICIENTS[1]
    for i in tl.static_range(2, 7):
        power = power * y + COEFFICIENTS[i]
    bits = power.to(tl.int32, bitcast=True) + ((whole.to(tl.int32) + FRACTION_BITS) << 23)
    weights = bits.to(tl.float32, bitcast=True).to(tl.int64)
    return tl.where(exponents < log2_min_p, 0, weights)
