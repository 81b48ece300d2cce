"""Norms and gated activations on the CPU, by native kernels if they build.

Every result depends only on its own token's row, bit for bit, whatever else is in the batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from argosy.engine.execution.architectures.decoder import Activation, NormKind
from argosy.engine.execution.kernels.cpu.native_calls import GatedActivationCall, NormCall
from argosy.engine.execution.kernels.cpu.native_kernels import Kernels, load_kernels
from argosy.engine.execution.kernels.operations import ElementwiseOps, Norm, norm_scale
from argosy.engine.execution.kernels.torch.elementwise import TorchElementwiseOps, TorchNorm
from argosy.native import NativeUnavailableError


def create_cpu_elementwise_ops(
    threads: int, kernels: Callable[[], Kernels] = load_kernels
) -> ElementwiseOps:
    """Create the native operations if the kernels are available, else torch's."""
    try:
        return NativeElementwiseOps(kernels(), threads)
    except NativeUnavailableError:
        return TorchElementwiseOps()  # `create_cpu_attention` logs the reason


@dataclass(frozen=True, slots=True)
class NativeElementwiseOps:
    """Row operations by csrc/elementwise.cpp for bfloat16 and float32, else by torch. Not thread-safe."""

    kernels: Kernels
    threads: int

    def create_norm(self, kind: NormKind, weight: Tensor, eps: float) -> Norm:
        if weight.dtype not in self.kernels.norm:
            return TorchNorm(kind, weight, eps)
        return _NativeNorm(self, kind, weight, eps)

    def create_gated_activation(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        functions = self.kernels.gated_activation[activation]
        call = GatedActivationCall(threads=self.threads)

        def compute(x: Tensor) -> Tensor:
            if x.dtype not in functions:
                return TorchElementwiseOps().create_gated_activation(activation)(x)
            x = x.contiguous()
            rows, size = len(x), x.shape[1] // 2
            out = torch.empty((rows, size), dtype=x.dtype)
            call.x, call.out, call.rows, call.size = x.data_ptr(), out.data_ptr(), rows, size
            functions[x.dtype](ctypes.addressof(call))
            return out

        return compute


class _NativeNorm:
    """Norm by csrc/elementwise.cpp. Not thread-safe, because all calls share one argument structure."""

    def __init__(
        self, ops: NativeElementwiseOps, kind: NormKind, weight: Tensor, eps: float
    ) -> None:
        self._run = ops.kernels.norm[weight.dtype]
        self._scale = norm_scale(kind, weight)
        self._call = NormCall(
            weight=self._scale.data_ptr(),
            size=len(weight),
            round_before_weight=kind == "narrow",
            threads=ops.threads,
            eps=eps,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x, None)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        return self._compute(x, delta.contiguous().data_ptr())

    def _compute(self, x: Tensor, delta_pointer: int | None) -> Tensor:
        call = self._call
        *outer_strides, row_stride, element_stride = x.stride()
        if element_stride != 1 or (outer_strides and row_stride != call.size):
            x = x.contiguous()
            *outer_strides, row_stride, _ = x.stride()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        call.x, call.delta, call.out = x.data_ptr(), delta_pointer, out.data_ptr()
        call.outer_size, call.x_stride = len(x), outer_strides[0] if outer_strides else row_stride
        call.inner_size = x.shape[1] if outer_strides else 1
        self._run(ctypes.addressof(call))
        return out
