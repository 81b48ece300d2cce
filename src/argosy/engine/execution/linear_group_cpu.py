"""Linear layers with grouped weights on the CPU, with bit-identical native and torch implementations."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from argosy.engine.execution.grouped_weight import GroupedWeight, grouped_linear
from argosy.engine.execution.linear_cpu import NativeMatmul
from argosy.engine.execution.native_calls import LinearGroupCall
from argosy.engine.execution.native_kernels import Kernels, load_kernels
from argosy.native import NativeUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.execution.grouped_weight import GroupFormat
    from argosy.engine.execution.pack_cache import PackedWeightProvider


def create_group_linear(
    group_format: GroupFormat,
    shape: tuple[int, int],
    read_weight: Callable[[], GroupedWeight],
    bias: Tensor | None,
    *,
    threads: int,
    get_packed: PackedWeightProvider,
) -> Callable[[Tensor], Tensor]:
    """Return a function that maps [T, K] to [T, N]. `read_weight` is called unless `get_packed` has the packed form."""
    try:
        kernels = load_kernels()
    except NativeUnavailableError:
        return TorchGroupLinear(read_weight(), bias)  # `create_cpu_attention` logs the reason
    return NativeGroupLinear(
        kernels, group_format, shape, read_weight, bias, threads=threads, get_packed=get_packed
    )


class NativeGroupLinear:
    """Linear layer by csrc/linear_group.cpp."""

    def __init__(
        self,
        kernels: Kernels,
        group_format: GroupFormat,
        shape: tuple[int, int],
        read_weight: Callable[[], GroupedWeight],
        bias: Tensor | None,
        *,
        threads: int,
        get_packed: PackedWeightProvider,
    ) -> None:
        """Pack the weight."""
        self._num_outputs = shape[0]
        self._format = group_format
        group_kernels = kernels.linear_group[group_format.bits]
        self._compute = group_kernels.linear_by_dtype
        size, has_offsets = group_format.group_size, int(group_format.has_offsets)

        def pack(packed: Tensor) -> None:
            weight = read_weight()
            values, scales = weight.values.contiguous(), weight.scales.contiguous()
            offsets = None if weight.offsets is None else weight.offsets.contiguous()
            group_kernels.pack(
                values.data_ptr(),
                scales.data_ptr(),
                None if offsets is None else offsets.data_ptr(),
                *shape,
                size,
                packed.data_ptr(),
                threads,
            )

        self._packed = get_packed(group_kernels.packed_bytes(*shape, size, has_offsets), pack)
        self._table = torch.tensor(group_format.table, dtype=torch.int8).view(torch.uint8) ^ 128
        self._threads = threads
        padding = (0, -self._num_outputs % NativeMatmul.OUTPUT_BLOCK)
        self._bias = None if bias is None else F.pad(bias.detach().float(), padding)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        if x.dtype not in self._compute:
            return self(x.float()).to(x.dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, cols = x.shape
        out = torch.empty(rows, self._num_outputs, dtype=x.dtype)
        call = LinearGroupCall(
            x.data_ptr(),
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            self._table.data_ptr(),
            rows,
            cols,
            self._num_outputs,
            x.stride(0),
            self._threads,
            self._format.group_size,
            int(self._format.has_offsets),
        )
        self._compute[x.dtype](ctypes.addressof(call))
        return out


class TorchGroupLinear:
    """Linear layer in plain torch, with the values as 8-bit integers."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        self._weight = replace(weight, values=weight.to_int8())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        return grouped_linear(x, self._weight, self._bias)
