"""Linear layers on the GPU for every format of weights, with the same order of sums for every batch.

Grouped weights are dequantized in registers: `GroupedWeight.dequantize`, rounded to the dtype of the inputs. The result
has the bits of a layer with these rounded weights, which would be two to four times as large. Inputs are not rounded to
8 bits as on the CPU. Decode waits for the weights, so integer products would save no time there. In long prompts, the
matrix unit would wait for the scales of the short groups of int4, GPTQ and GGUF.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from argosy.engine.execution.checkpoint_formats.float_formats import FP4_DOUBLED
from argosy.engine.execution.checkpoint_formats.grouped_weight import GroupedWeight, GroupFormat

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
INSTRUCTION_OUTPUTS = 64
"""Outputs of one matrix instruction. A tile of fewer outputs fills the rest of it with zeros."""
NARROW_OUTPUTS = (64, 32, 16)
"""Outputs of a tile of decode. A layer with few outputs uses the first that gives enough programs."""
PACKED_ROWS = 32
"""Outputs of a block of packed integers."""
PACKED_COLS = 64
"""Columns of a block of packed integers. A byte with two codes has those of columns c and c + 32."""


def format_constants(group_format: GroupFormat | None) -> dict[str, object]:
    """Return the constants of `_matmul` for integers, or for floats if there is no format."""
    constants: dict[str, object] = dict.fromkeys(
        ("BITS", "GROUP", "OFFSETS", "CODES", "BASE", "TABLE_LOW", "TABLE_HIGH"), 0
    )
    if group_format is None:
        return constants
    constants |= {"BITS": group_format.bits, "GROUP": group_format.group_size}
    constants |= {"OFFSETS": group_format.has_offsets}
    if group_format.bits == 8:
        return constants | {"CODES": "floats" if group_format.is_float8 else "integers"}
    table, first = group_format.table, group_format.table[0]
    if table == tuple(range(first, first + 16)):
        return constants | {"CODES": "integers", "BASE": first}
    if table == FP4_DOUBLED:
        return constants | {"CODES": "floats"}
    low, high = (
        int.from_bytes(bytes(value + 128 for value in values), "little", signed=True)
        for values in (table[:8], table[8:])
    )
    return constants | {"CODES": "table", "TABLE_LOW": low, "TABLE_HIGH": high}


@dataclass(frozen=True, slots=True, eq=False)
class GpuLinear:
    """Linear layer, which maps x [T, K] to [T, N] in x's dtype, or one for each expert.

    The tensors of experts have a first dimension more. Sums of products are float32, over K in order. With e4m3, the
    matrix unit sums the products of 128 elements first.
    """

    shape: tuple[int, int]
    """N and K."""
    weight: Tensor
    """[N, K], or bytes of packed integers."""
    bias: Tensor | None
    scales: Tensor | None = None
    """Float32 [N] of e4m3, or [groups, padded N] of integers."""
    offsets: Tensor | None = None
    """Float32 [groups, padded N] of integers with offsets."""
    constants: Mapping[str, object] = field(default_factory=partial(format_constants, None))
    """Constants of `_matmul` for the format of the weights."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x, None)

    def multiply(self, x: Tensor, pairs: ExpertPairs | None, pairs_per_row: int = 1) -> Tensor:
        """Multiply each row of x, or map x [P / pairs_per_row, K] to outputs [P, N] of P pairs of row and expert."""
        outs, cols = self.shape
        rows = len(x) if pairs is None else len(pairs.order)
        out = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
        if not rows:
            return out
        x_scales = weight_scales = x
        if self.scales is not None:
            weight_scales = self.scales
        if self.is_float8:
            x, x_scales = quantize_float8_rows(x)
        elif x.stride(1) != 1:
            x = x.contiguous()
        experts, order, ends, active = 0, x, x, 1
        if pairs is not None:
            order, ends = pairs.order, pairs.ends
            experts = len(ends)
            active = min(experts, rows)
        outs_tile, tokens_tile, warps, stages = _tile(-(-rows // active), outs * active, x.dtype)
        token_tiles = _count_tiles(rows, experts, tokens_tile)
        _matmul[(-(-outs // outs_tile) * token_tiles,)](
            x,
            self.weight,
            out,
            x if self.bias is None else self.bias,
            x_scales,
            weight_scales,
            x if self.offsets is None else self.offsets,
            order,
            ends,
            rows,
            token_tiles,
            outs,
            x.stride(0),
            COLS=cols,
            OUTS_TILE=outs_tile,
            TOKENS_TILE=tokens_tile,
            COLS_TILE=STAGE_BYTES // x.dtype.itemsize,
            BIAS=self.bias is not None,
            SCALED=self.is_float8,
            EXPERTS=experts,
            PAIRS_PER_ROW=pairs_per_row,
            **self.constants,
            UNROLL=2 if tokens_tile <= 32 else 1,  # of loops that wait for instructions
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=False,  # so that integers are dequantized as on the CPU
        )
        return out

    @property
    def is_float8(self) -> bool:
        """Whether weights are e4m3 with a scale per output, and inputs are rounded to e4m3 with a scale per token."""
        return self.weight.dtype == torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPairs:
    """Pairs of a row and an expert, by which experts are multiplied."""

    order: Tensor
    """Indices of the pairs, sorted by expert, [P] int32."""
    ends: Tensor
    """End of each expert's pairs in `order`, [E] int32."""


def create_gpu_linear(weight: Tensor, bias: Tensor | None, *, float8: bool = False) -> GpuLinear:
    """Create a layer with weight [N, K] as it is, or rounded to e4m3."""
    outs, cols = weight.shape
    if not float8:
        return GpuLinear((outs, cols), weight.detach().contiguous(), bias)
    stored, scales = quantize_float8_rows(weight.detach())
    return GpuLinear((outs, cols), stored, bias, scales)


def create_gpu_group_linear(
    weight: GroupedWeight, bias: Tensor | None, device: torch.device
) -> GpuLinear:
    """Move a grouped weight to the device, and pack it in blocks of contiguous bytes."""
    outs, cols = weight.values.shape
    size = weight.format.group_size
    pad_rows, pad_cols = -outs % PACKED_ROWS, -cols % PACKED_COLS
    codes = weight.values.to(device).view(torch.uint8)
    if weight.format.bits == 8 and not weight.format.is_float8:
        codes = codes ^ 128
    codes = F.pad(codes, (0, pad_cols, 0, pad_rows))
    blocks = codes.unflatten(1, (-1, PACKED_COLS)).unflatten(0, (-1, PACKED_ROWS)).transpose(1, 2)
    if weight.format.bits == 4:
        low, high = blocks.chunk(2, -1)
        blocks = low | high << 4
    num_groups = triton.cdiv(cols + pad_cols, size)

    def pad(numbers: Tensor) -> Tensor:
        padding = (0, num_groups - numbers.shape[1], 0, pad_rows)
        return F.pad(numbers.to(device), padding).T.contiguous()

    return GpuLinear(
        (outs, cols),
        blocks.contiguous().flatten(),
        bias,
        pad(weight.scales),
        None if weight.offsets is None else pad(weight.offsets),
        format_constants(weight.format),
    )


def stack_linears(linears: Sequence[GpuLinear]) -> GpuLinear:
    """Create the layer of experts with these layers, which must agree in shape and format.

    Raises:
        ValueError: They differ.
    """
    first = linears[0]
    for linear in linears:
        if (linear.shape, linear.constants) != (first.shape, first.constants):
            raise ValueError(
                "GPUs do not support experts of a layer in different formats; "
                "set quantize to none, or device to cpu"
            )

    def stack(tensors: Iterable[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.stack(present) if present else None

    return replace(
        first,
        weight=torch.stack([linear.weight for linear in linears]),
        bias=stack(linear.bias for linear in linears),
        scales=stack(linear.scales for linear in linears),
        offsets=stack(linear.offsets for linear in linears),
    )


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
        programs = -(-tokens // tokens_tile) * -(-outs // outs_tile)
        if tokens_tile < 2 * tokens and programs >= MIN_WAVE_PROGRAMS:
            return tile
    narrow = [tile for tile in TILES if tile[0] == INSTRUCTION_OUTPUTS]
    fitting = [tile for tile in narrow if tile[1] >= tokens]
    _, tokens_tile, warps, stages = fitting[-1] if fitting else narrow[0]
    token_tiles = -(-tokens // tokens_tile)
    enough = (
        size for size in NARROW_OUTPUTS if token_tiles * -(-outs // size) >= MIN_WAVE_PROGRAMS
    )
    return next(enough, NARROW_OUTPUTS[-1]), tokens_tile, warps, stages


def _count_tiles(rows: int, experts: int, tokens_tile: int) -> int:
    """Return the number of tiles of tokens, which is the largest possible one for rows that some experts share."""
    if not experts:
        return -(-rows // tokens_tile)
    return min(rows, experts) + max(rows - experts, 0) // tokens_tile


@triton.jit(do_not_specialize=["rows", "token_tiles"])  # each batch size would compile a new kernel
def _matmul(
    x,
    weight,
    out,
    bias,
    x_scales,
    weight_scales,
    weight_offsets,
    order,
    ends,
    rows,
    token_tiles,
    outs,
    x_stride,
    COLS: tl.constexpr,
    OUTS_TILE: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
    COLS_TILE: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    CODES: tl.constexpr,
    BASE: tl.constexpr,
    TABLE_LOW: tl.constexpr,
    TABLE_HIGH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Compute one tile of out [T, N].

    The weights are the left operand, whose 64 rows are always full. A tile of tokens is the right operand, which is as
    narrow as the batch. One token and thousands of tokens therefore use the same instruction and the same order of
    sums. K is not split, because the split would have to be the same for all batch sizes. If a layer has few outputs,
    programs load fewer rows than 64, and the others are zeros.

    With EXPERTS, a token is a pair, whose number is at its position in `order`. Its input is the row of x for
    PAIRS_PER_ROW pairs.
    """
    height: tl.constexpr = max(OUTS_TILE, 64)
    out_tiles = (outs + OUTS_TILE - 1) // OUTS_TILE
    # Programs cover eight output tiles by all token tiles, then the next eight, so that concurrent programs share
    # cached data.
    band = tl.program_id(0) // (8 * token_tiles)
    inside = tl.program_id(0) % (8 * token_tiles)
    band_height = tl.minimum(out_tiles - band * 8, 8)
    tile = inside // band_height
    local = tl.arange(0, height)
    row = (band * 8 + inside % band_height) * OUTS_TILE + local
    # Rows past the end repeat the last row and are not stored.
    stored_row = tl.minimum(row, outs - 1)
    expert, start, end = 0, tile * TOKENS_TILE, rows
    if EXPERTS > 0:
        expert, start, end = _find_expert_tile(tile, ends, EXPERTS, TOKENS_TILE)
        if expert >= EXPERTS:
            return
    position = start + tl.arange(0, TOKENS_TILE)
    token = tl.minimum(position, end - 1)
    if EXPERTS > 0:
        token = tl.load(order + token)
    source = token // PAIRS_PER_ROW
    right = x + source.to(tl.int64)[None, :] * x_stride
    acc = tl.zeros((height, TOKENS_TILE), tl.float32)
    expert_row = (expert * outs + stored_row).to(tl.int64)
    if BITS == 0:
        left = weight + expert_row[:, None] * COLS
        acc = multiply_floats(left, right, acc, COLS, OUTS_TILE, COLS_TILE, SCALED)
    else:
        padded = (outs + 31) // 32 * 32
        first_row = (expert * padded).to(tl.int64)
        chunks: tl.constexpr = (COLS + 63) // 64
        groups: tl.constexpr = (chunks * 64 + GROUP - 1) // GROUP
        packed_row = first_row + stored_row
        left = weight + (packed_row // 32 * (chunks * 32) + packed_row % 32)[:, None] * (8 * BITS)
        numbers = first_row * groups + stored_row
        acc = _multiply_integers(
            left,
            right,
            acc,
            weight_scales + numbers,
            weight_offsets + numbers,
            padded,
            COLS,
            OUTS_TILE,
            BITS,
            GROUP,
            OFFSETS,
            CODES,
            BASE,
            TABLE_LOW,
            TABLE_HIGH,
            UNROLL,
        )
    is_row = (row < outs) & (local < OUTS_TILE)
    is_token = position < end
    # With unmasked loads, Triton 3.6 keeps a second set of sums on the stack.
    if SCALED:
        acc *= tl.load(weight_scales + expert_row, mask=is_row, other=0.0)[:, None]
        acc *= tl.load(x_scales + source, mask=is_token, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + expert_row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    offset = token.to(tl.int64)[None, :] * outs + row[:, None]
    mask = is_row[:, None] & is_token[None, :]
    tl.store(out + offset, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def multiply_floats(
    left,
    right,
    acc,
    COLS: tl.constexpr,
    OUTS_TILE: tl.constexpr,
    COLS_TILE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Add the products of rows of floats to acc."""
    col = tl.arange(0, COLS_TILE)
    is_used = (tl.arange(0, acc.shape[0]) < OUTS_TILE)[:, None]
    left += col[None, :]
    right += col[:, None]
    for first in range(0, COLS, COLS_TILE):
        if COLS % COLS_TILE > 0:
            a = tl.load(left, mask=is_used & (col < COLS - first)[None, :], other=0.0)
            b = tl.load(right, mask=(col < COLS - first)[:, None], other=0.0)
        else:
            is_full: tl.constexpr = acc.shape[0] == OUTS_TILE
            a = tl.load(left) if is_full else tl.load(left, mask=is_used, other=0.0)
            b = tl.load(right)
        acc = tl.dot(
            a, b, acc, input_precision="tf32x3", max_num_imprecise_acc=128 if SCALED else None
        )
        left += COLS_TILE
        right += COLS_TILE
    return acc


@triton.jit
def _multiply_integers(
    left,
    right,
    acc,
    scales,
    offsets,
    stride,
    COLS: tl.constexpr,
    OUTS_TILE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    CODES: tl.constexpr,
    BASE: tl.constexpr,
    TABLE_LOW: tl.constexpr,
    TABLE_HIGH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Add the products of packed integers to acc. Scales and offsets of a group are `stride` after the last one's."""
    col = tl.arange(0, 32)
    is_used = (tl.arange(0, acc.shape[0]) < OUTS_TILE)[:, None]
    is_full: tl.constexpr = acc.shape[0] == OUTS_TILE
    left += col[None, :]
    right += col[:, None]
    for first in tl.range(0, COLS, 64, loop_unroll_factor=UNROLL):
        stored = tl.load(left) if is_full else tl.load(left, mask=is_used, other=0)
        if BITS == 4:
            a, second = _decode_nibbles(stored, CODES, BASE, TABLE_LOW, TABLE_HIGH)
        else:
            left += 32
            a = _decode_bytes(stored, CODES)
            stored = tl.load(left) if is_full else tl.load(left, mask=is_used, other=0)
            second = _decode_bytes(stored, CODES)
        for half in tl.static_range(2):
            if half == 1:
                a = second
            group = (first + half * 32) // GROUP
            scale = _load_groups(scales, group, stride, col, GROUP)
            a *= scale * 0.0625 if BITS == 4 and half == 1 else scale
            if OFFSETS:
                a += _load_groups(offsets, group, stride, col, GROUP)
            if COLS % 64 > 0:
                is_col = col < COLS - first - half * 32
                b = tl.load(right, mask=is_col[:, None], other=0.0)
            else:
                b = tl.load(right)
            acc = tl.dot(a.to(b.dtype), b, acc, input_precision="tf32x3")
            right += 32
        left += 256 * BITS if BITS == 4 else 256 * BITS - 32
    return acc


@triton.jit
def _find_expert_tile(tile, ends, EXPERTS: tl.constexpr, TOKENS_TILE: tl.constexpr):
    """Return the expert of a tile of tokens, and the first token and the end of the expert's tokens.

    The expert is EXPERTS or more if there are fewer tiles.
    """
    width: tl.constexpr = triton.next_power_of_2(EXPERTS)
    index = tl.arange(0, width)
    end = tl.load(ends + index, mask=index < EXPERTS, other=0)
    is_next = (index > 0) & (index < EXPERTS)
    start = tl.load(ends + index - 1, mask=is_next, other=0)
    tiles = (end - start + TOKENS_TILE - 1) // TOKENS_TILE
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    is_expert = index == expert
    first = start + (tile - last + tiles) * TOKENS_TILE
    return (
        expert,
        tl.sum(tl.where(is_expert, first, 0), 0),
        tl.sum(tl.where(is_expert, end, 0), 0),
    )


@triton.jit
def _decode_bytes(stored, CODES: tl.constexpr):
    """Return bytes minus 128, or floats (e4m3), as float32.

    A byte becomes the last bits of a float, from which a constant is subtracted, because a GPU converts few integers at
    a time. One bit of the constant overlaps with the byte, so that shift and addition stay one instruction.
    """
    if CODES == "floats":
        values = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = (stored.to(tl.int32) << 8) + 0x47000100
        values = bits.to(tl.float32, bitcast=True) - (32769.0 + 128.0)
    return values


@triton.jit
def _decode_nibbles(
    stored,
    CODES: tl.constexpr,
    BASE: tl.constexpr,
    TABLE_LOW: tl.constexpr,
    TABLE_HIGH: tl.constexpr,
):
    """Return the values of the low codes of bytes, and 16 times those of the high codes, as float32.

    A code is an integer, to which BASE is added, a float (e2m1), whose value is doubled, or an index of the table.
    """
    wide = stored.to(tl.int32)
    if CODES == "integers":
        bits = (wide << 8) + 0x47001000
        high = (bits & -0x1000).to(tl.float32, bitcast=True)
        low = bits.to(tl.float32, bitcast=True) - high + BASE
        high -= 32784.0 - 16.0 * BASE
    elif CODES == "floats":  # exponents that are 126 too small
        low = ((wide & 7) << 22 | (wide & 8) << 28).to(tl.float32, bitcast=True) * 2.0**127
        high = ((wide & 0x70) << 18 | (wide & 0x80) << 24).to(tl.float32, bitcast=True) * 2.0**127
        high *= 16.0
    else:
        low = _decode_bytes(_look_up(wide & 15, TABLE_LOW, TABLE_HIGH), "integers")
        high = _decode_bytes(_look_up(wide >> 4, TABLE_LOW, TABLE_HIGH), "integers") * 16.0
    return low, high


@triton.jit
def _look_up(code, TABLE_LOW: tl.constexpr, TABLE_HIGH: tl.constexpr):
    """Return the byte of each code in two words."""
    word = tl.where(code < 8, TABLE_LOW, TABLE_HIGH).to(tl.int64)
    return (word >> ((code & 7) * 8)).to(tl.int32) & 255


@triton.jit
def _load_groups(numbers, group, stride, col, GROUP: tl.constexpr):
    """Load the scales or offsets of 32 columns, of which two groups of 16 have different ones."""
    values = tl.load(numbers + group * stride)[:, None]
    if GROUP < 32:
        second = tl.load(numbers + (group + 1) * stride)[:, None]
        values = tl.where((col < 16)[None, :], values, second)
    return values


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
