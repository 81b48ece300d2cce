"""The draw of the next token on the GPU: greedy or by the inverse of the distribution, in two kernels.

It draws what execution/sampler.py draws from the same (seed, position): the token at which the
cumulative distribution passes execution/randomness.py's number. Sums are made in tiles of the
vocabulary and then over the tiles, in order, so a draw differs from the sampler's only where that
number falls within rounding (about 1e-7) of the border between two tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

VOCAB_TILE = 2048
"""Logits of one program: a vocabulary of 128,000 gives 63, so that two rows keep a GPU busy."""


def draw(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The next token of each row, [S] int64, without waiting for the device.

    logits [S, V] float32, -inf where a token may not come; temperature [S] float32, 0 for the
    likeliest token, of equals the lower id; seeds [S] int64, read as unsigned; positions [S] int64.
    All on one device. A row must have a finite logit, and none that is NaN.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    tiles = triton.cdiv(vocab, VOCAB_TILE)
    peaks, totals = torch.empty(2, rows, tiles, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    _summarise[(rows, tiles)](
        logits,
        temperature,
        peaks,
        totals,
        best,
        vocab,
        logits.stride(0),
        TILE=VOCAB_TILE,
        num_warps=4,
    )
    _draw[(rows,)](
        logits,
        temperature,
        seeds,
        positions,
        peaks,
        totals,
        best,
        tokens,
        vocab,
        logits.stride(0),
        TILES=tiles,
        WIDTH=triton.next_power_of_2(tiles),
        TILE=VOCAB_TILE,
        num_warps=4,
    )
    return tokens


@triton.jit
def _summarise(logits, temperature, peaks, totals, best, vocab, stride, TILE: tl.constexpr):
    """Of one tile of a row: the largest scaled logit, the sum of exp(x - that), the likeliest token."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
    place = row * tl.num_programs(1) + tile
    tl.store(best + place, tile * TILE + tl.argmax(x, axis=0, tie_break_left=True))
    scaled = _scaled(x, tl.load(temperature + row))
    peak = tl.max(scaled, axis=0)
    tl.store(peaks + place, peak)
    tl.store(totals + place, tl.sum(tl.exp(scaled - _finite(peak)), axis=0))


@triton.jit
def _draw(
    logits,
    temperature,
    seeds,
    positions,
    peaks,
    totals,
    best,
    tokens,
    vocab,
    stride,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """From a row's tiles to its token: which tile the number falls into, then which token of it."""
    row = tl.program_id(0).to(tl.int64)
    warmth = tl.load(temperature + row)
    tile = tl.arange(0, WIDTH)
    held = tile < TILES
    peak = tl.load(peaks + row * TILES + tile, mask=held, other=float("-inf"))
    top = tl.max(peak, axis=0)
    if warmth == 0.0:
        winner = tl.argmax(peak, axis=0, tie_break_left=True)
        tl.store(tokens + row, tl.load(best + row * TILES + winner).to(tl.int64))
    else:
        total = tl.load(totals + row * TILES + tile, mask=held, other=0.0).to(tl.float64)
        total *= tl.exp(peak - top).to(tl.float64)
        passed = tl.cumsum(total, axis=0)
        whole = tl.sum(tl.where(tile == TILES - 1, passed, 0.0), axis=0)
        target = _uniform(tl.load(seeds + row), tl.load(positions + row)) * whole
        chosen = tl.sum((passed <= target).to(tl.int32), axis=0)
        # A target that rounding put past the end falls to the last tile that has any weight.
        last = tl.max(tl.where(total > 0.0, tile, 0), axis=0)
        chosen = tl.minimum(chosen, last)
        before = tl.max(tl.where(tile == chosen, passed - total, 0.0), axis=0)
        token = chosen * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
        weight = tl.exp(_scaled(x, warmth) - top).to(tl.float64)
        within = before + tl.cumsum(weight, axis=0)
        step = tl.sum((within <= target).to(tl.int32), axis=0)
        last = tl.max(tl.where(weight > 0.0, tl.arange(0, TILE), 0), axis=0)
        tl.store(tokens + row, (chosen * TILE + tl.minimum(step, last)).to(tl.int64))


@triton.jit
def _scaled(x, temperature):
    """X / temperature; greedy rows, whose temperature is 0, take x itself."""
    return tl.div_rn(x, tl.where(temperature == 0.0, 1.0, temperature))


@triton.jit
def _finite(peak):
    """What to subtract where a tile has no token that may come."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _uniform(seed, position):
    """One number in [0, 1), float64, as randomness.uniform gives it: SplitMix64 (Steele et al. 2014)."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    one = tl.full((), 1, tl.uint64)
    state = _mix(seed.to(tl.uint64, bitcast=True) + golden)
    state += (position.to(tl.uint64) + one) * golden
    bits = _mix(state) >> tl.full((), 11, tl.uint64)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def _mix(x):
    x = (x ^ (x >> tl.full((), 30, tl.uint64))) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> tl.full((), 27, tl.uint64))) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> tl.full((), 31, tl.uint64))
