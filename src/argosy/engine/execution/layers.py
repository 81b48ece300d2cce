"""Modules of a decoder layer over flat tokens, which are projections, norms, gated MLP and attention.

Every result depends only on its own token's row, bit for bit, whatever else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from argosy.engine.execution.batch import AttentionParams
from argosy.engine.execution.pack_cache import pack_in_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.engine_config import WeightFormat
    from argosy.engine.execution.batch import Attention, Batch
    from argosy.engine.execution.device import Device
    from argosy.engine.execution.elementwise_cpu import Norm
    from argosy.engine.execution.model_architecture import (
        Activation,
        LayerArchitecture,
        ModelArchitecture,
        NormKind,
        NormPosition,
    )
    from argosy.engine.execution.pack_cache import PackedWeightProvider
    from argosy.engine.execution.rope import RopeRotation


class LoadableModule(nn.Module):
    """Module whose own parameters are declared on `meta` and assigned by the loader.

    Callers call `forward` directly, which saves the lookup of hooks, since no module has hooks.
    """

    def process_weights_after_loading(self, device: Device) -> None:
        """Convert the assigned parameters to the form that `forward` needs. Called once."""


class Projection(LoadableModule):
    """Linear layer x @ weight.T + bias, packed by the device, with the weight rounded to `weight_format`."""

    def __init__(self, cols: int, rows: int, bias: bool) -> None:  # noqa: FBT001 - data of a spec
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(rows, cols))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.weight_format: WeightFormat | None = None
        self._linear: Callable[[Tensor], Tensor]

    def process_weights_after_loading(
        self, device: Device, get_packed: PackedWeightProvider = pack_in_memory
    ) -> None:
        """Pack the weight, or get its packed form from `get_packed`, and release the unpacked weight."""
        if self.weight is None:
            raise RuntimeError("process_weights_after_loading was called twice")
        self._linear = device.create_linear(self.weight, self.bias, self.weight_format, get_packed)
        self.weight = self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, cols] to [T, rows]."""
        return self._linear(x)


class RmsNorm(LoadableModule):
    """RMS norm over the last dimension, of the model family's kind."""

    def __init__(self, size: int, kind: NormKind, eps: float) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(size))
        self._kind = kind
        self._eps = eps
        self._norm: Norm

    def process_weights_after_loading(self, device: Device) -> None:
        """Create the device's norm with the weight."""
        if self.weight is None:
            raise RuntimeError("process_weights_after_loading was called twice")
        self._norm = device.elementwise_ops.create_norm(self._kind, self.weight, self._eps)
        self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dimension, which has `size` elements."""
        return self._norm(x)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        """Add delta to x [T, size] in place, and return the normalized sum."""
        return self._norm.add_and_norm(x, delta)


class GatedActivation(LoadableModule):
    """Gated activation, which maps each row to activation(first half) * second half."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self._activation = activation
        self._compute: Callable[[Tensor], Tensor]

    def process_weights_after_loading(self, device: Device) -> None:
        """Create the device's gated activation."""
        self._compute = device.elementwise_ops.create_gated_activation(self._activation)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, 2 * size] to [T, size]."""
        return self._compute(x)


class Mlp(nn.Module):
    """Gated MLP, down(activation(gate(x)) * up(x)) (Shazeer 2020), with gate and up as one matrix."""

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
        self.gate = GatedActivation(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to [T, hidden]."""
        return self.down.forward(self.gate.forward(self.gate_up.forward(x)))


class NoQkNorm(nn.Module):
    """Identity, for families without a norm of queries and keys."""

    def __init__(self, architecture: ModelArchitecture) -> None:
        super().__init__()
        del architecture

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Map queries [T, heads, head_dim] and keys [T, kv_heads, head_dim] to the same shapes."""
        return q, k


class PerHeadQkNorm(nn.Module):
    """Norm of queries and keys over each head."""

    def __init__(self, architecture: ModelArchitecture) -> None:
        super().__init__()
        self.q_norm = RmsNorm(architecture.head_dim, architecture.norm_kind, architecture.norm_eps)
        self.k_norm = RmsNorm(architecture.head_dim, architecture.norm_kind, architecture.norm_eps)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Map queries [T, heads, head_dim] and keys [T, kv_heads, head_dim] to the same shapes."""
        return self.q_norm.forward(q), self.k_norm.forward(k)


class FullQkNorm(nn.Module):
    """Norm of queries over all query heads together, and of keys over all KV heads together."""

    def __init__(self, architecture: ModelArchitecture) -> None:
        super().__init__()
        self.q_norm = RmsNorm(
            architecture.num_heads * architecture.head_dim,
            architecture.norm_kind,
            architecture.norm_eps,
        )
        self.k_norm = RmsNorm(
            architecture.num_kv_heads * architecture.head_dim,
            architecture.norm_kind,
            architecture.norm_eps,
        )

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Map queries [T, heads, head_dim] and keys [T, kv_heads, head_dim] to the same shapes."""
        flat_q, flat_k = self.q_norm.forward(q.flatten(1)), self.k_norm.forward(k.flatten(1))
        return flat_q.view(q.shape), flat_k.view(k.shape)


QK_NORMS: dict[str | None, type[NoQkNorm | PerHeadQkNorm | FullQkNorm]] = {
    None: NoQkNorm,
    "head": PerHeadQkNorm,
    "full": FullQkNorm,
}


class IdentityNorm(LoadableModule):
    """Identity, for positions without a norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        """Add delta to x in place, and return x."""
        return x.add_(delta)


class DecoderLayer(nn.Module):
    """Decoder layer of attention and MLP, with norms at the family's positions before and after each."""

    def __init__(
        self, architecture: ModelArchitecture, layer: LayerArchitecture, index: int, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.qkv = Projection(
            architecture.hidden_size,
            (architecture.num_heads + 2 * architecture.num_kv_heads) * architecture.head_dim,
            architecture.qkv_bias,
        )
        self.qk = QK_NORMS[architecture.qk_norm](architecture)
        self.o = Projection(
            architecture.num_heads * architecture.head_dim,
            architecture.hidden_size,
            architecture.o_bias,
        )
        self.mlp = mlp
        self.attention_in = _build_norm(architecture, "attention_in")
        self.attention_out = _build_norm(architecture, "attention_out")
        self.mlp_in = _build_norm(architecture, "mlp_in")
        self.mlp_out = _build_norm(architecture, "mlp_out")
        self.rope_index = layer.rope_index
        self._head_counts = (
            architecture.num_heads,
            architecture.num_kv_heads,
            architecture.num_kv_heads,
        )
        self._head_dim = architecture.head_dim
        self._attention_params = AttentionParams(
            layer=index,
            scale=architecture.attention_scale,
            sliding_window=layer.sliding_window,
            softcap=architecture.attention_softcap,
        )

    def forward(self, x: Tensor, rope: RopeRotation, batch: Batch, attention: Attention) -> Tensor:
        """Add the layer's output to the residual stream x [T, hidden] in place, and return x."""
        output = self._attend(self.attention_in.forward(x), rope, batch, attention)
        normed = self.mlp_in.add_and_norm(x, self.attention_out.forward(output))
        output = self.mlp.forward(normed)
        return x.add_(self.mlp_out.forward(output))

    def _attend(self, x: Tensor, rope: RopeRotation, batch: Batch, attention: Attention) -> Tensor:
        heads = self.qkv.forward(x).view(len(x), -1, self._head_dim)
        q, k, v = heads.split_with_sizes(self._head_counts, 1)
        q, k = self.qk.forward(q, k)
        output = attention(q, k, v, batch, self._attention_params, rope)
        return self.o.forward(output.flatten(1))


def _build_norm(architecture: ModelArchitecture, position: NormPosition) -> RmsNorm | IdentityNorm:
    return (
        RmsNorm(architecture.hidden_size, architecture.norm_kind, architecture.norm_eps)
        if position in architecture.norm_positions
        else IdentityNorm()
    )
