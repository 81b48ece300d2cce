"""Linear layers with int8 or int4 weights on the CPU, with bit-identical native and torch implementations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from argosy.engine.engine_config import IntFormat
from argosy.engine.execution.checkpoint_formats.quantization import (
    NON_FINITE_WEIGHT,
    quantize_weight,
    quantized_linear,
)
from argosy.engine.execution.kernels.cpu.linear import NativeMatmul
from argosy.engine.execution.kernels.cpu.native_kernels import Kernels, load_kernels
from argosy.engine.execution.kernels.pack_cache import PackedWeightProvider, pack_in_memory
from argosy.native import NativeUnavailableError


def create_int_linear(
    weight: Tensor,
    bias: Tensor | None,
    weight_format: IntFormat,
    threads: int,
    get_packed: PackedWeightProvider = pack_in_memory,
) -> Callable[[Tensor], Tensor]:
    """Quantize and pack weight [N, K], and return a function that maps [T, K] to [T, N] in its dtype."""
    try:
        return NativeIntLinear(load_kernels(), weight, bias, weight_format, threads, get_packed)
    except NativeUnavailableError:
        return TorchIntLinear(weight, bias, weight_format)  # `create_cpu_attention` logs the reason


class NativeIntLinear:
    """Linear layer by csrc/linear_int.cpp, with integer products on the fastest unit of this CPU."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None,
        weight_format: IntFormat,
        threads: int,
        get_packed: PackedWeightProvider = pack_in_memory,
    ) -> None:
        """Quantize and pack the weight, which may be on `meta` if `get_packed` has its packed form."""
        outs, cols = weight.shape
        int_kernels = kernels.linear_int[weight_format]
        self._compute = int_kernels.linear_by_dtype

        def pack(packed: Tensor) -> None:
            dense = weight.detach().contiguous()
            if dense.dtype not in int_kernels.pack_by_dtype:
                dense = dense.float()
            is_finite = int_kernels.pack_by_dtype[dense.dtype](
                dense.data_ptr(), outs, cols, packed.data_ptr(), threads
            )
            if not is_finite:
                raise ValueError(NON_FINITE_WEIGHT)

        packed = get_packed(int_kernels.packed_bytes(outs, cols), pack)
        self._matmul = NativeMatmul(packed, outs, bias, threads)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        if x.dtype not in self._compute:
            return self(x.float()).to(x.dtype)
        return self._matmul(self._compute[x.dtype], x)


class TorchIntLinear:
    """Linear layer in plain torch, with the weight as 8-bit integers in both formats."""

    def __init__(self, weight: Tensor, bias: Tensor | None, weight_format: IntFormat) -> None:
        self._integers = torch.empty(weight.shape, dtype=torch.int8)
        scales: list[Tensor] = []
        row = 0
        for part in quantize_weight(weight, weight_format):
            self._integers[row : row + len(part.values)] = part.to_int8()
            scales.append(part.scales)
            row += len(part.values)
        self._scales = torch.cat(scales)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        return quantized_linear(x, self._integers, self._scales, self._bias)
