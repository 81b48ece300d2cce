"""Linears with weights of 8 or 4 bits on the CPU: native where a compiler is, else torch, bit for bit the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from argosy.engine.execution.linear_cpu import NativeProduct
from argosy.engine.execution.native_kernels import Kernels, load_kernels
from argosy.engine.execution.pack_cache import in_memory
from argosy.engine.execution.quantization import NOT_FINITE, quantize_weight, quantized_linear
from argosy.native import NativeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.engine_config import IntFormat
    from argosy.engine.execution.pack_cache import Keep


def int_linear(
    weight: Tensor, bias: Tensor | None, form: IntFormat, threads: int, keep: Keep = in_memory
) -> Callable[[Tensor], Tensor]:
    """Round weight [N, K] and pack it; the result maps [T, K] to [T, N] in their dtype."""
    try:
        return NativeIntLinear(load_kernels(), weight, bias, form, threads, keep)
    except NativeUnavailable:
        return TorchIntLinear(weight, bias, form)  # the attention's log line says why


class NativeIntLinear:
    """csrc/linear_int.cpp: integer products by the best unit of this CPU."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None,
        form: IntFormat,
        threads: int,
        keep: Keep = in_memory,
    ) -> None:
        """`weight` may be on meta where `keep` has what it packs to."""
        outs, cols = weight.shape
        native = kernels.linear_int[form]
        self._compute = native.compute

        def pack(packed: Tensor) -> None:
            dense = weight.detach().contiguous()
            if dense.dtype not in native.pack:
                dense = dense.float()
            finite = native.pack[dense.dtype](
                dense.data_ptr(), outs, cols, packed.data_ptr(), threads
            )
            if not finite:
                raise ValueError(NOT_FINITE)

        packed = keep(native.size(outs, cols), pack)
        self._product = NativeProduct(packed, outs, bias, threads)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        if x.dtype not in self._compute:
            return self(x.float()).to(x.dtype)
        return self._product(self._compute[x.dtype], x)


class TorchIntLinear:
    """The same in plain torch, the weight as whole numbers of 8 bits in both formats."""

    def __init__(self, weight: Tensor, bias: Tensor | None, form: IntFormat) -> None:
        self._integers = torch.empty(weight.shape, dtype=torch.int8)
        scales: list[Tensor] = []
        row = 0
        for part in quantize_weight(weight, form):
            self._integers[row : row + len(part.values)] = part.integers()
            scales.append(part.scales)
            row += len(part.values)
        self._scales = torch.cat(scales)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        return quantized_linear(x, self._integers, self._scales, self._bias)
