"""Draft head, a decoder layer that guesses the token after the next one from hidden states of its target.

Entry i of its KV cache is computed from the target's hidden state at position i and the token at position i + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from argosy.engine.engine_config import WeightFormat
from argosy.engine.execution.architectures.draft_head import DraftHeadArchitecture
from argosy.engine.execution.decoders.decoder import (
    Decoder,
    Embedding,
    build_attention,
    build_mlp,
)
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.rope import build_rope_table, gather_rope_rotation
from argosy.engine.execution.layers.model import Model
from argosy.engine.execution.layers.modules import (
    DecoderLayer,
    Projection,
    RmsNorm,
    weight_format_for,
)
from argosy.engine.execution.layers.self_attention import SelfAttention


class DraftHead(nn.Module, Model):
    """Draft head of an EAGLE-3 or multi-token-prediction checkpoint.

    Its parameters are on `meta` until `load_draft_head` assigns them. What it lacks is that of its target.
    """

    def __init__(
        self,
        architecture: DraftHeadArchitecture,
        target: Decoder,
        device: Device,
        dtype: torch.dtype,
        quantize: WeightFormat | None = None,
    ) -> None:
        super().__init__()
        self.architecture: DraftHeadArchitecture = architecture
        self._device, self.dtype = device, dtype
        self._is_eagle = architecture.method == "eagle3"
        hidden, layer = architecture.hidden_size, architecture.layer_architectures[0]
        with torch.device("meta"):
            attention = next(build_attention(architecture))
            if self._is_eagle and isinstance(attention, SelfAttention):
                heads = architecture.num_heads + 2 * architecture.num_kv_heads
                rows = heads * architecture.head_dim
                attention.qkv = Projection(2 * hidden, rows, architecture.qkv_bias)
                width = architecture.hidden_states_width
            else:
                width = 2 * hidden
            self.projection = Projection(width, hidden, bias=False)
            self.embedding_norm, self.hidden_norm, self.norm = (
                RmsNorm(hidden, architecture.norm_kind, architecture.norm_eps) for _ in range(3)
            )
            self.layer = DecoderLayer(
                architecture, layer.rope_index, attention, build_mlp(architecture, layer)
            )
            self.embed = Embedding(architecture) if architecture.has_embedding else None
            self.head = (
                Projection(hidden, architecture.draft_vocab_size, bias=False)
                if architecture.has_head
                else None
            )
        for name, module in self.named_modules():
            if isinstance(module, Projection):
                module.weight_format = weight_format_for(name, quantize, is_head=name == "head")
        self._rope_table = build_rope_table(
            architecture.ropes[layer.rope_index], architecture.max_model_len
        ).to(self._device.torch_device)
        self.target_tokens: list[int] | None = None
        """Token of the target for each that the head drafts. None if they are the same."""
        self._shared = (target,)
        """The target. In a tuple, it is no module of the head."""

    def watch_target(self) -> Decoder:
        """Let the target keep the hidden states that the head reads, and return the target."""
        (target,) = self._shared
        target.watched_layers = self.architecture.target_layers
        return target

    def unwatch_target(self) -> None:
        """Let the target keep no hidden states."""
        (target,) = self._shared
        target.watched_layers, target.hidden_states = (), []

    def prepare_hidden_states(self, states: Tensor) -> Tensor:
        """Map hidden states of the target, [T, layers * hidden], to those that the head continues, [T, hidden]."""
        if self._is_eagle:
            return self.projection.forward(states)
        (target,) = self._shared
        return target.norm.forward(states)

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        """Return the hidden states [L, hidden] with which the head continues after the tokens `batch.logit_index`."""
        (target,) = self._shared
        states = batch.hidden_states
        if states is None:
            raise ValueError("a draft head needs hidden states of its target")
        embed = target.embed if self.embed is None else self.embed
        embeddings = self.embedding_norm.forward(embed.forward(batch.token_ids))
        normed = self.hidden_norm.forward(states)
        pair = (normed, embeddings) if self.architecture.is_hidden_first else (embeddings, normed)
        inputs = torch.cat(pair, 1)
        rope = gather_rope_rotation(self._rope_table, batch.positions)
        if self._is_eagle:
            x = normed if self.architecture.adds_normed else states
            delta = self.layer.forward_normed(x, inputs, rope, batch, attention)
        else:
            x = self.projection.forward(inputs)
            delta = self.layer.forward(x, None, rope, batch, attention)
        last = x.index_select(0, batch.logit_index) + delta.index_select(0, batch.logit_index)
        return last if self._is_eagle else self.norm.forward(last)

    @torch.inference_mode()
    def compute_logits(self, states: Tensor) -> Tensor:
        """Map states [L, hidden] that `forward` returned to logits [L, vocabulary of the head], float32."""
        (target,) = self._shared
        if self._is_eagle:
            states = self.norm.forward(states)
        head = target.head if self.head is None else self.head
        if head is None:
            raise ValueError("the target of a draft head has no output matrix")
        return head.forward(states).float()
