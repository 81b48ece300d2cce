"""Weights with a scale for each group along K, as most quantized checkpoints store them, and the torch reference.

A weight is value * scale + offset. Values have 8 bits, or 4 bits and a table of sixteen values. Rows of the input are
rounded to 8 bits in chunks of 256, as in `quantization`. The products of a group are integers, and their sums stay
below 2^24, so float32 adds them exactly in any order. Groups are scaled and added in order, so all kernels and batches
give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.engine.engine_config import IntFormat
from argosy.engine.execution.checkpoint_formats.quantization import (
    CHUNK_SIZE,
    GROUP_SIZE,
    MAX_UINT4,
    quantize_rows,
    quantize_weight,
)

GROUP_SIZES = (256, 128, 64, 32, 16)
"""Group sizes of the kernels. Larger groups are split."""
LINEAR_TABLE = tuple(range(16))
"""Values of 4-bit codes that are unsigned integers."""


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """Format of a grouped weight, on which its packed layout depends."""

    bits: int
    """4 or 8."""
    group_size: int
    """Elements along K that share a scale, one of `GROUP_SIZES`."""
    has_offsets: bool
    table: tuple[int, ...] = LINEAR_TABLE
    """Values of the sixteen codes, for 4 bits."""
    is_float8: bool = False
    """Whether the 8 bits are e4m3, with which only some devices compute."""

    def describe(self) -> str:
        """Return a description for the log, such as `int4 per 128`."""
        return f"{'float' if self.is_float8 else 'int'}{self.bits} per {self.group_size}"


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Weight [N, K] in the format `format`."""

    format: GroupFormat
    values: Tensor
    """[N, K] int8 for 8 bits, uint8 codes 0..15 for 4 bits, and bytes for e4m3."""
    scales: Tensor
    """[N, ceil(K / group size)] float32."""
    offsets: Tensor | None
    """[N, ceil(K / group size)] float32, if the format has offsets."""

    def to_int8(self) -> Tensor:
        """Return the values, [N, K] int8."""
        if self.format.bits == 8:
            return self.values
        return torch.tensor(self.format.table, dtype=torch.int8)[self.values.int()]

    def dequantize(self) -> Tensor:
        """Return the weight, [N, K] float32."""
        size, cols = self.format.group_size, self.values.shape[1]
        is_float8 = self.format.is_float8
        weight = (self.values.view(torch.float8_e4m3fn) if is_float8 else self.to_int8()).float()
        weight *= self.scales.repeat_interleave(size, 1)[:, :cols]
        if self.offsets is not None:
            weight += self.offsets.repeat_interleave(size, 1)[:, :cols]
        return weight


@dataclass(frozen=True, slots=True)
class GroupedSource:
    """Weight [N, K] that is read when it is packed, and not at all if its packed form is known."""

    format: GroupFormat
    shape: tuple[int, int]
    read: Callable[[], GroupedWeight]


def choose_group_size(stored_size: int, cols: int) -> int | None:
    """Return the kernels' group size for groups of `stored_size` in rows of `cols`, or None if there is none."""
    if stored_size >= cols:
        return CHUNK_SIZE
    return next((size for size in GROUP_SIZES if stored_size % size == 0), None)


def create_grouped_weight(
    group_format: GroupFormat,
    values: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    stored_size: int,
) -> GroupedWeight:
    """Create a weight from scales [N, groups] of groups of `stored_size`, repeated for the format's smaller groups."""
    groups = -(-values.shape[1] // group_format.group_size)
    repeats = min(stored_size, values.shape[1]) / group_format.group_size

    def split(numbers: Tensor) -> Tensor:
        index = torch.arange(groups).div(max(repeats, 1), rounding_mode="floor").long()
        return numbers.float()[:, index.clamp_(max=numbers.shape[1] - 1)].contiguous()

    return GroupedWeight(
        group_format,
        values,
        split(scales),
        split(offsets) if group_format.has_offsets and offsets is not None else None,
    )


def quantize_to_groups(weight: Tensor, weight_format: IntFormat) -> GroupedWeight:
    """Quantize weight [N, K], and return its values with the float32 scale and offset of each group.

    Raises:
        ValueError: A weight is not finite.
    """
    parts = list(quantize_weight(weight, weight_format))
    values, scales = (torch.cat([getattr(p, name) for p in parts]) for name in ("values", "scales"))
    groups = [part.groups for part in parts if part.groups is not None]
    if not groups:
        return GroupedWeight(GroupFormat(8, CHUNK_SIZE, has_offsets=False), values, scales, None)
    packed = torch.cat(groups)
    scales = scales.repeat_interleave(CHUNK_SIZE // GROUP_SIZE, 1)[:, : packed.shape[1]]
    scales = scales * (packed & MAX_UINT4)
    group_format = GroupFormat(4, GROUP_SIZE, has_offsets=True)
    return GroupedWeight(group_format, values.view(torch.uint8), scales, -scales * (packed >> 4))


def concatenate(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Concatenate the rows of weights of the same format."""
    if len(weights) == 1:
        return weights[0]
    offsets = [weight.offsets for weight in weights if weight.offsets is not None]
    return GroupedWeight(
        weights[0].format,
        torch.cat([weight.values for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat(offsets) if offsets else None,
    )


def select_rows(weight: GroupedWeight, rows: Tensor) -> GroupedWeight:
    """Return the weight with the given rows."""
    return GroupedWeight(
        weight.format,
        weight.values[rows],
        weight.scales[rows],
        None if weight.offsets is None else weight.offsets[rows],
    )


def grouped_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> Tensor:
    """Multiply x [T, K] by a weight [N, K] whose values are int8, to [T, N] in x's dtype."""
    rows, row_scales = quantize_rows(x)
    size = weight.format.group_size
    total = torch.zeros(len(x), len(weight.values))
    for group, part in enumerate(weight.values.split(size, 1)):
        chunk, first = divmod(group * size, CHUNK_SIZE)
        inputs = rows[:, chunk, first : first + part.shape[1]]
        scaled = F.linear(inputs, part.float()).mul_(weight.scales[:, group])
        if weight.offsets is not None:
            scaled += inputs.sum(-1, keepdim=True) * weight.offsets[:, group]
        total += scaled.mul_(row_scales[:, chunk : chunk + 1])
    if bias is not None:
        total += bias.float()
    return total.to(x.dtype)
