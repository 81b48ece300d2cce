"""Decoder of the models that transformers implements, over Argosy's paged attention and packed weights.

`generic_builder` builds the model without weights and runs it once on the `meta` device. That run records the attention
of each layer, and shows whether paged attention can compute it. `generic_loader` then replaces the matrix products by
packed ones while it reads the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from argosy.engine.execution.architectures.architecture import AttentionParams, GenericArchitecture
from argosy.engine.execution.decoders.generic_trace import ModelTrace
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.layers.model import Model


@dataclass(frozen=True, slots=True)
class GenericModel:
    """Model of transformers with its parameters on `meta`."""

    path: Path
    module: Any
    architecture: GenericArchitecture
    trace: ModelTrace


class _LayerAttention:
    """Attention of one layer, bound to the batch that its decoder computes."""

    def __init__(self, decoder: GenericDecoder, params: AttentionParams) -> None:
        self._decoder = decoder
        self._params = params

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with tensors [1, heads, T, head_dim], and return [1, T, heads, head_dim]."""
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        batch, attention = self._decoder.current_step
        return attention(q, k, v, batch, self._params, None)[None]


class GenericDecoder(Model):
    """Decoder that runs a model of transformers."""

    def __init__(self, model: GenericModel, device: Device, dtype: torch.dtype) -> None:
        self.architecture: GenericArchitecture = model.architecture
        self.current_step: tuple[Batch, Attention]
        """Batch and attention of the step that is being computed."""
        self._model = model
        self._device = device
        self._dtype = dtype
        places = model.architecture.kv_layout.places
        for layer, place in zip(model.trace.layers, places, strict=True):
            params = replace(layer.params, layer=place.layer, group=place.group)
            layer.module.argosy_attention = _LayerAttention(self, params)

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        self.current_step = batch, attention
        logits = run_model(self._model.module, batch.token_ids, batch.positions, batch.logit_index)
        if not self._model.trace.selects_logits:
            logits = logits.index_select(0, batch.logit_index)
        return logits.float()


def run_model(
    module: Any,  # noqa: ANN401 - of transformers
    token_ids: Tensor,
    positions: Tensor,
    logit_index: Tensor,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Run the model on flat tokens, and return logits [L, vocab_size], or of all tokens if it cannot select them."""
    logits: Tensor = module(
        input_ids=token_ids[None],
        position_ids=positions[None],
        attention_mask=attention_mask,
        use_cache=False,
        logits_to_keep=logit_index,
    ).logits
    return logits[0]


def attend(
    module: Any,  # noqa: ANN401 - of transformers
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer of a loaded model, as transformers calls it."""
    del attention_mask, kwargs
    return module.argosy_attention(query, key, value), None
