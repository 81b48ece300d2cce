"""Weights rounded to 8 or 4 bits, and rows to 8: the arithmetic that every kernel must match, in torch.

Both are rounded by chunks of 256 along K. A weight of 4 bits is one of 8 in fewer bits: in groups of 32 along
K, a number 0..15 less a zero point, times a whole multiplier, so that both formats compute alike. The
products of a chunk are integers below 2^24, which float32 adds up exactly in any order: the vector unit, the
matrix unit and torch give the same bits, for every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from argosy.engine.engine_config import IntFormat

CHUNK_SIZE = 256
"""Elements along K that share a scale."""
GROUP_SIZE = 32
"""Elements along K that share a multiplier and a zero point."""
MAX_INT8 = 127
"""Largest magnitude of 8 bits."""
MAX_UINT4 = 15
"""Largest number of 4 bits: of a value, a multiplier or a zero point."""
MIN_SCALE = 1e-30
"""Chunks with no larger magnitude are zeros: their scale would have no inverse."""
MAX_SLICE_ELEMENTS = 1 << 19
"""Weights that are rounded at a time: what that takes beside them stays small, and in the cache."""
NON_FINITE_WEIGHT = "a weight is not finite; the checkpoint is damaged, fetch it again"


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Rows of a weight in 8 bits, `values * scales`, or in 4, `(values - zero) * multiplier * scales`."""

    values: Tensor
    """[N, K] int8: -127..127, or 0..15."""
    groups: Tensor | None
    """[N, ceil(K / 32)] uint8, multiplier + 16 * zero; None for 8 bits."""
    scales: Tensor
    """[N, ceil(K / 256)] float32."""

    def to_int8(self) -> Tensor:
        """The weight in whole numbers -127..127, [N, K] int8."""
        if self.groups is None:
            return self.values
        groups = self.groups.repeat_interleave(GROUP_SIZE, 1)[:, : self.values.shape[1]]
        return (self.values - (groups >> 4).to(torch.int8)) * (groups & MAX_UINT4).to(torch.int8)

    def dequantize(self) -> Tensor:
        """The weight that this stands for, [N, K] float32."""
        return (
            self.to_int8() * self.scales.repeat_interleave(CHUNK_SIZE, 1)[:, : self.values.shape[1]]
        )


def quantize_weight(weight: Tensor, weight_format: IntFormat) -> Iterator[QuantizedWeight]:
    """Round weight [N, K] slice by slice: consecutive rows.

    ValueError: a weight is not finite.
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
        held = None if groups is None else groups[:, : -(-cols // GROUP_SIZE)].contiguous()
        yield QuantizedWeight(values.flatten(1)[:, :cols].contiguous(), held, scales)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, K] to integers [T, chunks, 256], as float32, and scales [T, chunks].

    A chunk with an infinity or NaN has scale NaN, which spoils this row's results and no other's.
    """
    chunks = F.pad(x.float(), (0, -x.shape[1] % CHUNK_SIZE)).unflatten(1, (-1, CHUNK_SIZE))
    peaks = chunks.abs().amax(-1)
    finite, some = peaks.isfinite(), peaks >= MIN_SCALE
    inverse = torch.where(finite & some, peaks.reciprocal() * MAX_INT8, 0.0)
    integers = chunks.nan_to_num(0.0, 0.0, 0.0).mul_(inverse.unsqueeze(-1)).round_()
    return integers, torch.where(some, peaks / MAX_INT8, 0.0).masked_fill_(~finite, torch.nan)


def quantized_linear(x: Tensor, integers: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [T, K] by a weight's `integers` [N, K] and `scales` [N, chunks]: [T, N] in x's dtype."""
    rows, row_scales = quantize_rows(x)
    total = torch.zeros(len(x), len(integers))
    for chunk, part in enumerate(integers.split(CHUNK_SIZE, 1)):
        sums = F.linear(rows[:, chunk, : part.shape[1]], part.float())
        total += sums.mul_(scales[:, chunk]).mul_(row_scales[:, chunk : chunk + 1])
    if bias is not None:
        total += bias.float()
    return total.to(x.dtype)


def _quantize_int8(chunks: Tensor) -> tuple[Tensor, None, Tensor]:
    """Values [N, chunks, 256] and scales [N, chunks] of float32 chunks [N, chunks, 256]."""
    scales, inverse = _invert_scales(chunks.abs().amax(-1) / MAX_INT8)
    return (chunks * inverse.unsqueeze(-1)).round_().to(torch.int8), None, scales


def _quantize_int4(chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, groups [N, all groups] and scales of float32 chunks [N, chunks, 256].

    The scale lets a multiplier of 15 span the widest group. Each group takes the multiplier that spans it,
    or the next smaller one where cutting its ends off costs less than the finer steps gain.
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
    better = fine[2] < wide[2]
    values = torch.where(better.unsqueeze(-1), fine[0], wide[0]).to(torch.int8)
    held = torch.where(better, fine[1], wide[1]).to(torch.uint8)
    return values.flatten(2), held.flatten(1), scales


def _quantize_groups(
    groups: Tensor, ends: Tensor, multipliers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, `Quantized.groups` and squared errors with these multipliers, all float32.

    groups [N, chunks, 8, 32] are counted in scales; `ends` is the sum of each one's extremes.
    The zero point centres the sixteen values on the group, as far as 8 bits hold both ends.
    """
    bound = (MAX_INT8 / multipliers).floor_()
    zeros = (MAX_UINT4 / 2 - ends / multipliers / 2).round_()
    zeros = torch.minimum(torch.maximum(zeros, MAX_UINT4 - bound), bound).clamp_(0, MAX_UINT4)
    m, zero = multipliers.unsqueeze(-1), zeros.unsqueeze(-1)
    values = (groups / m).add_(zero).round_().clamp_(0, MAX_UINT4)
    errors = (values - zero).mul_(m).sub_(groups).square_()
    while errors.shape[-1] > 1:  # in this order, as kernels do
        errors = errors.unflatten(-1, (2, -1)).sum(-2)
    return values, multipliers + 16 * zeros, errors.squeeze(-1)


def _invert_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and their inverses; zeros for both where a chunk holds nothing."""
    some = scales >= MIN_SCALE
    return torch.where(some, scales, scales * 0.0), torch.where(some, scales.reciprocal(), 0.0)
