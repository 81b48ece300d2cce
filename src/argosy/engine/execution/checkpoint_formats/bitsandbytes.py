"""bitsandbytes (Dettmers et al. 2023): NF4 and FP4 with a scale for each block, also quantized, and 8 bits by row."""

from __future__ import annotations

import json
import math
from functools import cached_property

import torch
from torch import Tensor

from argosy.engine.execution.checkpoint_formats.encoded import GroupedTensor, TensorSource
from argosy.engine.execution.checkpoint_formats.grouped_weight import (
    GroupedWeight,
    GroupFormat,
    choose_group_size,
    create_grouped_weight,
)

QUANT_STATE_PREFIX = "quant_state.bitsandbytes__"
_NF4_SCALE = 127
"""Factor by which the values of NF4, -1 to 1, are rounded to 8 bits."""
_INT8_SCALE = 127.0
_CODES = 16
_MAX_DIMENSION = 1 << 31


class Bnb4Tensor(GroupedTensor):
    """Matrix of 4-bit codes in blocks of the flattened matrix, with a table of values."""

    def __init__(self, prefix: str, source: TensorSource) -> None:
        self._values = f"{prefix}.weight"
        state_prefix = f"{self._values}.{QUANT_STATE_PREFIX}"
        self._state_name = next(name for name in source.files if name.startswith(state_prefix))
        self._scales = f"{self._values}.absmax"
        self._table = f"{self._values}.quant_map"
        self._nested = [
            f"{self._values}.{part}"
            for part in ("nested_absmax", "nested_quant_map")
            if f"{self._values}.{part}" in source.files
        ]
        try:
            state = json.loads(bytes(source.read(self._state_name).to(torch.uint8).tolist()))
            outs, cols = (int(size) for size in state["shape"])
            self._block_size = int(state["blocksize"])
            self._kind = str(state["quant_type"])
            self._nested_block_size = int(state.get("nested_blocksize", 256))
            self._nested_offset = float(state.get("nested_offset", 0.0))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f"{source.files[self._state_name]}: {self._state_name} is not a description of a matrix "
                f"({type(error).__name__}: {error}); the checkpoint is damaged, fetch it again"
            ) from error
        names = (self._values, self._scales, self._table, *self._nested, self._state_name)
        super().__init__(self._values, source, (outs, cols), names)
        if (
            not 0 < outs < _MAX_DIMENSION
            or not 0 < cols < _MAX_DIMENSION
            or not 0 < self._block_size < _MAX_DIMENSION
            or self._nested_block_size <= 0
            or not math.isfinite(self._nested_offset)
        ):
            raise self.error(self._state_name, f"describes a matrix of {[outs, cols]}")
        blocks = -(-outs * cols // self._block_size)
        for name, size in ((self._values, -(-outs * cols // 2)), (self._scales, blocks)):
            stored = source.shape(name) if name in source.files else (0,)
            if math.prod(stored) != size:
                raise self.error(
                    self._state_name,
                    f"describes {size} elements of {name}, which has shape {list(stored)}",
                )
        self.check_shape(self._table, (_CODES,))

    @cached_property
    def _table_values(self) -> Tensor:
        return self.read_scales(self._table)

    @property
    def group_format(self) -> GroupFormat | None:
        size = choose_group_size(self._block_size, self.shape[1])
        if self._kind != "nf4" or self.shape[1] % self._block_size or size is None:
            return None  # blocks that span rows, or FP4, whose smallest value would be lost
        rounded = (self._table_values * _NF4_SCALE).round()
        if float(rounded.abs().max()) > _NF4_SCALE:
            return None
        return GroupFormat(4, size, has_offsets=False, table=tuple(map(int, rounded.tolist())))

    def read_grouped(self, entry: int | None = None) -> GroupedWeight:
        del entry
        group_format = self.group_format
        if group_format is None:
            raise self.error(self._values, "has blocks that the kernels do not support")
        scales = self._block_scales().view(self.shape[0], -1) / _NF4_SCALE
        return create_grouped_weight(
            group_format, self._codes().view(self.shape), scales, None, self._block_size
        )

    def dequantize(self, entry: int | None = None) -> Tensor:
        del entry
        values = self._table_values[self._codes().int()]
        scales = self._block_scales().repeat_interleave(self._block_size)[: values.numel()]
        return values.mul_(scales).view(self.shape)

    def _codes(self) -> Tensor:
        """Read the codes, flattened. The first of two is in the high half of a byte."""
        data = self._source.read(self._values).contiguous().view(torch.uint8).flatten()
        return torch.stack([data >> 4, data & 15], -1).flatten()[: math.prod(self.shape)]

    def _block_scales(self) -> Tensor:
        """Read the scales, which may themselves be codes of 8 bits in blocks."""
        if len(self._nested) < 2:
            return self.read_scales(self._scales).flatten()
        codes = self._source.read(self._scales).flatten()
        nested_scales, table = (self.read_scales(name).flatten() for name in self._nested)
        blocks = -(-codes.numel() // self._nested_block_size)
        if codes.dtype != torch.uint8 or table.numel() != 256 or nested_scales.numel() != blocks:
            raise self.error(self._scales, "does not fit its nested scales")
        repeated = nested_scales.repeat_interleave(self._nested_block_size)[: codes.numel()]
        return table[codes.int()] * repeated + self._nested_offset


class Bnb8Tensor(GroupedTensor):
    """Matrix of 8-bit integers with the largest magnitude of each row."""

    def __init__(self, prefix: str, source: TensorSource) -> None:
        name = f"{prefix}.weight"
        self._scales, self._layout = f"{prefix}.SCB", f"{prefix}.weight_format"
        layout = [self._layout] if self._layout in source.files else []
        super().__init__(name, source, source.shape(name), (name, self._scales, *layout))
        if len(self.shape) != 2:
            raise self.error(name, f"has shape {list(self.shape)} and should be a matrix")
        self.check_shape(self._scales, self.shape[:1])
        if source.dtype(name) != torch.int8:
            raise self.error(name, f"is stored as {source.dtype(name)} and should be int8")
        if layout and bool(source.read(self._layout).any()):
            raise self.error(self._layout, "is not 0; save the model in the row layout")

    @property
    def group_format(self) -> GroupFormat:
        return GroupFormat(8, 256, has_offsets=False)

    def read_grouped(self, entry: int | None = None) -> GroupedWeight:
        del entry
        scales = self.read_scales(self._scales).unsqueeze(1) / _INT8_SCALE
        values = self._source.read(self.name)
        return create_grouped_weight(self.group_format, values, scales, None, self.shape[1])
