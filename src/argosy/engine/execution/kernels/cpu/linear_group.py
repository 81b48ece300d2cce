"""Linear layers with grouped weights on the CPU, with bit-identical native and torch implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from argosy.engine.execution.checkpoint_formats.grouped_weight import (
    GroupedSource,
    GroupedWeight,
    grouped_linear,
)
from argosy.engine.execution.kernels.cpu.linear import NativeMatmul
from argosy.engine.execution.kernels.cpu.native_calls import LinearGroupCall
from argosy.engine.execution.kernels.cpu.native_kernels import Kernels, load_kernels
from argosy.engine.execution.kernels.pack_cache import PackedWeightProvider
from argosy.native import NativeUnavailableError


def create_group_linear(
    source: GroupedSource, bias: Tensor | None, threads: int, get_packed: PackedWeightProvider
) -> Callable[[Tensor], Tensor]:
    """Return a function that maps [T, K] to [T, N]. The weight is read unless `get_packed` has its packed form."""
    try:
        kernels = load_kernels()
    except NativeUnavailableError:
        return TorchGroupLinear(source.read(), bias)  # `create_cpu_attention` logs the reason
    return NativeGroupLinear(kernels, source, bias, threads, get_packed)


class NativeGroupLinear:
    """Linear layer by csrc/linear_group.cpp."""

    def __init__(
        self,
        kernels: Kernels,
        source: GroupedSource,
        bias: Tensor | None,
        threads: int,
        get_packed: PackedWeightProvider,
    ) -> None:
        """Pack the weight."""
        group_kernels = kernels.linear_group[source.format.bits]
        self._compute = group_kernels.linear_by_dtype
        size, has_offsets = source.format.group_size, int(source.format.has_offsets)

        def pack(packed: Tensor) -> None:
            weight = source.read()
            values, scales = weight.values.contiguous(), weight.scales.contiguous()
            offsets = None if weight.offsets is None else weight.offsets.contiguous()
            group_kernels.pack(
                values.data_ptr(),
                scales.data_ptr(),
                None if offsets is None else offsets.data_ptr(),
                *source.shape,
                size,
                packed.data_ptr(),
                threads,
            )

        packed = get_packed(group_kernels.packed_bytes(*source.shape, size, has_offsets), pack)
        self._table = torch.tensor(source.format.table, dtype=torch.int8).view(torch.uint8) ^ 128
        create_call = partial(
            LinearGroupCall, table=self._table.data_ptr(), group=size, has_offsets=has_offsets
        )
        self._matmul = NativeMatmul(packed, source.shape[0], bias, threads, create_call)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        if x.dtype not in self._compute:
            return self(x.float()).to(x.dtype)
        return self._matmul(self._compute[x.dtype], x)


class TorchGroupLinear:
    """Linear layer in plain torch, with the values as 8-bit integers."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        self._weight = replace(weight, values=weight.to_int8())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        return grouped_linear(x, self._weight, self._bias)
