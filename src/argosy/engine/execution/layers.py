"""The parts of a decoder layer: projections, norms, gated MLP and attention, over flat tokens.

Every result depends on its own token's row only, bit for bit, whatever else is in the batch. Fused
activations of torch compute the last elements of an array with other instructions than the rest, so
the gates here are made of operations that do not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from argosy.engine.execution.batch import AttentionSpec
from argosy.engine.execution.rope import rotate_

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.execution.batch import Attention, Batch
    from argosy.engine.execution.device import Device
    from argosy.engine.execution.spec import Activation, LayerSpec, ModelSpec, NormKind, NormPlace

GATE_ROWS = 32
"""Rows that a gate handles at a time, so that its float32 intermediates stay in the cache."""


class Part(nn.Module):
    """A module whose own parameters are declared on `meta` and assigned by the loader.

    Parts are called by their `forward`: hooks, which a plain call looks for, have no use here.
    """

    def settle(self, device: Device) -> None:
        """Turn the assigned parameters into what computing wants; called once."""


class Projection(Part):
    """x @ weight.T + bias, in the packing that the device likes."""

    def __init__(self, cols: int, rows: int, bias: bool) -> None:  # noqa: FBT001 - data of a spec
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(rows, cols))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self._packed: Callable[[Tensor], Tensor]

    def settle(self, device: Device) -> None:
        """Pack the weight and let go of the plain one."""
        if self.weight is None:
            raise RuntimeError("settle was called twice")
        self._packed = device.linear(self.weight, self.bias)
        self.weight = self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """[T, cols] to [T, rows]."""
        return self._packed(x)


class NarrowNorm(Part):
    """RMS norm (Zhang & Sennrich 2019) in float32, rounded, then multiplied by the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._shape = (size,)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last dimension, which has `size` elements."""
        return F.rms_norm(x, self._shape, None, self._eps).mul_(self.weight)


class WideNorm(NarrowNorm):
    """The same, multiplied by the weight in float32 and then rounded."""

    def settle(self, device: Device) -> None:
        """Hold the weight in float32."""
        del device
        self.weight = nn.Parameter(self.weight.float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last dimension, which has `size` elements."""
        return F.rms_norm(x.float(), self._shape, None, self._eps).mul_(self.weight).to(x.dtype)


class OffsetNorm(WideNorm):
    """As WideNorm, with weights stored as their distance from 1."""

    def settle(self, device: Device) -> None:
        """Hold 1 + weight in float32."""
        del device
        self.weight = nn.Parameter(self.weight.float() + 1.0, requires_grad=False)


NORMS: dict[NormKind, type[NarrowNorm]] = {
    "narrow": NarrowNorm,
    "wide": WideNorm,
    "offset": OffsetNorm,
}


def _silu_(x: Tensor) -> Tensor:
    """SiLU, x * sigmoid(x) (Elfwing et al. 2017), float32, in place."""
    return x.div_(x.neg().exp_().add_(1.0))


def _gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh approximation (Hendrycks & Gimpel 2016), float32."""
    inner = (x * x).mul_(0.044715).add_(1.0).mul_(x).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": _silu_,
    "gelu_tanh": _gelu_tanh,
}


class Mlp(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020), gate and up as one matrix."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        bias: bool,  # noqa: FBT001 - data of a spec
        activation: Activation,
    ) -> None:
        super().__init__()
        self.gate_up = Projection(hidden, 2 * intermediate, bias)
        self.down = Projection(intermediate, hidden, bias)
        self._activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        gates, ups = self.gate_up.forward(x).chunk(2, -1)
        if len(x) <= GATE_ROWS:
            return self.down.forward(self._gate(gates, ups))
        parts = zip(gates.split(GATE_ROWS), ups.split(GATE_ROWS), strict=True)
        return self.down.forward(torch.cat([self._gate(gate, up) for gate, up in parts]))

    def _gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """activation(gate) * up; what gate held is used up."""
        return self._activation(gate.float()).mul_(up).to(up.dtype)


class QkPlain(Part):
    """Queries and keys as they come out of their projection."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._rotated = spec.heads + spec.kv_heads

    def forward(self, heads: Tensor) -> Tensor:
        """[T, heads + 2 * kv_heads, head_dim] to queries and keys [T, heads + kv_heads, head_dim]."""
        return heads[:, : self._rotated]


class QkHeadNorm(QkPlain):
    """Queries and keys normalised over each head."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.q_norm = NORMS[spec.norm](spec.head_dim, spec.norm_eps)
        self.k_norm = NORMS[spec.norm](spec.head_dim, spec.norm_eps)
        self._heads = spec.heads

    def forward(self, heads: Tensor) -> Tensor:
        """[T, heads + 2 * kv_heads, head_dim] to queries and keys [T, heads + kv_heads, head_dim]."""
        q = self.q_norm.forward(heads[:, : self._heads])
        k = self.k_norm.forward(heads[:, self._heads : self._rotated])
        return torch.cat((q, k), 1)


class QkFullNorm(QkPlain):
    """Queries normalised over all their heads together, and so keys."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.q_norm = NORMS[spec.norm](spec.heads * spec.head_dim, spec.norm_eps)
        self.k_norm = NORMS[spec.norm](spec.kv_heads * spec.head_dim, spec.norm_eps)
        self._heads = spec.heads

    def forward(self, heads: Tensor) -> Tensor:
        """[T, heads + 2 * kv_heads, head_dim] to queries and keys [T, heads + kv_heads, head_dim]."""
        q = self.q_norm.forward(heads[:, : self._heads].flatten(1))
        k = self.k_norm.forward(heads[:, self._heads : self._rotated].flatten(1))
        return torch.cat((q, k), 1).view(len(heads), self._rotated, -1)


QK_NORMS: dict[str | None, type[QkPlain]] = {None: QkPlain, "head": QkHeadNorm, "full": QkFullNorm}


class Skip(Part):
    """Where a family has no norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Give x back."""
        return x


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each between the norms that the family has."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, index: int, mlp: nn.Module) -> None:
        super().__init__()
        self.qkv = Projection(
            spec.hidden, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.qkv_bias
        )
        self.qk = QK_NORMS[spec.qk_norm](spec)
        self.o = Projection(spec.heads * spec.head_dim, spec.hidden, spec.o_bias)
        self.mlp = mlp
        self.attention_in = _norm(spec, "attention_in")
        self.attention_out = _norm(spec, "attention_out")
        self.mlp_in = _norm(spec, "mlp_in")
        self.mlp_out = _norm(spec, "mlp_out")
        self.rope = layer.rope
        self._heads = spec.heads
        self._rotated = spec.heads + spec.kv_heads
        self._head_dim = spec.head_dim
        self._attention = AttentionSpec(
            layer=index,
            scale=spec.attention_scale,
            window=layer.window,
            softcap=spec.attention_softcap,
        )

    def forward(
        self, x: Tensor, rows: tuple[Tensor, Tensor], batch: Batch, attention: Attention
    ) -> Tensor:
        """Add the layer to the residual stream x [T, hidden], in place; returns x."""
        mixed = self._attend(self.attention_in.forward(x), rows, batch, attention)
        x.add_(self.attention_out.forward(mixed))
        mixed = self.mlp.forward(self.mlp_in.forward(x))
        return x.add_(self.mlp_out.forward(mixed))

    def _attend(
        self, x: Tensor, rows: tuple[Tensor, Tensor], batch: Batch, attention: Attention
    ) -> Tensor:
        heads = self.qkv.forward(x).view(len(x), -1, self._head_dim)
        turned = self.qk.forward(heads)
        rotate_(turned, rows)
        q, k = turned[:, : self._heads], turned[:, self._heads :]
        mixed = attention(q, k, heads[:, self._rotated :], batch, self._attention)
        return self.o.forward(mixed.flatten(1))


def _norm(spec: ModelSpec, place: NormPlace) -> NarrowNorm | Skip:
    return NORMS[spec.norm](spec.hidden, spec.norm_eps) if place in spec.norms else Skip()
