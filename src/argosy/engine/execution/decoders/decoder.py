"""Decoder-only transformer for all model families, configured by a `ModelArchitecture`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.engine.engine_config import WeightFormat
from argosy.engine.execution.architectures.decoder import LayerArchitecture, ModelArchitecture
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch, RowAdapters
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.recurrent_states import RecurrentStates
from argosy.engine.execution.kernels.rope import build_rope_table, gather_rope_rotation
from argosy.engine.execution.layers.gated_delta_net import GatedDeltaNet
from argosy.engine.execution.layers.latent_attention import LatentAttention
from argosy.engine.execution.layers.model import Model
from argosy.engine.execution.layers.modules import (
    DecoderLayer,
    LoadableModule,
    Mlp,
    Projection,
    RmsNorm,
    weight_format_for,
)
from argosy.engine.execution.layers.moe import MixtureOfExperts, Router
from argosy.engine.execution.layers.self_attention import SelfAttention


class Embedding(LoadableModule):
    """Token embedding, multiplied by `embedding_scale` in families that have one."""

    def __init__(self, architecture: ModelArchitecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(architecture.vocab_size, architecture.hidden_size))
        self._scale = architecture.embedding_scale

    def process_weights_after_loading(self, device: Device) -> None:
        """Round the scale to the dtype of the weights."""
        del device
        if self._scale is not None:
            self._scale = float(torch.tensor(self._scale, dtype=self.weight.dtype))

    def forward(self, token_ids: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """Map token ids [T] to rows [T, hidden]."""
        rows = F.embedding(token_ids, self.weight)
        if adapters is not None:
            adapters.replace_embeddings(token_ids, rows)
        if self._scale is not None:
            rows.mul_(self._scale)
        if adapters is not None:
            adapters.update_embeddings(token_ids, rows, self._scale or 1.0)
        return rows


class Decoder(nn.Module, Model):
    """Decoder, which maps token ids to logits or hidden states.

    Its parameters are on `meta` until `load_decoder` assigns them.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        device: Device,
        dtype: torch.dtype,
        quantize: WeightFormat | None = None,
    ) -> None:
        super().__init__()
        self.architecture: ModelArchitecture = architecture
        self._device = device
        self.dtype = dtype
        self.watched_layers: tuple[int, ...] = ()
        """Numbers of layers after which `hidden_states` are kept, for a draft head."""
        self.hidden_states: list[Tensor] = []
        """[T, hidden] after each of the watched layers, of the latest batch."""
        with torch.device("meta"):
            self.embed = Embedding(architecture)
            self.layers = nn.ModuleList(
                DecoderLayer(
                    architecture,
                    layer.rope_index,
                    attention,
                    build_mlp(architecture, layer),
                )
                for layer, attention in zip(
                    architecture.layer_architectures, build_attention(architecture), strict=True
                )
            )
            self.norm = RmsNorm(
                architecture.hidden_size, architecture.norm_kind, architecture.norm_eps
            )
            self.head = (
                Projection(architecture.hidden_size, architecture.vocab_size, bias=False)
                if architecture.has_head
                else None
            )
        self.checkpoint: Path | None = None
        """Directory or file from which the weights were loaded."""
        self.adaptable: list[Projection] = []
        """Linear layers that adapters can change, by `Projection.number`."""
        for name, module in self.named_modules():
            if isinstance(module, Projection):
                module.weight_format = weight_format_for(name, quantize, is_head=name == "head")
                if not isinstance(module, Router) and ".experts." not in name:
                    module.number = len(self.adaptable)
                    self.adaptable.append(module)
        self._rope_tables = [
            build_rope_table(rope, architecture.max_model_len).to(device.torch_device)
            for rope in architecture.ropes
        ]
        self._layers: list[DecoderLayer] = [
            layer for layer in self.layers if isinstance(layer, DecoderLayer)
        ]

    def create_states(self, num_rows: int, num_snapshots: int) -> RecurrentStates | None:
        if self.architecture.delta_net is None:
            return None
        return RecurrentStates(self.architecture, num_rows, num_snapshots, self._device)

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        x = self.embed.forward(batch.token_ids, batch.token_adapters)
        rotations = [gather_rope_rotation(table, batch.positions) for table in self._rope_tables]
        delta = None
        watched: dict[int, Tensor] = {}
        for number, layer in enumerate(self._layers):
            if number in self.watched_layers:
                watched[number] = x.clone() if delta is None else x + delta
            delta = layer.forward(x, delta, rotations[layer.rope_index], batch, attention)
        if self.watched_layers:
            watched[len(self._layers)] = x if delta is None else x + delta
            self.hidden_states = [watched[number] for number in self.watched_layers]
        if not batch.logit_index.numel():
            size = (
                self.architecture.hidden_size if self.head is None else self.architecture.vocab_size
            )
            return torch.empty(0, size, device=x.device)
        last = self.norm.add_and_norm(
            x.index_select(0, batch.logit_index),
            None if delta is None else delta.index_select(0, batch.logit_index),
        )
        if self.head is None:
            return last.float()
        logits = self._compute_logits(self.head, last, batch)
        softcap = self.architecture.logit_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    @staticmethod
    def _compute_logits(head: Projection, x: Tensor, batch: Batch) -> Tensor:
        if batch.adapters is None:
            return head.forward(x).float()
        logits = head.forward(x)
        batch.adapters.logits.replace_logits(x, logits)
        batch.adapters.logits.update_linear(head.number, x, logits)
        return logits.float()


def build_attention(architecture: ModelArchitecture) -> Iterator[nn.Module]:
    """Yield the attention, or the module in its place, of each layer."""
    attention_type = SelfAttention if architecture.latent is None else LatentAttention
    places = iter(architecture.kv_layout.places)
    num_recurrent = 0
    for layer in architecture.layer_architectures:
        if layer.is_recurrent:
            yield GatedDeltaNet(architecture, num_recurrent)
            num_recurrent += 1
        else:
            yield attention_type(architecture, layer, next(places))


def build_mlp(architecture: ModelArchitecture, layer: LayerArchitecture) -> nn.Module:
    """Build the MLP, or the experts in its place, of a layer."""
    if layer.is_moe and architecture.moe is not None:
        return MixtureOfExperts(architecture.hidden_size, architecture.moe, architecture.activation)
    return Mlp(
        architecture.hidden_size,
        architecture.intermediate_size,
        architecture.mlp_bias,
        architecture.activation,
    )
