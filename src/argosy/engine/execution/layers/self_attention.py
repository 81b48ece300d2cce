"""Self-attention of a decoder layer: projections, norms of queries and keys, and the call of the attention kernel."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from argosy.engine.execution.architectures.architecture import (
    AttentionParams,
    HeadNorm,
    LayerPlace,
)
from argosy.engine.execution.architectures.decoder import LayerArchitecture, ModelArchitecture
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.rope import RopeRotation
from argosy.engine.execution.layers.modules import (
    GatedActivation,
    LoadableModule,
    Projection,
    RmsNorm,
)


class QueryKeyNorm(LoadableModule):
    """Norm of queries and keys over each head, over all heads together, or none, as the family has it.

    The attention computes the norm over each head, if the device says so.
    """

    def __init__(self, architecture: ModelArchitecture) -> None:
        super().__init__()
        self._kind, self._eps = architecture.norm_kind, architecture.norm_eps
        self._is_full = architecture.qk_norm == "full"
        head_counts = (
            (architecture.num_heads, architecture.num_kv_heads) if self._is_full else (1, 1)
        )
        self.q_norm, self.k_norm = (
            RmsNorm(count * architecture.head_dim, self._kind, self._eps)
            if architecture.qk_norm
            else None
            for count in head_counts
        )
        self.head_norm: HeadNorm | None = None
        """Norm that the attention computes."""

    def process_weights_after_loading(self, device: Device) -> None:
        """Leave the norm to the attention, if it computes norms over each head."""
        if device.normalizes_heads and self.q_norm and self.k_norm and not self._is_full:
            self.head_norm = HeadNorm(
                self.q_norm.scale, self.k_norm.scale, self._eps, self._kind == "narrow"
            )

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Map queries [T, heads, head_dim] and keys [T, kv_heads, head_dim] to the same shapes."""
        if self.q_norm is None or self.k_norm is None or self.head_norm is not None:
            return q, k
        if not self._is_full:
            return self.q_norm.forward(q), self.k_norm.forward(k)
        flat_q, flat_k = self.q_norm.forward(q.flatten(1)), self.k_norm.forward(k.flatten(1))
        return flat_q.view(q.shape), flat_k.view(k.shape)


class SelfAttention(LoadableModule):
    """Self-attention with grouped queries (Ainslie et al. 2023), and in some families with sinks or an output gate."""

    def __init__(
        self, architecture: ModelArchitecture, layer: LayerArchitecture, place: LayerPlace
    ) -> None:
        super().__init__()
        heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
        gates = heads if architecture.has_output_gate else 0
        self.qkv = Projection(
            architecture.hidden_size,
            (heads + 2 * kv_heads + gates) * architecture.head_dim,
            architecture.qkv_bias,
            _order_gates_last(architecture) if gates else None,
        )
        self.output_gate = GatedActivation("sigmoid") if gates else None
        self.qk = QueryKeyNorm(architecture)
        self.o = Projection(
            heads * architecture.head_dim, architecture.hidden_size, architecture.o_bias
        )
        self.sinks = nn.Parameter(torch.empty(heads)) if architecture.has_sinks else None
        self._head_counts = (heads, kv_heads, kv_heads, gates)
        self._head_dim = architecture.head_dim
        self._params = AttentionParams(
            layer=place.layer,
            group=place.group,
            scale=architecture.attention_scale,
            sliding_window=layer.sliding_window,
            softcap=architecture.attention_softcap,
        )

    def process_weights_after_loading(self, device: Device) -> None:
        """Convert the sinks to float32, and pass the norm that the attention computes."""
        del device
        sinks = None if self.sinks is None else self.sinks.detach().float()
        self._params = replace(self._params, sinks=sinks, head_norm=self.qk.head_norm)
        self.sinks = None

    def forward(self, x: Tensor, rope: RopeRotation, batch: Batch, attention: Attention) -> Tensor:
        """Map x [T, hidden] to [T, hidden]."""
        heads = self.qkv.forward(x, batch.token_adapters).view(len(x), -1, self._head_dim)
        q, k, v, gate = heads.split_with_sizes(self._head_counts, 1)
        q, k = self.qk.forward(q, k)
        output = attention(q, k, v, batch, self._params, rope).flatten(1)
        if self.output_gate is not None:
            output = self.output_gate.forward(torch.cat((gate.flatten(1), output), 1))
        return self.o.forward(output, batch.token_adapters)


def _order_gates_last(architecture: ModelArchitecture) -> tuple[int, ...]:
    """Return the order of rows in which the gate of each head, stored after its query, follows all keys and values."""
    size = architecture.head_dim
    queries = range(2 * architecture.num_heads * size)
    rest = range(len(queries), len(queries) + 2 * architecture.num_kv_heads * size)
    return (
        *(row for row in queries if row % (2 * size) < size),
        *rest,
        *(row for row in queries if row % (2 * size) >= size),
    )
