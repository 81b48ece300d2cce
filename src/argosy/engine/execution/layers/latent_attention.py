"""Multi-head latent attention (DeepSeek-V2, 2024), computed over its compressed keys and values.

A token caches one vector for all heads: a rotated part, and the normalized latent from which keys and values would be
expanded. The expansion of keys is applied to the queries instead, and the expansion of values to the output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from argosy.engine.execution.architectures.architecture import AttentionParams, LayerPlace
from argosy.engine.execution.architectures.decoder import (
    LatentArchitecture,
    LayerArchitecture,
    ModelArchitecture,
)
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.rope import RopeRotation
from argosy.engine.execution.layers.modules import LoadableModule, Projection, RmsNorm

NORM_EPS = 1e-6
"""Epsilon of the norms of latents, which config.json does not state."""


class LatentAttention(nn.Module):
    """Multi-head latent attention, with queries from their own latent in models with a `q_lora_rank`."""

    def __init__(
        self, architecture: ModelArchitecture, layer: LayerArchitecture, place: LayerPlace
    ) -> None:
        super().__init__()
        latent = architecture.latent
        if latent is None:
            raise ValueError(f"{architecture.architecture} has no latent attention")
        hidden, heads, bias = architecture.hidden_size, architecture.num_heads, architecture.o_bias
        head_order = _query_order(latent)
        query_order = tuple(
            head * len(head_order) + row for head in range(heads) for row in head_order
        )
        first_order = query_order if latent.q_rank is None else tuple(range(latent.q_rank))
        key_order = _key_order(latent)
        self._split = (len(first_order), latent.rope_dim, latent.kv_rank)
        order = (*first_order, *(len(first_order) + row for row in key_order))
        self.first = Projection(hidden, len(order), bias, order)
        if latent.q_rank is not None:
            self.q_norm = RmsNorm(latent.q_rank, architecture.norm_kind, NORM_EPS)
            self.q = Projection(latent.q_rank, len(query_order), bias=False, row_order=query_order)
        self.kv_norm = RmsNorm(latent.kv_rank, architecture.norm_kind, NORM_EPS)
        self.expansion = LatentExpansion(latent, heads)
        self.o = Projection(heads * latent.value_dim, hidden, bias)
        self._latent = latent
        self._params = AttentionParams(
            layer=place.layer,
            group=place.group,
            scale=architecture.attention_scale,
            sliding_window=layer.sliding_window,
        )

    def forward(self, x: Tensor, rope: RopeRotation, batch: Batch, attention: Attention) -> Tensor:
        """Map x [T, hidden] to [T, hidden]."""
        adapters = batch.token_adapters
        first = self.first.forward(x, adapters)
        queries, rotated_keys, latents = first.split_with_sizes(self._split, 1)
        if self._latent.q_rank is not None:
            queries = self.q.forward(self.q_norm.forward(queries), adapters)
        heads = queries.unflatten(1, (-1, self._latent.query_dim))
        keys = torch.cat((rotated_keys, self.kv_norm.forward(latents)), 1).unsqueeze(1)
        rotated, rest = heads.tensor_split((self._latent.rope_dim,), 2)
        absorbed = torch.cat((rotated, self.expansion.absorb_keys(rest)), 2)
        output = attention(absorbed, keys, None, batch, self._params, rope)
        return self.o.forward(self.expansion.expand_values(output).flatten(1), adapters)


class LatentExpansion(LoadableModule):
    """Matrices that expand a latent to each head's key and value, with the key's applied to queries.

    They keep the model's dtype if the model is quantized, because they are small.
    """

    def __init__(self, latent: LatentArchitecture, heads: int) -> None:
        super().__init__()
        rows = latent.nope_dim + latent.value_dim
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(heads * rows, latent.kv_rank))
        self._nope_dim = latent.nope_dim
        self._rows = rows
        self.absorb_keys: Callable[[Tensor], Tensor]
        """Maps queries [T, heads, nope_dim] to queries of latents, [T, heads, kv_rank]."""
        self.expand_values: Callable[[Tensor], Tensor]
        """Maps weighted latents [T, heads, kv_rank] to values, [T, heads, value_dim]."""

    def process_weights_after_loading(self, device: Device) -> None:
        """Pack the matrices of each head, those of keys transposed."""
        if self.weight is None:
            raise RuntimeError("process_weights_after_loading was called twice")
        heads = [
            head.tensor_split((self._nope_dim,)) for head in self.weight.detach().split(self._rows)
        ]
        self.absorb_keys = device.create_head_linears([keys.T.contiguous() for keys, _ in heads])
        self.expand_values = device.create_head_linears([values for _, values in heads])
        self.weight = None


def _query_order(latent: LatentArchitecture) -> tuple[int, ...]:
    """Return the order of a head's query rows: the rotated ones, of which pairs become halves, and the others."""
    rope = (latent.nope_dim + row for row in _rope_order(latent))
    return (*rope, *range(latent.nope_dim))


def _key_order(latent: LatentArchitecture) -> tuple[int, ...]:
    """Return the order of the rows of the key and value projection: the rotated ones, then the latent."""
    rope = (latent.kv_rank + row for row in _rope_order(latent))
    return (*rope, *range(latent.kv_rank))


def _rope_order(latent: LatentArchitecture) -> tuple[int, ...]:
    size = latent.rope_dim
    if not latent.has_rope_pairs:
        return tuple(range(size))
    return (*range(0, size, 2), *range(1, size, 2))
