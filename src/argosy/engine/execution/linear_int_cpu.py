"""Linears with weights of 8 or 4 bits on the CPU: native where a compiler is, else torch, bit for bit the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from argosy.engine.execution.linear_cpu import NativeMatmul
from argosy.engine.execution.native_kernels import Kernels, load_kernels
from argosy.engine.execution.pack_cache import pack_in_memory
from argosy.engine.execution.quantization import (
    NON_FINITE_WEIGHT,
    quantize_weight,
    quantized_linear,
)
from argosy.native import NativeUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.engine_config import IntFormat
    from argosy.engine.execution.pack_cache import PackedWeightProvider


def create_int_linear(
    weight: Tensor,
    bias: Tensor | None,
    weight_format: IntFormat,
    threads: int,
    get_packed: PackedWeightProvider = pack_in_memory,
) -> Callable[[Tensor], Tensor]:
    """Round weight [N, K] and pack it; the result maps [T, K] to [T, N] in their dtype."""
    try:
        return NativeIntLinear(load_kernels(), weight, bias, weight_format, threads, get_packed)
    except NativeUnavailableError:
        return TorchIntLinear(weight, bias, weight_format)  # the attention's log line says why


class NativeIntLinear:
    """csrc/linear_int.cpp: integer products by the best unit of this CPU."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None,
        weight_format: IntFormat,
        threads: int,
        get_packed: PackedWeightProvider = pack_in_memory,
    ) -> None:
        """`weight` may be on meta where `keep` has what it packs to."""
        outs, cols = weight.shape
        native = kernels.linear_int[weight_format]
        self._compute = native.linear_by_dtype

        def pack(packed: Tensor) -> None:
            dense = weight.detach().contiguous()
            if dense.dtype not in native.pack_by_dtype:
                dense = dense.float()
            finite = native.pack_by_dtype[dense.dtype](
                dense.data_ptr(), outs, cols, packed.data_ptr(), threads
            )
            if not finite:
                raise ValueError(NON_FINITE_WEIGHT)

        packed = get_packed(native.packed_bytes(outs, cols), pack)
        self._matmul = NativeMatmul(packed, outs, bias, threads)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        if x.dtype not in self._compute:
            return self(x.float()).to(x.dtype)
        return self._matmul(self._compute[x.dtype], x)


class TorchIntLinear:
    """The same in plain torch, the weight as whole numbers of 8 bits in both formats."""

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
        """[T, K] to [T, N]."""
        return quantized_linear(x, self._integers, self._scales, self._bias)
