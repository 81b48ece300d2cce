"""Linear layers on the GPU with bfloat16 or float8 weights, and with the same order of sums for every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

LinearFormat = Literal["plain", "float8"]
"""Format of the weights: unchanged, or e4m3 with a scale per output, and inputs in e4m3 with a scale per token."""

FLOAT8_MAX = 448.0
"""Largest number of e4m3."""
STAGE_BYTES = 128
"""Bytes of a row per pipeline stage, which is the widest swizzle of shared memory."""
MIN_WAVE_PROGRAMS = 96
"""Number of programs that keeps most of an H200's 132 multiprocessors busy."""
TILES = (
    # Outputs, tokens, warps, stages. A stage has 128 * (outputs + tokens) bytes.
    (128, 256, 8, 3),
    (128, 128, 8, 4),
    (64, 128, 4, 4),
    (64, 64, 4, 6),
    (64, 32, 4, 8),
    (64, 16, 4, 8),
)
"""Tiles of `_matmul`. Prefill uses the first tile that gives enough programs.

Decode uses the last tile that holds its tokens. Decode waits for memory. Two programs per multiprocessor with eight
stages have 128 KiB of weights in flight, three times what 4.8 TB/s need.
"""


def create_gpu_linear(
    weight: Tensor, bias: Tensor | None, linear_format: LinearFormat = "plain"
) -> Callable[[Tensor], Tensor]:
    """Convert weight [N, K] to a format, and return a function that maps x [T, K] to [T, N] in x's dtype.

    Products are summed in float32 over K in order. With e4m3, the matrix unit sums the products of 128 elements first.
    """
    if linear_format == "float8":
        stored, weight_scales = quantize_float8_rows(weight.detach())
    else:
        stored, weight_scales = weight.detach().contiguous(), None

    def multiply(x: Tensor) -> Tensor:
        out = torch.empty(len(x), len(stored), dtype=x.dtype, device=x.device)
        if weight_scales is None:
            x = x if x.stride(1) == 1 else x.contiguous()
            _launch_matmul(x, stored, bias, out, None)
        else:
            rows, scales = quantize_float8_rows(x)
            _launch_matmul(rows, stored, bias, out, (scales, weight_scales))
        return out

    return multiply


def quantize_float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [R, K] to e4m3 with a scale per row.

    Returns:
        e4m3 [R, K], and scales float32 [R], each the largest magnitude of the row / 448.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, cols = x.shape
    narrow = torch.empty(rows, cols, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        width = triton.next_power_of_2(cols)
        _quantize_float8[(rows,)](
            x,
            narrow,
            scales,
            x.stride(0),
            COLS=cols,
            WIDTH=width,
            MAX_VALUE=FLOAT8_MAX,
            num_warps=min(16, max(4, width // 512)),
        )
    return narrow, scales


def _tile(tokens: int, outs: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return the largest tile that is filled and gives enough programs, or else the narrowest that holds all tokens.

    Only bfloat16 uses the largest tile. The other dtypes have two sets of sums, which do not fit into the registers.
    """
    for tile in TILES if dtype.itemsize == 2 else TILES[1:]:
        outs_tile, tokens_tile, _, _ = tile
        programs = triton.cdiv(tokens, tokens_tile) * triton.cdiv(outs, outs_tile)
        if tokens_tile < 2 * tokens and programs >= MIN_WAVE_PROGRAMS:
            return tile
    narrow = [tile for tile in TILES if tile[0] == 64]
    fitting = [tile for tile in narrow if tile[1] >= tokens]
    return fitting[-1] if fitting else narrow[0]


def _launch_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scales: tuple[Tensor, Tensor] | None,
) -> None:
    (tokens, cols), outs = x.shape, len(weight)
    if not tokens:
        return
    outs_tile, tokens_tile, warps, stages = _tile(tokens, outs, x.dtype)
    x_scales, weight_scales = scales or (x, weight)
    _matmul[(triton.cdiv(outs, outs_tile) * triton.cdiv(tokens, tokens_tile),)](
        x,
        weight,
        out,
        x if bias is None else bias,
        x_scales,
        weight_scales,
        tokens,
        outs,
        x.stride(0),
        COLS=cols,
        OUTS_TILE=outs_tile,
        TOKENS_TILE=tokens_tile,
        COLS_TILE=STAGE_BYTES // x.dtype.itemsize,
        BIAS=bias is not None,
        SCALED=scales is not None,
        num_warps=warps,
        num_stages=stages,
    )


@triton.jit(do_not_specialize=["tokens"])  # each batch size would compile a new kernel
def _matmul(
    x,
    weight,
    out,
    bias,
    x_scales,
    weight_scales,
    tokens,
    outs,
    x_stride,
    COLS: tl.constexpr,
    OUTS_TILE: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
    COLS_TILE: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Compute one tile of out [T, N].

    The weights are the left operand, whose 64 rows are always full. A tile of tokens is the right operand, which is as
    narrow as the batch. One token and thousands of tokens therefore use the same instruction and the same order of
    sums. K is not split, because the split would have to be the same for all batch sizes.
    """
    out_tiles = (outs + OUTS_TILE - 1) // OUTS_TILE
    token_tiles = (tokens + TOKENS_TILE - 1) // TOKENS_TILE
    # Programs cover eight output tiles by all token tiles, then the next eight, so that concurrent programs share
    # cached data.
    band = tl.program_id(0) // (8 * token_tiles)
    inside = tl.program_id(0) % (8 * token_tiles)
    height = tl.minimum(out_tiles - band * 8, 8)
    row = (band * 8 + inside % height) * OUTS_TILE + tl.arange(0, OUTS_TILE)
    token = inside // height * TOKENS_TILE + tl.arange(0, TOKENS_TILE)
    col = tl.arange(0, COLS_TILE)
    # Rows past the end repeat the last row and are not stored.
    left = weight + tl.minimum(row, outs - 1).to(tl.int64)[:, None] * COLS + col[None, :]
    right = x + tl.minimum(token, tokens - 1).to(tl.int64)[None, :] * x_stride + col[:, None]
    acc = tl.zeros((OUTS_TILE, TOKENS_TILE), tl.float32)
    for start in range(0, COLS, COLS_TILE):
        if COLS % COLS_TILE == 0:
            a = tl.load(left)
            b = tl.load(right)
        else:
            a = tl.load(left, mask=(col < COLS - start)[None, :], other=0.0)
            b = tl.load(right, mask=(col < COLS - start)[:, None], other=0.0)
        acc = tl.dot(
            a, b, acc, input_precision="tf32x3", max_num_imprecise_acc=128 if SCALED else None
        )
        left += COLS_TILE
        right += COLS_TILE
    if SCALED:
        acc *= tl.load(weight_scales + row, mask=row < outs, other=0.0)[:, None]
        acc *= tl.load(x_scales + token, mask=token < tokens, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + row, mask=row < outs, other=0.0).to(tl.float32)[:, None]
    offset = token.to(tl.int64)[None, :] * outs + row[:, None]
    mask = (row < outs)[:, None] & (token < tokens)[None, :]
    tl.store(out + offset, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_float8(
    x, narrow, scales, stride, COLS: tl.constexpr, WIDTH: tl.constexpr, MAX_VALUE: tl.constexpr
):
    """Quantize one row to e4m3 and store its scale. A row of zeros has scale 1."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    mask = col < COLS
    values = tl.load(x + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(values), axis=0)
    scale = tl.where(peak == 0.0, 1.0, peak / MAX_VALUE)
    tl.store(scales + row, scale)
    # NaN must be preserved, because it marks a failed row.
    scaled = tl.clamp(values / scale, -MAX_VALUE, MAX_VALUE, propagate_nan=tl.PropagateNan.ALL)
    tl.store(narrow + row * COLS + col, scaled.to(tl.float8e4nv), mask=mask)
