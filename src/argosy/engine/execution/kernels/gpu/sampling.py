"""Sampling on the GPU, in three kernels, with exactly the tokens that sampling_ops.py defines.

The weights of a row depend on its largest logit, and the sampled token on the sum of the weights. Each needs one pass,
in tiles of the vocabulary. Integer sums do not depend on the order. The kernels are compiled without fused
multiply-adds, so that the weights equal those of the CPU.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.execution.kernels.torch.sampling_ops import (
    EXP2_COEFFICIENTS,
    FRACTION_BITS,
    MIN_EXPONENT,
    LogprobResult,
    SamplingMetadata,
    TorchSamplingOps,
)

VOCAB_TILE = 2048
"""Number of logits per program. A vocabulary of 128,000 gives 63 programs, so that two rows keep a GPU busy."""
KERNEL_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


class TritonSamplingOps:
    """Sampling operations of a GPU. Torch handles rows with top-k or top-p, and log-probabilities."""

    def __init__(self) -> None:
        self._torch = TorchSamplingOps()

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Sample a token from each row. Waits for the device only if a row has top-k or top-p."""
        tokens = _sample(logits, metadata)
        limited = (metadata.top_k < logits.shape[1]) | (metadata.top_p < 1.0)
        cut = np.flatnonzero(limited & (metadata.logit_scale > 0))
        if cut.size:
            index = torch.from_numpy(cut).to(logits.device, non_blocking=True)
            tokens[index] = self._torch.sample(logits[index], metadata.select_rows(cut))
        return tokens

    def compute_logprobs(
        self,
        logits: Tensor,
        logit_rows: NDArray[np.int64],
        tokens: Tensor,
        top_counts: NDArray[np.int64],
    ) -> LogprobResult:
        return self._torch.compute_logprobs(logits, logit_rows, tokens, top_counts)


def _sample(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Sample a token from each row, without top-k and top-p."""
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return tokens
    columns = np.stack(
        (metadata.logit_scale, metadata.log2_min_p, metadata.random_values), dtype=np.float64
    )
    row_options = torch.from_numpy(columns).to(device, non_blocking=True)
    tiles = triton.cdiv(vocab, VOCAB_TILE)
    width = triton.next_power_of_2(tiles)
    peaks = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    best_tokens = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    weight_sums = torch.empty(rows, tiles, dtype=torch.int64, device=device)
    grid, row = (rows, tiles), (vocab, logits.stride(0))
    _find_peaks[grid](logits, peaks, best_tokens, *row, TILE=VOCAB_TILE, **KERNEL_OPTIONS)
    constants = {
        "WIDTH": width,
        "TILE": VOCAB_TILE,
        "COEFFICIENTS": EXP2_COEFFICIENTS,
    } | KERNEL_OPTIONS
    constants |= {"FRACTION_BITS": FRACTION_BITS, "MIN_EXPONENT": MIN_EXPONENT}
    _sum_weights[grid](logits, row_options, peaks, weight_sums, *row, **constants)
    tile_stats = (peaks, best_tokens, weight_sums)
    _select_token[(rows,)](logits, row_options, *tile_stats, tokens, *row, TILES=tiles, **constants)
    return tokens


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


@triton.jit
def _sum_weights(
    logits,
    row_options,
    peaks,
    weight_sums,
    vocab,
    stride,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):
    """Store the sum of the weights of one tile of a row."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    tiles = tl.num_programs(1)
    scale = tl.load(row_options + row).to(tl.float32)
    if scale > 0.0:
        log2_min_p = tl.load(row_options + tl.num_programs(0) + row).to(tl.float32)
        col = tl.arange(0, WIDTH)
        peak = tl.load(peaks + row * tiles + col, mask=col < tiles, other=float("-inf"))
        x = _load_tile(logits + row * stride, tile, vocab, TILE)
        exponents = (x - tl.max(peak, axis=0)) * scale
        weights = _compute_weights(exponents, log2_min_p, COEFFICIENTS, FRACTION_BITS, MIN_EXPONENT)
        tl.store(weight_sums + row * tiles + tile, tl.sum(weights, axis=0))


@triton.jit
def _select_token(
    logits,
    row_options,
    peaks,
    best_tokens,
    weight_sums,
    tokens,
    vocab,
    stride,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):
    """Select a row's token: first the tile in which the random number falls, then the token."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(row_options + row).to(tl.float32)
    tile = tl.arange(0, WIDTH)
    peak = tl.load(peaks + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
    largest = tl.max(peak, axis=0)
    if tl.abs(largest) == float("inf"):
        tl.store(tokens + row, -1)
    elif scale == 0.0:
        best = tl.argmax(peak, axis=0, tie_break_left=True)
        tl.store(tokens + row, tl.load(best_tokens + row * TILES + best).to(tl.int64))
    else:
        log2_min_p = tl.load(row_options + tl.num_programs(0) + row).to(tl.float32)
        random_value = tl.load(row_options + 2 * tl.num_programs(0) + row)
        weight_sum = tl.load(weight_sums + row * TILES + tile, mask=tile < TILES, other=0)
        total = tl.sum(weight_sum, axis=0)
        target = tl.minimum((random_value * total.to(tl.float64)).to(tl.int64), total - 1)
        cumulative = tl.cumsum(weight_sum, axis=0)
        chosen = tl.sum((cumulative <= target).to(tl.int32), axis=0)
        target -= tl.sum(tl.where(tile < chosen, weight_sum, 0), axis=0)
        x = _load_tile(logits + row * stride, chosen, vocab, TILE)
        weights = _compute_weights(
            (x - largest) * scale, log2_min_p, COEFFICIENTS, FRACTION_BITS, MIN_EXPONENT
        )
        position = tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)
        tl.store(tokens + row, (chosen * TILE + position).to(tl.int64))


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
