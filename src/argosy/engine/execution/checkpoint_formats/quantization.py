"""Quantization of weights to 8 or 4 bits and of activations to 8 bits, as the torch reference for all kernels.

Weights and activations are rounded in chunks of 256 along K, which share a scale. A 4-bit weight encodes an 8-bit
integer. In groups of 32 along K, that integer is (value 0..15 - zero point) * integer multiplier. Both formats
therefore use the same arithmetic. The products of a chunk are integers, and their sums stay below 2^24, so float32 adds
them exactly in any order. The vector unit, the matrix unit and torch give the same bits, for every batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.engine.engine_config import IntFormat

CHUNK_SIZE = 256
"""Number of elements along K that share a scale."""
GROUP_SIZE = 32
"""Number of elements along K that share a multiplier and a zero point."""
MAX_INT8 = 127
"""Largest magnitude of an 8-bit value."""
MAX_UINT4 = 15
"""Largest 4-bit value, multiplier or zero point."""
MIN_SCALE = 1e-30
"""Smallest scale with a finite inverse. Chunks with a smaller one are rounded to zeros."""
MAX_SLICE_ELEMENTS = 1 << 19
"""Maximum number of weights that are rounded at a time, so that temporaries stay in the CPU cache."""
NON_FINITE_WEIGHT = "a weight is not finite; the checkpoint is damaged, fetch it again"


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Quantized rows of a weight.

    The weight is `values * scales` for 8 bits and `(values - zero) * multiplier * scales` for 4 bits.
    """

    values: Tensor
    """[N, K] int8, -127..127 for 8 bits and 0..15 for 4 bits."""
    groups: Tensor | None
    """[N, ceil(K / 32)] uint8, multiplier + 16 * zero. None for 8 bits."""
    scales: Tensor
    """[N, ceil(K / 256)] float32."""

    def to_int8(self) -> Tensor:
        """Return the weight as integers -127..127, [N, K] int8."""
        if self.groups is None:
            return self.values
        groups = self.groups.repeat_interleave(GROUP_SIZE, 1)[:, : self.values.shape[1]]
        return (self.values - (groups >> 4).to(torch.int8)) * (groups & MAX_UINT4).to(torch.int8)

    def dequantize(self) -> Tensor:
        """Return the rounded weight, [N, K] float32."""
        return (
            self.to_int8() * self.scales.repeat_interleave(CHUNK_SIZE, 1)[:, : self.values.shape[1]]
        )


def quantize_weight(weight: Tensor, weight_format: IntFormat) -> Iterator[QuantizedWeight]:
    """Quantize weight [N, K], and yield consecutive slices of its rows.

    Raises:
        ValueError: A weight is not finite.
    """
    rows = max(MAX_SLICE_ELEMENTS // weight.shape[1], 1)
    for part in weight.detach().split(rows):
        cols = part.shape[1]
        chunks = F.pad(part.float(), (0, -cols % CHUNK_SIZE)).unflatten(1, (-1, CHUNK_SIZE))
        values, groups, scales = (
            _quantize_int8(chunks) if weight_format == "int8" else _quantize_int4(chunks)
        )
        if not scales.isfinite().all():
            raise ValueError(NON_FINITE_WEIGHT)
        packed_groups = None if groups is None else groups[:, : -(-cols // GROUP_SIZE)].contiguous()
        yield QuantizedWeight(values.flatten(1)[:, :cols].contiguous(), packed_groups, scales)


def quantize_rows(x: Tensor, chunk_size: int = CHUNK_SIZE) -> tuple[Tensor, Tensor]:
    """Quantize x [T, K] to integers [T, chunks, chunk_size], as float32, and scales [T, chunks].

    A chunk with an infinity or NaN has scale NaN, so that only this row's results are invalid.
    """
    chunks = F.pad(x.float(), (0, -x.shape[1] % chunk_size)).unflatten(1, (-1, chunk_size))
    peaks = chunks.abs().amax(-1)
    finite, nonzero = peaks.isfinite(), peaks >= MIN_SCALE
    inverse = torch.where(finite & nonzero, peaks.reciprocal() * MAX_INT8, 0.0)
    integers = chunks.nan_to_num(0.0, 0.0, 0.0).mul_(inverse.unsqueeze(-1)).round_()
    return integers, torch.where(nonzero, peaks / MAX_INT8, 0.0).masked_fill_(~finite, torch.nan)


def quantized_linear(x: Tensor, integers: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [T, K] by a weight's `integers` [N, K] and `scales` [N, chunks], to [T, N] in x's dtype."""
    rows, row_scales = quantize_rows(x)
    total = torch.zeros(len(x), len(integers))
    for chunk, part in enumerate(integers.split(CHUNK_SIZE, 1)):
        sums = F.linear(rows[:, chunk, : part.shape[1]], part.float())
        total += sums.mul_(scales[:, chunk]).mul_(row_scales[:, chunk : chunk + 1])
    if bias is not None:
        total += bias.float()
    return total.to(x.dtype)


def _quantize_int8(chunks: Tensor) -> tuple[Tensor, None, Tensor]:
    """Quantize float32 chunks [N, chunks, 256] to values [N, chunks, 256] and scales [N, chunks]."""
    scales, inverse = _invert_scales(chunks.abs().amax(-1) / MAX_INT8)
    return (chunks * inverse.unsqueeze(-1)).round_().to(torch.int8), None, scales


def _quantize_int4(chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize float32 chunks [N, chunks, 256] to values, groups [N, all groups] and scales.

    With the scale, a multiplier of 15 spans the widest group. Each group uses the smallest multiplier that spans
    it, or the next smaller one if finer steps gain more than clipping costs.
    """
    groups = chunks.unflatten(-1, (-1, GROUP_SIZE))
    high, low = groups.amax(-1).clamp_(min=0), groups.amin(-1).clamp_(max=0)
    spans = torch.maximum(
        (high - low) / (MAX_UINT4 * MAX_UINT4), torch.maximum(high, -low) / MAX_INT8
    )
    scales, inverse = _invert_scales(spans.amax(-1))
    inverse = inverse.unsqueeze(-1)
    steps, width = groups * inverse.unsqueeze(-1), (high - low) * inverse
    spanning = (width / MAX_UINT4).ceil_().clamp_(1, MAX_UINT4)
    wide = _quantize_groups(steps, (high + low) * inverse, spanning)
    fine = _quantize_groups(steps, (high + low) * inverse, (spanning - 1).clamp_(min=1))
    use_fine = fine[2] < wide[2]
    values = torch.where(use_fine.unsqueeze(-1), fine[0], wide[0]).to(torch.int8)
    packed_groups = torch.where(use_fine, fine[1], wide[1]).to(torch.uint8)
    return values.flatten(2), packed_groups.flatten(1), scales


def _quantize_groups(
    groups: Tensor, ends: Tensor, multipliers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute values, `QuantizedWeight.groups` and squared errors for these multipliers, all as float32.

    `groups` [N, chunks, 8, 32] are in units of the scale, and `ends` is the sum of each group's minimum and maximum.
    The zero point centres the sixteen values on the group, as far as both ends fit into 8 bits.
    """
    bound = (MAX_INT8 / multipliers).floor_()
    zeros = (MAX_UINT4 / 2 - ends / multipliers / 2).round_()
    zeros = torch.minimum(torch.maximum(zeros, MAX_UINT4 - bound), bound).clamp_(0, MAX_UINT4)
    multiplier, zero = multipliers.unsqueeze(-1), zeros.unsqueeze(-1)
    values = (groups / multiplier).add_(zero).round_().clamp_(0, MAX_UINT4)
    errors = (values - zero).mul_(multiplier).sub_(groups).square_()
    while errors.shape[-1] > 1:  # the summation order of the kernels
        errors = errors.unflatten(-1, (2, -1)).sum(-2)
    return values, multipliers + 16 * zeros, errors.squeeze(-1)


def _invert_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and their inverses, with zeros for both where a chunk is zero."""
    nonzero = scales >= MIN_SCALE
    return torch.where(nonzero, scales, scales * 0.0), torch.where(
        nonzero, scales.reciprocal(), 0.0
    )
