"""The draw of the next token on the GPU, in three kernels: the tokens that draws.py defines, to the last one.

A row's largest logit must be known before its weights are, and their sum before the token that the
random number falls on: one pass for each, in tiles of the vocabulary. Integers sum to the same in any
order; the kernels are compiled without fused multiply-adds, so that each weight is the CPU's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from argosy.engine.execution.sampling_ops import (
    EXP2_COEFFICIENTS,
    FRACTION_BITS,
    MIN_EXPONENT,
    TorchSamplingOps,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from argosy.engine.execution.sampling_ops import LogprobResult, SamplingMetadata

VOCAB_TILE = 2048
"""Logits of one program: a vocabulary of 128,000 gives 63, so that two rows keep a GPU busy."""
KERNEL_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


class TritonSamplingOps:
    """The `DrawOps` of a GPU; torch draws for rows with top-k or top-p, and tells."""

    def __init__(self) -> None:
        self._torch = TorchSamplingOps()

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """See `DrawOps`; does not wait for the device unless a row has top-k or top-p."""
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
        """See `DrawOps`."""
        return self._torch.compute_logprobs(logits, logit_rows, tokens, top_counts)


def _sample(logits: Tensor, draws: SamplingMetadata) -> Tensor:
    """See `DrawOps.draw`, but for top-k and top-p."""
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return tokens
    how = np.stack((draws.logit_scale, draws.log2_min_p, draws.random_values), dtype=np.float64)
    options = torch.from_numpy(how).to(device, non_blocking=True)
    tiles = triton.cdiv(vocab, VOCAB_TILE)
    width = triton.next_power_of_2(tiles)
    peaks = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    likeliest = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    masses = torch.empty(rows, tiles, dtype=torch.int64, device=device)
    grid, row = (rows, tiles), (vocab, logits.stride(0))
    _find_peaks[grid](logits, peaks, likeliest, *row, TILE=VOCAB_TILE, **KERNEL_OPTIONS)
    constants = {"WIDTH": width, "TILE": VOCAB_TILE, "FACTORS": EXP2_COEFFICIENTS} | KERNEL_OPTIONS
    constants |= {"FRACTION": FRACTION_BITS, "NOTHING": MIN_EXPONENT}
    _sum_weights[grid](logits, options, peaks, masses, *row, **constants)
    held = (peaks, likeliest, masses)
    _select_token[(rows,)](logits, options, *held, tokens, *row, TILES=tiles, **constants)
    return tokens


@triton.jit
def _find_peaks(logits, peaks, likeliest, vocab, stride, TILE: tl.constexpr):
    """Of one tile of a row: the largest logit, infinite if one is not sound, and the first token that has it."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    x = _load_tile(logits + row * stride, tile, vocab, TILE)
    unsound = tl.max((x < float("inf")).to(tl.int32) ^ 1, axis=0)
    place = row * tl.num_programs(1) + tile
    tl.store(peaks + place, tl.where(unsound == 1, float("inf"), tl.max(x, axis=0)))
    tl.store(likeliest + place, tile * TILE + tl.argmax(x, axis=0, tie_break_left=True))


@triton.jit
def _sum_weights(
    logits,
    options,
    peaks,
    masses,
    vocab,
    stride,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    FACTORS: tl.constexpr,
    FRACTION: tl.constexpr,
    NOTHING: tl.constexpr,
):
    """The sum of the weights of one tile of a row."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    tiles = tl.num_programs(1)
    scale = tl.load(options + row).to(tl.float32)
    if scale > 0.0:
        least = tl.load(options + tl.num_programs(0) + row).to(tl.float32)
        col = tl.arange(0, WIDTH)
        peak = tl.load(peaks + row * tiles + col, mask=col < tiles, other=float("-inf"))
        x = _load_tile(logits + row * stride, tile, vocab, TILE)
        exponents = (x - tl.max(peak, axis=0)) * scale
        weights = _compute_weights(exponents, least, FACTORS, FRACTION, NOTHING)
        tl.store(masses + row * tiles + tile, tl.sum(weights, axis=0))


@triton.jit
def _select_token(
    logits,
    options,
    peaks,
    likeliest,
    masses,
    tokens,
    vocab,
    stride,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    FACTORS: tl.constexpr,
    FRACTION: tl.constexpr,
    NOTHING: tl.constexpr,
):
    """A row's token: which tile the random number falls into, then which token of it."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(options + row).to(tl.float32)
    tile = tl.arange(0, WIDTH)
    peak = tl.load(peaks + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
    largest = tl.max(peak, axis=0)
    if tl.abs(largest) == float("inf"):
        tl.store(tokens + row, -1)
    elif scale == 0.0:
        best = tl.argmax(peak, axis=0, tie_break_left=True)
        tl.store(tokens + row, tl.load(likeliest + row * TILES + best).to(tl.int64))
    else:
        least = tl.load(options + tl.num_programs(0) + row).to(tl.float32)
        chance = tl.load(options + 2 * tl.num_programs(0) + row)
        mass = tl.load(masses + row * TILES + tile, mask=tile < TILES, other=0)
        total = tl.sum(mass, axis=0)
        target = tl.minimum((chance * total.to(tl.float64)).to(tl.int64), total - 1)
        passed = tl.cumsum(mass, axis=0)
        chosen = tl.sum((passed <= target).to(tl.int32), axis=0)
        target -= tl.sum(tl.where(tile < chosen, mass, 0), axis=0)
        x = _load_tile(logits + row * stride, chosen, vocab, TILE)
        weights = _compute_weights((x - largest) * scale, least, FACTORS, FRACTION, NOTHING)
        step = tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)
        tl.store(tokens + row, (chosen * TILE + step).to(tl.int64))


@triton.jit
def _load_tile(row, tile, vocab, TILE: tl.constexpr):
    """One tile of a row's logits; beyond the vocabulary stands -infinity."""
    token = tile * TILE + tl.arange(0, TILE)
    return tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _compute_weights(
    exponents, least, FACTORS: tl.constexpr, FRACTION: tl.constexpr, NOTHING: tl.constexpr
):
    """`draws.weigh`, and 0 for exponents below `least`."""
    y = tl.maximum(exponents, NOTHING)
    whole = (y + 12582912.0) - 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
    y -= whole
    power = y * FACTORS[0] + FACTORS[1]
    for i in tl.static_range(2, 7):
        power = power * y + FACTORS[i]
    bits = power.to(tl.int32, bitcast=True) + ((whole.to(tl.int32) + FRACTION) << 23)
    weights = bits.to(tl.float32, bitcast=True).to(tl.int64)
    return tl.where(exponents < least, 0, weights)
