"""What a layer does to rows between its matrices, on the CPU: norms and gates, native or torch.

Every result depends on its own token's row only, bit for bit, whatever else is in the batch. Fused
activations of torch compute the last elements of an array with other instructions than the rest, so
the torch gates here are made of operations that do not.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

from argosy.engine.execution.native_calls import GatedActivationCall, NormCall
from argosy.engine.execution.native_kernels import Kernels, load_kernels
from argosy.native import NativeUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.execution.model_architecture import Activation, NormKind

GATE_CHUNK_ROWS = 32
"""Rows that a torch gate handles at a time, so that its float32 intermediates stay in the cache."""


class Norm(Protocol):
    """RMS norm (Zhang & Sennrich 2019) over the last dimension, in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] or [T, heads, size], its last two dimensions contiguous, to the same shape."""
        ...

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        """Add mixed to x [T, size], in place and rounded, and norm that."""
        ...


class ElementwiseOps(Protocol):
    """The operations on rows that a device offers."""

    def create_norm(self, kind: NormKind, weight: Tensor, eps: float) -> Norm:
        """The norm with weight [size], which says the dtype."""
        ...

    def create_gated_activation(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """[T, 2 * size] to activation(first half) * second half, [T, size]."""
        ...


def create_cpu_elementwise_ops(
    threads: int, kernels: Callable[[], Kernels] = load_kernels
) -> ElementwiseOps:
    """The native operations where they can be had, else torch's."""
    try:
        return NativeElementwiseOps(kernels(), threads)
    except NativeUnavailableError:
        return TorchElementwiseOps()  # the attention's log line says why


def norm_scale(kind: NormKind, weight: Tensor) -> Tensor:
    """What a norm multiplies by, float32: the weight, or 1 + weight where it is stored so."""
    wide = weight.detach().float()
    return wide + 1.0 if kind == "offset" else wide.contiguous()


@dataclass(frozen=True, slots=True)
class NativeElementwiseOps:
    """csrc/rows.cpp for bfloat16 and float32, torch for other dtypes; for one thread at a time."""

    kernels: Kernels
    threads: int

    def create_norm(self, kind: NormKind, weight: Tensor, eps: float) -> Norm:
        """See `RowOps`."""
        if weight.dtype not in self.kernels.norm:
            return TorchNorm(kind, weight, eps)
        return _NativeNorm(self, kind, weight, eps)

    def create_gated_activation(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """See `RowOps`."""
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
    """A norm by csrc/rows.cpp; its call is kept and refilled, so it serves one thread at a time."""

    def __init__(
        self, ops: NativeElementwiseOps, kind: NormKind, weight: Tensor, eps: float
    ) -> None:
        self._run = ops.kernels.norm[weight.dtype]
        self._scale = norm_scale(kind, weight)
        self._call = NormCall(
            weight=self._scale.data_ptr(),
            size=len(weight),
            narrow=kind == "narrow",
            threads=ops.threads,
            eps=eps,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x, None)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        return self._compute(x, delta.contiguous().data_ptr())

    def _compute(self, x: Tensor, added: int | None) -> Tensor:
        call = self._call
        *outer, between, within = x.stride()
        if within != 1 or (outer and between != call.size):
            x = x.contiguous()
            *outer, between, _ = x.stride()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        call.x, call.add, call.out = x.data_ptr(), added, out.data_ptr()
        call.outer, call.x_stride = len(x), outer[0] if outer else between
        call.inner = x.shape[1] if outer else 1
        self._run(ctypes.addressof(call))
        return out


@dataclass(frozen=True, slots=True)
class TorchElementwiseOps:
    """The same in plain torch."""

    def create_norm(self, kind: NormKind, weight: Tensor, eps: float) -> Norm:
        """See `RowOps`."""
        return TorchNorm(kind, weight, eps)

    def create_gated_activation(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """See `RowOps`."""
        activate = _ACTIVATIONS[activation]

        def compute(x: Tensor) -> Tensor:
            parts = []
            for rows in x.split(GATE_CHUNK_ROWS):
                gate, up = rows.chunk(2, -1)
                parts.append(activate(gate.float()).mul_(up).to(up.dtype))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return compute


class TorchNorm:
    """A norm in plain torch."""

    def __init__(self, kind: NormKind, weight: Tensor, eps: float) -> None:
        self._rounded_weight = weight.detach() if kind == "narrow" else None
        self._scale = norm_scale(kind, weight)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        shape = (x.shape[-1],)
        if self._rounded_weight is not None:
            return F.rms_norm(x, shape, None, self._eps).mul_(self._rounded_weight)
        return F.rms_norm(x.float(), shape, None, self._eps).mul_(self._scale).to(x.dtype)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        """See `Norm`."""
        return self(x.add_(delta))


def _silu(x: Tensor) -> Tensor:
    """SiLU, x * sigmoid(x) (Elfwing et al. 2017), float32."""
    return x.div(x.neg().exp_().add_(1.0))


def _gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh approximation (Hendrycks & Gimpel 2016), float32."""
    inner = (x * x).mul_(0.044715).add_(1.0).mul_(x).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
}
