"""Encoder for all families, configured by an `EncoderArchitecture`.

Every result depends only on its own sequence, bit for bit, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.engine.engine_config import WeightFormat
from argosy.engine.execution.architectures.architecture import AttentionParams
from argosy.engine.execution.architectures.encoder import (
    ClassifierArchitecture,
    EncoderActivation,
    EncoderArchitecture,
)
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.rope import (
    RopeRotation,
    build_rope_table,
    gather_rope_rotation,
)
from argosy.engine.execution.kernels.torch.rowwise_ops import gelu, silu
from argosy.engine.execution.layers.model import Model
from argosy.engine.execution.layers.modules import IdentityNorm, LoadableModule, Projection

ACTIVATIONS: dict[EncoderActivation, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "relu": torch.relu,
    "silu": silu,
    "tanh": torch.tanh,
}
"""Functions of float32 that treat all elements alike."""
ACTIVATION_CHUNK_ELEMENTS = 1 << 18
"""Elements whose activation is computed at a time, so that its float32 intermediates stay in the CPU cache."""


class LayerNorm(LoadableModule):
    """Layer norm (Ba et al. 2016) over the last dimension, in float32."""

    def __init__(
        self,
        size: int,
        eps: float,
        bias: bool,  # noqa: FBT001 - data of a spec
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self._eps = eps

    def process_weights_after_loading(self, device: Device) -> None:
        """Convert the weights to float32."""
        del device
        self.weight = nn.Parameter(self.weight.float(), requires_grad=False)
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dimension."""
        normed = F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self._eps)
        return normed.to(x.dtype)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        """Add delta to x [T, size] in place, and return the normalized sum."""
        return self.forward(x.add_(delta))


class Table(LoadableModule):
    """Table of vectors by index."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))

    def forward(self, index: Tensor) -> Tensor:
        """Map indices [T] to rows [T, size]."""
        return F.embedding(index, self.weight)


class EncoderEmbedding(nn.Module):
    """Sum of the vectors of token, position and token type, normalized."""

    def __init__(self, architecture: EncoderArchitecture) -> None:
        super().__init__()
        hidden = architecture.hidden_size
        self.words = Table(architecture.vocab_size, hidden)
        self.positions = (
            Table(architecture.num_positions, hidden) if architecture.num_positions else None
        )
        self.token_types = (
            Table(architecture.num_token_types, hidden) if architecture.num_token_types else None
        )
        self.norm = _build_norm(architecture)
        self._first_position = architecture.first_position
        self._num_token_types = architecture.num_token_types

    def forward(self, batch: Batch) -> Tensor:
        """Return vectors [T, hidden]."""
        x = self.words.forward(batch.token_ids)
        if self.token_types is not None:
            types = torch.zeros_like(batch.token_ids)
            if batch.token_types is not None and self._num_token_types > 1:
                types = batch.token_types
            x = x + self.token_types.forward(types)
        if self.positions is not None:
            x = x + self.positions.forward(batch.positions + self._first_position)
        return self.norm.forward(x)


class EncoderAttention(nn.Module):
    """Self-attention of one layer."""

    def __init__(self, architecture: EncoderArchitecture, layer: int) -> None:
        super().__init__()
        hidden, bias = architecture.hidden_size, architecture.has_attention_bias
        self.qkv = Projection(hidden, 3 * hidden, bias)
        self.o = Projection(hidden, hidden, bias)
        self._num_heads = architecture.num_heads
        self._head_dim = architecture.head_dim
        self._params = AttentionParams(
            layer=layer,
            scale=architecture.head_dim**-0.5,
            sliding_window=architecture.sliding_windows[layer],
        )

    def forward(
        self, x: Tensor, rope: RopeRotation | None, batch: Batch, attention: Attention
    ) -> Tensor:
        """Map x [T, hidden] to [T, hidden]."""
        q, k, v = self.qkv.forward(x).view(len(x), 3, self._num_heads, self._head_dim).unbind(1)
        return self.o.forward(attention(q, k, v, batch, self._params, rope).flatten(1))


class EncoderMlp(nn.Module):
    """MLP, down(activation(up(x))). If it is gated, the first half of up is activated, and multiplied by the second."""

    def __init__(self, architecture: EncoderArchitecture) -> None:
        super().__init__()
        hidden, inner = architecture.hidden_size, architecture.intermediate_size
        bias = architecture.has_mlp_bias
        self._is_gated = architecture.is_modern
        self.up = Projection(hidden, inner * (2 if self._is_gated else 1), bias)
        self.down = Projection(inner, hidden, bias)
        self._activate = ACTIVATIONS[architecture.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to [T, hidden]."""
        return self.down.forward(self._gate(self.up.forward(x)))

    def _gate(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        chunk_rows = max(1, ACTIVATION_CHUNK_ELEMENTS // width)
        out = x.new_empty(len(x), width // 2 if self._is_gated else width)
        for source, target in zip(x.split(chunk_rows), out.split(chunk_rows), strict=True):
            if self._is_gated:
                gated, factor = source.float().chunk(2, -1)
                target.copy_(self._activate(gated) * factor)
            else:
                target.copy_(self._activate(source.float()))
        return out


class EncoderLayer(nn.Module):
    """Layer of attention and MLP, with norms before each (ModernBERT) or after each (BERT)."""

    def __init__(self, architecture: EncoderArchitecture, layer: int) -> None:
        super().__init__()
        is_modern = architecture.is_modern
        self.attention = EncoderAttention(architecture, layer)
        self.mlp = EncoderMlp(architecture)
        self.attention_in = _build_norm(architecture) if is_modern and layer > 0 else IdentityNorm()
        self.mlp_in = _build_norm(architecture) if is_modern else IdentityNorm()
        self.attention_out = IdentityNorm() if is_modern else _build_norm(architecture)
        self.mlp_out = IdentityNorm() if is_modern else _build_norm(architecture)

    def forward(
        self, x: Tensor, rope: RopeRotation | None, batch: Batch, attention: Attention
    ) -> Tensor:
        """Map the tokens' vectors x [T, hidden] to those after the layer."""
        output = self.attention.forward(self.attention_in.forward(x), rope, batch, attention)
        x = self.attention_out.add_and_norm(x, output)
        return self.mlp_out.add_and_norm(x, self.mlp.forward(self.mlp_in.forward(x)))


class ClassificationHead(nn.Module):
    """Classification head of an encoder: dense layer, activation, norm if the family has one, and projection."""

    def __init__(self, architecture: EncoderArchitecture, head: ClassifierArchitecture) -> None:
        super().__init__()
        hidden = architecture.hidden_size
        self.dense = Projection(hidden, hidden, head.has_dense_bias)
        self.norm = _build_norm(architecture) if head.has_norm else IdentityNorm()
        self.out = Projection(hidden, head.num_labels, bias=True)
        self._activate = ACTIVATIONS[head.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map pooled vectors [N, hidden] to logits [N, labels]."""
        activated = self._activate(self.dense.forward(x).float()).to(x.dtype)
        return self.out.forward(self.norm.forward(activated))


class Encoder(nn.Module, Model):
    """Encoder, which maps token ids to hidden states. Its parameters are on `meta` until they are loaded."""

    def __init__(
        self,
        architecture: EncoderArchitecture,
        device: Device,
        quantize: WeightFormat | None = None,
    ) -> None:
        super().__init__()
        self.architecture: EncoderArchitecture = architecture
        with torch.device("meta"):
            self.embed = EncoderEmbedding(architecture)
            self.layers = nn.ModuleList(
                EncoderLayer(architecture, layer) for layer in range(architecture.num_layers)
            )
            self.norm = _build_norm(architecture) if architecture.is_modern else IdentityNorm()
            self.head = (
                None
                if architecture.classifier is None
                else ClassificationHead(architecture, architecture.classifier)
            )
        for module in self.layers.modules():
            if isinstance(module, Projection):
                module.weight_format = quantize
        self._rope_tables = [
            build_rope_table(rope, architecture.max_model_len).to(device.torch_device)
            for rope in architecture.ropes
        ]
        self._layers: list[EncoderLayer] = [
            layer for layer in self.layers if isinstance(layer, EncoderLayer)
        ]

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        x = self.embed.forward(batch)
        rotations = [gather_rope_rotation(table, batch.positions) for table in self._rope_tables]
        indices = self.architecture.rope_indices
        for index, layer in enumerate(self._layers):
            rope = rotations[indices[index]] if rotations else None
            x = layer.forward(x, rope, batch, attention)
        return self.norm.forward(x.index_select(0, batch.logit_index)).float()


def _build_norm(architecture: EncoderArchitecture) -> LayerNorm:
    return LayerNorm(architecture.hidden_size, architecture.norm_eps, architecture.has_norm_bias)
