"""The parts of a decoder layer: projections, norms, gated MLP and attention, over flat tokens.

Every result depends on its own token's row only, bit for bit, whatever else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from argosy.engine.execution.batch import AttentionSpec
from argosy.engine.execution.pack_cache import in_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.engine_config import WeightFormat
    from argosy.engine.execution.batch import Attention, Batch
    from argosy.engine.execution.device import Device
    from argosy.engine.execution.elementwise_cpu import Norm
    from argosy.engine.execution.model_architecture import (
        Activation,
        LayerSpec,
        ModelSpec,
        NormKind,
        NormPlace,
    )
    from argosy.engine.execution.pack_cache import Keep
    from argosy.engine.execution.rope import RopeRows


class Part(nn.Module):
    """A module whose own parameters are declared on `meta` and assigned by the loader.

    Parts are called by their `forward`: hooks, which a plain call looks for, have no use here.
    """

    def settle(self, device: Device) -> None:
        """Turn the assigned parameters into what computing wants; called once."""


class Projection(Part):
    """x @ weight.T + bias, in the packing that the device likes, the weight rounded to `form`."""

    def __init__(self, cols: int, rows: int, bias: bool) -> None:  # noqa: FBT001 - data of a spec
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(rows, cols))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.form: WeightFormat | None = None
        self._packed: Callable[[Tensor], Tensor]

    def settle(self, device: Device, keep: Keep = in_memory) -> None:
        """Pack the weight, or take from `keep` what it packs to, and let go of the plain one."""
        if self.weight is None:
            raise RuntimeError("settle was called twice")
        self._packed = device.linear(self.weight, self.bias, self.form, keep)
        self.weight = self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """[T, cols] to [T, rows]."""
        return self._packed(x)


class RmsNorm(Part):
    """RMS norm over the last dimension, of the kind that the family has."""

    def __init__(self, size: int, kind: NormKind, eps: float) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(size))
        self._kind = kind
        self._eps = eps
        self._norm: Norm

    def settle(self, device: Device) -> None:
        """Hand the weight to the device."""
        if self.weight is None:
            raise RuntimeError("settle was called twice")
        self._norm = device.rows.norm(self._kind, self.weight, self._eps)
        self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last dimension, which has `size` elements."""
        return self._norm(x)

    def after_adding(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add mixed to x [T, size], in place, and norm that."""
        return self._norm.after_adding(x, mixed)


class Gate(Part):
    """activation(first half) * second half of each row."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self._activation = activation
        self._compute: Callable[[Tensor], Tensor]

    def settle(self, device: Device) -> None:
        """Take the device's."""
        self._compute = device.rows.gate(self._activation)

    def forward(self, x: Tensor) -> Tensor:
        """[T, 2 * size] to [T, size]."""
        return self._compute(x)


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
        self.gate = Gate(activation)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        return self.down.forward(self.gate.forward(self.gate_up.forward(x)))


class QkPlain(nn.Module):
    """Queries and keys as they come out of their projection."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        del spec

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, head_dim] and keys [T, kv_heads, head_dim] to the same shapes."""
        return q, k


class QkHeadNorm(nn.Module):
    """Queries and keys normalised over each head."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.q_norm = RmsNorm(spec.head_dim, spec.norm, spec.norm_eps)
        self.k_norm = RmsNorm(spec.head_dim, spec.norm, spec.norm_eps)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, head_dim] and keys [T, kv_heads, head_dim] to the same shapes."""
        return self.q_norm.forward(q), self.k_norm.forward(k)


class QkFullNorm(nn.Module):
    """Queries normalised over all their heads together, and so keys."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.q_norm = RmsNorm(spec.heads * spec.head_dim, spec.norm, spec.norm_eps)
        self.k_norm = RmsNorm(spec.kv_heads * spec.head_dim, spec.norm, spec.norm_eps)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, head_dim] and keys [T, kv_heads, head_dim] to the same shapes."""
        flat_q, flat_k = self.q_norm.forward(q.flatten(1)), self.k_norm.forward(k.flatten(1))
        return flat_q.view(q.shape), flat_k.view(k.shape)


QK_NORMS: dict[str | None, type[QkPlain | QkHeadNorm | QkFullNorm]] = {
    None: QkPlain,
    "head": QkHeadNorm,
    "full": QkFullNorm,
}


class Skip(Part):
    """Where a family has no norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Give x back."""
        return x

    def after_adding(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add mixed to x, in place."""
        return x.add_(mixed)


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
        self._split = (spec.heads, spec.kv_heads, spec.kv_heads)
        self._head_dim = spec.head_dim
        self._attention = AttentionSpec(
            layer=index,
            scale=spec.attention_scale,
            window=layer.window,
            softcap=spec.attention_softcap,
        )

    def forward(self, x: Tensor, rope: RopeRows, batch: Batch, attention: Attention) -> Tensor:
        """Add the layer to the residual stream x [T, hidden], in place; returns x."""
        mixed = self._attend(self.attention_in.forward(x), rope, batch, attention)
        normed = self.mlp_in.after_adding(x, self.attention_out.forward(mixed))
        mixed = self.mlp.forward(normed)
        return x.add_(self.mlp_out.forward(mixed))

    def _attend(self, x: Tensor, rope: RopeRows, batch: Batch, attention: Attention) -> Tensor:
        heads = self.qkv.forward(x).view(len(x), -1, self._head_dim)
        q, k, v = heads.split_with_sizes(self._split, 1)
        q, k = self.qk.forward(q, k)
        mixed = attention(q, k, v, batch, self._attention, rope)
        return self.o.forward(mixed.flatten(1))


def _norm(spec: ModelSpec, place: NormPlace) -> RmsNorm | Skip:
    return RmsNorm(spec.hidden, spec.norm, spec.norm_eps) if place in spec.norms else Skip()
