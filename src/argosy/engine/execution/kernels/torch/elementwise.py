"""Norms and gated activations in torch.

Every result depends only on its own token's row, bit for bit, whatever else is in the batch. Torch's fused activations
use other instructions for the last elements of an array than for the rest. The gates here therefore combine operations
that treat all elements alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.engine.execution.architectures.decoder import Activation, NormKind
from argosy.engine.execution.kernels.operations import Norm, norm_scale

GATE_CHUNK_ROWS = 32
"""Number of rows that a torch gate computes at a time, so that its float32 intermediates stay in the CPU cache."""


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
