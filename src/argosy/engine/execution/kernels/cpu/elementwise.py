"""Norms and gated activations on the CPU, by native kernels or in torch.

Every result depends only on its own token's row, bit for bit, whatever else is in the batch. Torch's fused activations
use other instructions for the last elements of an array than for the rest. The torch gates here therefore combine
operations that treat all elements alike.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

from argosy.engine.execution.kernels.cpu.native_calls import GatedActivationCall, NormCall
from argosy.engine.execution.kernels.cpu.native_kernels import Kernels, load_kernels
from argosy.native import NativeUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.execution.architectures.model_architecture import Activation, NormKind

GATE_CHUNK_ROWS = 32
"""Number of rows that a torch gate computes at a time, so that its float32 intermediates stay in the CPU cache."""


class Norm(Protocol):
    """RMS norm (Zhang & Sennrich 2019) over the last dimension, in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x, [T, size] or [T, heads, size] with its last two dimensions contiguous."""
        ...

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        """Add delta to x [T, size] in place, rounded to x's dtype, and return the normalized sum."""
        ...


class ElementwiseOps(Protocol):
    """Factory of a device's row operations."""

    def create_norm(self, kind: NormKind, weight: Tensor, eps: float) -> Norm:
        """Create the norm with weight [size], in the weight's dtype."""
        ...

    def create_gated_activation(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """Create a function that maps [T, 2 * size] to activation(first half, second half), [T, size]."""
        ...


def create_cpu_elementwise_ops(
    threads: int, kernels: Callable[[], Kernels] = load_kernels
) -> ElementwiseOps:
    """Create the native operations if the kernels are available, else torch's."""
    try:
        return NativeElementwiseOps(kernels(), threads)
    except NativeUnavailableError:
        return TorchElementwiseOps()  # `create_cpu_attention` logs the reason


def norm_scale(kind: NormKind, weight: Tensor) -> Tensor:
    """Return the float32 factor of a norm, which is the weight, or 1 + weight for kind "offset"."""
    scale = weight.detach().float()
    return scale + 1.0 if kind == "offset" else scale.contiguous()


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


@dataclass(frozen=True, slots=True)
class TorchElementwiseOps:
    """Row operations in plain torch."""

    def create_norm(self, kind: NormKind, weight: Tensor, eps: float) -> Norm:
        return TorchNorm(kind, weight, eps)

    def create_gated_activation(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        activate = _ACTIVATIONS[activation]

        def compute(x: Tensor) -> Tensor:
            parts = []
            for rows in x.split(GATE_CHUNK_ROWS):
                gate, up = rows.chunk(2, -1)
                parts.append(activate(gate.float(), up.float()).to(up.dtype))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return compute


class TorchNorm:
    """Norm in plain torch."""

    def __init__(self, kind: NormKind, weight: Tensor, eps: float) -> None:
        self._rounded_weight = weight.detach() if kind == "narrow" else None
        self._scale = norm_scale(kind, weight)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        if self._rounded_weight is not None:
            return F.rms_norm(x, shape, None, self._eps).mul_(self._rounded_weight)
        return F.rms_norm(x.float(), shape, None, self._eps).mul_(self._scale).to(x.dtype)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        return self(x.add_(delta))


def _silu(x: Tensor, up: Tensor) -> Tensor:
    """Compute SiLU, x * sigmoid(x) (Elfwing et al. 2017), times up."""
    return x.div(x.neg().exp_().add_(1.0)).mul_(up)


def _gelu_tanh(x: Tensor, up: Tensor) -> Tensor:
    """Compute the tanh approximation of GELU (Hendrycks & Gimpel 2016), times up."""
    inner = (x * x).mul_(0.044715).add_(1.0).mul_(x).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5).mul_(up)


def _clamped_swiglu(x: Tensor, up: Tensor) -> Tensor:
    """Compute the activation of gpt-oss."""
    gate = x.clamp(max=7.0)
    scaled = gate.mul(-1.702).exp_().add_(1.0)
    return gate.div_(scaled).mul_(up.clamp(-7.0, 7.0).add_(1.0))


def _sigmoid(x: Tensor, up: Tensor) -> Tensor:
    """Compute sigmoid(x) times up."""
    return up / x.neg().exp_().add_(1.0)


_ACTIVATIONS: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "clamped_swiglu": _clamped_swiglu,
    "sigmoid": _sigmoid,
}
"""Functions of float32 gate and up."""
