"""The decoder: one transformer for every family, its differences given by the ModelSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from argosy.engine.execution.batch import KvCacheShape
from argosy.engine.execution.layers import DecoderLayer, LoadableModule, Mlp, Projection, RmsNorm
from argosy.engine.execution.moe import MixtureOfExperts
from argosy.engine.execution.rope import build_rope_table, gather_rope_rotation

if TYPE_CHECKING:
    from torch import Tensor

    from argosy.engine.engine_config import WeightFormat
    from argosy.engine.execution.batch import Attention, Batch
    from argosy.engine.execution.device import Device
    from argosy.engine.execution.model_architecture import LayerArchitecture, ModelArchitecture


class Embedding(LoadableModule):
    """A row for each token, times `scale` where the family scales."""

    def __init__(self, architecture: ModelArchitecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(architecture.vocab_size, architecture.hidden_size))
        self._scale = architecture.embedding_scale

    def process_weights_after_loading(self, device: Device) -> None:
        """Round the scale as the weights are."""
        del device
        if self._scale is not None:
            self._scale = float(torch.tensor(self._scale, dtype=self.weight.dtype))

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] to [T, hidden]."""
        rows = F.embedding(token_ids, self.weight)
        return rows if self._scale is None else rows.mul_(self._scale)


class Decoder(nn.Module):
    """Token ids in, logits out; built with parameters on `meta`, which `load_decoder` assigns."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        device: Device,
        dtype: torch.dtype,
        quantize: WeightFormat | None = None,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self._device = device
        self._dtype = dtype
        with torch.device("meta"):
            self.embed = Embedding(architecture)
            self.layers = nn.ModuleList(
                DecoderLayer(architecture, layer, index, _build_mlp(architecture, layer))
                for index, layer in enumerate(architecture.layer_architectures)
            )
            self.norm = RmsNorm(
                architecture.hidden_size, architecture.norm_kind, architecture.norm_eps
            )
            self.head = Projection(architecture.hidden_size, architecture.vocab_size, bias=False)
        for place, module in self.named_modules():
            if isinstance(module, Projection):
                module.weight_format = weight_format_for(place, quantize)
        self._rope_tables = [
            build_rope_table(rope, architecture.max_model_len).to(device.torch_device)
            for rope in architecture.ropes
        ]
        self._layers: list[DecoderLayer] = [
            layer for layer in self.layers if isinstance(layer, DecoderLayer)
        ]

    def create_attention(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> Attention:
        """Allocate a KV cache for this model, in its own dtype or another, and the attention over it."""
        shape = KvCacheShape(
            num_layers=self.architecture.num_layers,
            num_heads=self.architecture.num_heads,
            num_kv_heads=self.architecture.num_kv_heads,
            head_dim=self.architecture.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype or self._dtype,
        )
        return self._device.create_attention(shape)

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        """Logits of the flat tokens `batch.logit_index`: [L, vocab_size] float32, L may be 0.

        Writes the keys and values of every token of the batch through `attention`.
        """
        x = self.embed.forward(batch.token_ids)
        rows = [gather_rope_rotation(table, batch.positions) for table in self._rope_tables]
        for layer in self._layers:
            layer.forward(x, rows[layer.rope_index], batch, attention)
        if not batch.logit_index.numel():
            return torch.empty(0, self.architecture.vocab_size, device=x.device)
        last = self.norm.forward(x.index_select(0, batch.logit_index))
        logits = self.head.forward(last).float()
        cap = self.architecture.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def weight_format_for(module_name: str, quantize: WeightFormat | None) -> WeightFormat | None:
    """The format of the projection at `place` (its module's name) in a model quantized so.

    The head keeps 8 bits, since each of its errors is an error of a logit. Routers stay as they are: they are
    small, and choose. So does the embedding, of which a token reads one row, mapped from the checkpoint.
    """
    if module_name.endswith("router"):
        return None
    return "int8" if module_name == "head" and quantize == "int4" else quantize


def _build_mlp(spec: ModelArchitecture, layer: LayerArchitecture) -> nn.Module:
    if layer.is_moe and spec.moe is not None:
        return MixtureOfExperts(spec.hidden_size, spec.moe, spec.activation)
    return Mlp(spec.hidden_size, spec.intermediate_size, spec.mlp_bias, spec.activation)
