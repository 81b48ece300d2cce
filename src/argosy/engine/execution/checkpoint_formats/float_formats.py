"""FP8 with a scale for each matrix, output or block, MXFP4 (OCP MX specification 1.0), and bitsandbytes."""

from __future__ import annotations

import torch
from torch import Tensor

from argosy.engine.execution.checkpoint_formats.encoded import (
    GroupedTensor,
    TensorSource,
)
from argosy.engine.execution.checkpoint_formats.grouped_weight import (
    GroupedWeight,
    GroupFormat,
    choose_group_size,
    create_grouped_weight,
)

FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of FP4 (e2m1), which are integers."""
_MXFP4_GROUP = 32


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2 to the power of integers, as float32."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


class Fp8Tensor(GroupedTensor):
    """Matrix in FP8 (e4m3), with scales for the whole of it, for each output, or for each block."""

    def __init__(
        self,
        name: str,
        scale_name: str,
        source: TensorSource,
        block_size: tuple[int, int] | None,
    ) -> None:
        self._scale_name = scale_name
        super().__init__(name, source, source.shape(name), (name, scale_name))
        if source.dtype(name) != torch.float8_e4m3fn:
            raise self.error(
                name,
                f"is stored as {source.dtype(name)} and should be float8_e4m3fn, as {scale_name} is there",
            )
        if len(self.shape) < 2:
            raise self.error(name, f"has shape {list(self.shape)} and should be a matrix")
        *lead, outs, cols = self.shape
        experts = tuple(lead)
        rows_per_block, cols_per_block = self._block = block_size or (1, cols)
        blocks = (-(-outs // rows_per_block), -(-cols // cols_per_block))
        plain = (
            () if block_size else ((), (1,), (outs,), experts, (*experts, 1, 1), (*experts, outs))
        )
        self.check_shape(scale_name, (*experts, *blocks), *plain)

    @property
    def group_format(self) -> GroupFormat | None:
        size = choose_group_size(self._block[1], self.shape[-1])
        return None if size is None else GroupFormat(8, size, has_offsets=False, is_float8=True)

    def read_grouped(self, entry: int | None = None) -> GroupedWeight:
        group_format = self.group_format
        if group_format is None:
            raise self.error(self._scale_name, "has blocks that the kernels do not support")
        values = self._source.read(self.name, entry).view(torch.uint8)
        if bool((values & 127 == 127).any()):
            raise self.error(self.name, "has values that are not a number")
        scales = self._read_scales(entry, 2)
        if scales.shape[0] > 1:
            scales = scales.repeat_interleave(self._block[0], 0)[: len(values)]
        scales = scales.expand(len(values), -1)
        return create_grouped_weight(group_format, values, scales, None, self._block[1])

    def dequantize(self, entry: int | None = None) -> Tensor:
        values = self._source.read(self.name, entry).float()
        scales = self._read_scales(entry, values.dim())
        rows, cols = values.shape[-2:]
        for dim, size, length in ((-2, self._block[0], rows), (-1, self._block[1], cols)):
            scales = (
                scales.repeat_interleave(size, dim).narrow(dim, 0, length)
                if scales.shape[dim] > 1
                else scales
            )
        return values.mul_(scales)

    def _read_scales(self, entry: int | None, dim: int) -> Tensor:
        """Return the scales with `dim` dimensions, of which the last two are blocks or have one element."""
        scales = self.read_scales(self._scale_name)
        if scales.dim() > 0 and len(self.shape) == 3 and scales.shape[0] == self.shape[0]:
            if entry is not None:
                scales = scales[entry]
            elif scales.dim() == 1:
                scales = scales.reshape(-1, 1, 1)
        if scales.numel() == 1:
            return scales.reshape((1,) * dim)
        return scales.unsqueeze(-1) if scales.dim() < dim else scales


class Mxfp4Tensor(GroupedTensor):
    """Experts [E, N, K] in FP4 with a power of two for each 32 along K, which full precision stores as [E, K, N]."""

    is_transposed = True

    def __init__(self, name: str, source: TensorSource) -> None:
        self._blocks, self._scales = f"{name}_blocks", f"{name}_scales"
        shape = source.shape(self._blocks)
        groups = shape[-2] if len(shape) == 4 else 0
        full_shape = (*shape[:1], groups * _MXFP4_GROUP, *shape[1:2])
        super().__init__(name, source, full_shape, (self._blocks, self._scales))
        if len(shape) != 4 or shape[-1] != _MXFP4_GROUP // 2 or 0 in shape:
            raise self.error(
                self._blocks,
                f"has shape {list(shape)} and should have [experts, outputs, groups, 16]",
            )
        self.check_shape(self._scales, shape[:3])
        for stored_name in (self._blocks, self._scales):
            if source.dtype(stored_name) != torch.uint8:
                raise self.error(
                    stored_name, f"is stored as {source.dtype(stored_name)} and should be uint8"
                )

    @property
    def group_format(self) -> GroupFormat:
        return GroupFormat(4, _MXFP4_GROUP, has_offsets=False, table=FP4_DOUBLED)

    def read_grouped(self, entry: int | None = None) -> GroupedWeight:
        blocks = self._source.read(self._blocks, entry)
        exponents = self._source.read(self._scales, entry)
        if bool((exponents == 255).any()):
            raise self.error(self._scales, "has exponents that are not a number")
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
        scales = power_of_two(exponents.int() - 128)  # 127, and 1 because the values are doubled
        return GroupedWeight(self.group_format, codes, scales, None)
