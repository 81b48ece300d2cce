"""GPTQ (Frantar et al. 2022) and AWQ (Lin et al. 2023): integers of 2, 4 or 8 bits in words, with zero points."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from argosy.engine.execution.checkpoint_formats.encoded import (
    GroupedTensor,
    TensorSource,
    matrix_shape,
    unpack_integers,
)
from argosy.engine.execution.checkpoint_formats.grouped_weight import (
    GroupedWeight,
    GroupFormat,
    choose_group_size,
    create_grouped_weight,
)
from argosy.engine.execution.checkpoint_formats.quantization_config import QuantizationConfig

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word that holds each of eight neighbouring outputs."""
_WORD_BITS = 32


class ZeroPointTensor(GroupedTensor):
    """Matrix [N, K] of weights (code - zero point) * scale, whose codes are unsigned integers of `bits`."""

    def __init__(
        self,
        name: str,
        source: TensorSource,
        shape: tuple[int, int],
        stored_names: Sequence[str],
        bits: int,
        stored_group_size: int,
    ) -> None:
        super().__init__(name, source, shape, stored_names)
        self._bits = bits
        self._stored_group_size = stored_group_size

    def check_words(self, values: str, zeros: str, scales: str) -> None:
        """Check the number of groups, and that codes and zero points are packed in 32-bit words."""
        groups, cols = self._source.shape(scales)[0], self.shape[1]
        if groups != -(-cols // self._stored_group_size):
            raise self.error(scales, f"has {groups} groups for {cols} columns")
        for name in (values, zeros):
            if (dtype := self._source.dtype(name)) != torch.int32:
                raise self.error(name, f"is stored as {dtype} and should be int32")

    @abstractmethod
    def read_codes(self) -> Tensor:
        """Read the codes, [N, K] uint8."""

    @abstractmethod
    def read_group_scales(self) -> Tensor:
        """Read the scales, [N, groups] float32."""

    @abstractmethod
    def read_zeros(self) -> Tensor:
        """Read the zero points, [N or 1, groups or 1] int32."""

    def group_index(self) -> Tensor:
        """Return the group of each column, [K]."""
        return torch.arange(self.shape[1]) // self._stored_group_size

    @cached_property
    def _common_zero(self) -> int | None:
        """The zero point, if all are equal."""
        zeros = self.read_zeros()
        first = int(zeros.flatten()[0])
        return first if bool((zeros == first).all()) else None

    @property
    def group_format(self) -> GroupFormat | None:
        size = choose_group_size(self._stored_group_size, self.shape[1])
        zero = self._common_zero
        if size is None:
            return None
        if self._bits == 8:
            return GroupFormat(8, size, has_offsets=zero != 128)
        if zero is None:
            return GroupFormat(4, size, has_offsets=True)
        return GroupFormat(4, size, has_offsets=False, table=tuple(i - zero for i in range(16)))

    def read_grouped(self, entry: int | None = None) -> GroupedWeight:
        del entry
        group_format, order = self.group_format, self.column_order()
        if group_format is None:
            raise self.error(self.stored_names[0], "has groups that the kernels do not support")
        codes, scales = self.read_codes(), self.read_group_scales()
        if order is not None:
            codes = codes[:, order]
        offsets = None
        if group_format.has_offsets:
            middle = 128 if self._bits == 8 else 0
            offsets = (middle - self.read_zeros()).float() * scales
        if self._bits == 8:
            codes = (codes ^ 128).view(torch.int8)
        return create_grouped_weight(group_format, codes, scales, offsets, self._stored_group_size)

    def dequantize(self, entry: int | None = None) -> Tensor:
        del entry
        groups = self.group_index()
        scales = self.read_group_scales()
        zeros = self.read_zeros().expand(scales.shape).float()
        return (self.read_codes().float() - zeros[:, groups]).mul_(scales[:, groups])


class _Columns(NamedTuple):
    """Assignment of columns to groups."""

    groups: Tensor
    """Group of each column."""
    order: Tensor | None
    """Columns ordered by group, or None if they are stored so."""
    has_equal_groups: bool


class GptqTensor(ZeroPointTensor):
    """Matrix as GPTQ stores it, in words along K, with a group for each column if there is a `g_idx`."""

    def __init__(self, prefix: str, source: TensorSource, config: QuantizationConfig) -> None:
        self._prefix = prefix
        self._names = [f"{prefix}.{part}" for part in ("qweight", "qzeros", "scales")]
        values, zeros, scales = self._names
        self._group_index_name = f"{prefix}.g_idx" if f"{prefix}.g_idx" in source.files else None
        word_rows, outs = matrix_shape(source, values)
        groups, _ = matrix_shape(source, scales)
        bits = config.bits or 4
        if self._group_index_name is not None and word_rows:
            (cols,) = source.shape(self._group_index_name) or (0,)
            bits = word_rows * _WORD_BITS // max(cols, 1)  # single matrices may have other bits
        cols = word_rows * _WORD_BITS // bits if bits in (2, 4, 8) else 0
        super().__init__(
            f"{prefix}.weight",
            source,
            (outs, cols),
            [*self._names, *([self._group_index_name] if self._group_index_name else [])],
            bits,
            group_size_of(config, cols, groups),
        )
        if cols == 0:
            raise self.error(values, f"has shape {[word_rows, outs]}, which fits no number of bits")
        self._zero_point_shift = config.zero_point_shift
        self.check_shape(scales, (groups, outs))
        self.check_shape(zeros, (groups, -(-outs * bits // _WORD_BITS)))
        self.check_words(values, zeros, scales)

    def read_codes(self) -> Tensor:
        packed = self._source.read(self._names[0])
        return unpack_integers(packed.T, self._bits)

    def read_group_scales(self) -> Tensor:
        return self.read_scales(self._names[2]).T

    def read_zeros(self) -> Tensor:
        unpacked = unpack_integers(self._source.read(self._names[1]), self._bits)
        return unpacked[:, : self.shape[0]].T.int() + self._zero_point_shift

    def group_index(self) -> Tensor:
        return self._columns.groups

    def column_order(self) -> Tensor | None:
        return self._columns.order

    @property
    def group_format(self) -> GroupFormat | None:
        return super().group_format if self._columns.has_equal_groups else None

    @cached_property
    def _columns(self) -> _Columns:
        plain = super().group_index()
        if self._group_index_name is None:
            return _Columns(plain, None, has_equal_groups=True)
        groups = self._source.read(self._group_index_name).long()
        num_groups = self._source.shape(self._names[2])[0]
        low, high = torch.aminmax(groups)
        if int(low) < 0 or int(high) >= num_groups:
            raise self.error(
                self._group_index_name, f"has groups {int(low)} to {int(high)} of {num_groups}"
            )
        if torch.equal(groups, plain):
            return _Columns(plain, None, has_equal_groups=True)
        order = groups.argsort(stable=True)
        return _Columns(groups, order, has_equal_groups=torch.equal(groups[order], plain))


class AwqTensor(ZeroPointTensor):
    """Matrix as AWQ's gemm layout stores it, in words of eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    def __init__(self, prefix: str, source: TensorSource, config: QuantizationConfig) -> None:
        self._names = [f"{prefix}.{part}" for part in ("qweight", "qzeros", "scales")]
        values, zeros, scales = self._names
        cols, words = matrix_shape(source, values)
        groups, outs = matrix_shape(source, scales)
        group_size = group_size_of(config, cols, groups)
        super().__init__(f"{prefix}.weight", source, (outs, cols), self._names, 4, group_size)
        if words * 8 != outs:
            raise self.error(values, f"has {words} words for {outs} outputs")
        self.check_shape(zeros, (groups, words))
        self.check_words(values, zeros, scales)

    def read_codes(self) -> Tensor:
        return self._unpack(self._names[0]).T.contiguous()

    def read_group_scales(self) -> Tensor:
        return self.read_scales(self._names[2]).T

    def read_zeros(self) -> Tensor:
        return self._unpack(self._names[1]).T.int()

    def _unpack(self, name: str) -> Tensor:
        codes = unpack_integers(self._source.read(name), 4)
        ordered: Tensor = codes.unflatten(1, (-1, 8))[:, :, list(_AWQ_ORDER)]
        return ordered.flatten(1)


def group_size_of(config: QuantizationConfig, cols: int, groups: int) -> int:
    """Return the elements that share a scale. The shapes decide if single matrices have another size."""
    size = config.group_size or cols
    if groups == -(-cols // max(size, 1)):
        return max(size, 1)
    return max(-(-cols // groups), 1)
