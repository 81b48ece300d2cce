"""The decoder: one transformer for every family, its differences given by the ModelSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from argosy.engine.execution.batch import CacheShape
from argosy.engine.execution.layers import Layer, Mlp, Part, Projection, RmsNorm
from argosy.engine.execution.moe import Mixture
from argosy.engine.execution.rope import rope_rows, rope_table

if TYPE_CHECKING:
    from torch import Tensor

    from argosy.engine.engine_config import WeightFormat
    from argosy.engine.execution.batch import Attention, Batch
    from argosy.engine.execution.device import Device
    from argosy.engine.execution.model_architecture import LayerSpec, ModelSpec


class Embedding(Part):
    """A row for each token, times `scale` where the family scales."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden))
        self._scale = spec.embed_scale

    def settle(self, device: Device) -> None:
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
        spec: ModelSpec,
        device: Device,
        dtype: torch.dtype,
        quantize: WeightFormat | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self._device = device
        self._dtype = dtype
        with torch.device("meta"):
            self.embed = Embedding(spec)
            self.layers = nn.ModuleList(
                Layer(spec, layer, index, _mlp(spec, layer))
                for index, layer in enumerate(spec.layer_specs)
            )
            self.norm = RmsNorm(spec.hidden, spec.norm, spec.norm_eps)
            self.head = Projection(spec.hidden, spec.vocab_size, bias=False)
        for place, module in self.named_modules():
            if isinstance(module, Projection):
                module.form = form_at(place, quantize)
        self._ropes = [
            rope_table(rope, spec.max_model_len).to(device.torch_device) for rope in spec.ropes
        ]
        self._stack: list[Layer] = [layer for layer in self.layers if isinstance(layer, Layer)]

    def attention_for(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> Attention:
        """Allocate a KV cache for this model, in its own dtype or another, and the attention over it."""
        shape = CacheShape(
            layers=self.spec.layers,
            heads=self.spec.heads,
            kv_heads=self.spec.kv_heads,
            head_dim=self.spec.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype or self._dtype,
        )
        return self._device.attention(shape)

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        """Logits of the flat tokens `batch.logit_index`: [L, vocab_size] float32, L may be 0.

        Writes the keys and values of every token of the batch through `attention`.
        """
        x = self.embed.forward(batch.token_ids)
        rows = [rope_rows(table, batch.positions) for table in self._ropes]
        for layer in self._stack:
            layer.forward(x, rows[layer.rope], batch, attention)
        if not batch.logit_index.numel():
            return torch.empty(0, self.spec.vocab_size, device=x.device)
        last = self.norm.forward(x.index_select(0, batch.logit_index))
        logits = self.head.forward(last).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def form_at(place: str, quantize: WeightFormat | None) -> WeightFormat | None:
    """The format of the projection at `place` (its module's name) in a model quantized so.

    The head keeps 8 bits, since each of its errors is an error of a logit. Routers stay as they are: they are
    small, and choose. So does the embedding, of which a token reads one row, mapped from the checkpoint.
    """
    if place.endswith("router"):
        return None
    return "int8" if place == "head" and quantize == "int4" else quantize


def _mlp(spec: ModelSpec, layer: LayerSpec) -> nn.Module:
    if layer.sparse and spec.moe is not None:
        return Mixture(spec.hidden, spec.moe, spec.activation)
    return Mlp(spec.hidden, spec.intermediate, spec.mlp_bias, spec.activation)
