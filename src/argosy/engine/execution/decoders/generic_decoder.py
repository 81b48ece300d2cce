"""Decoder of the models that transformers implements, over Argosy's paged attention and packed weights.

`generic_builder` builds the model without weights and runs it once on the `meta` device. That run records the attention
of each layer, and shows whether paged attention can compute it. `generic_loader` then replaces the matrix products by
packed ones while it reads the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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


class GenericDecoder(Model):
    """Decoder that runs a model of transformers."""

    def __init__(self, model: GenericModel, device: Device, dtype: torch.dtype) -> None:
        self.architecture: GenericArchitecture = model.architecture
        self._current_step: tuple[Batch, Attention]
        """Batch and attention of the step that is being computed."""
        self._model = model
        self._device = device
        self.dtype = dtype
        places = model.architecture.kv_layout.places
        for layer, place in zip(model.trace.layers, places, strict=True):
            params = replace(layer.params, layer=place.layer, group=place.group)
            layer.module.argosy_attention = partial(self._attend, params)

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        self._current_step = batch, attention
        logits = run_model(self._model.module, batch.token_ids, batch.positions, batch.logit_index)
        if not self._model.trace.selects_logits:
            logits = logits.index_select(0, batch.logit_index)
        return logits.float()

    def _attend(self, params: AttentionParams, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with tensors [1, heads, T, head_dim] of the step, and return [1, T, heads, head_dim]."""
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        batch, attention = self._current_step
        return attention(q, k, v, batch, params, None)[None]


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


class PackedLinear(nn.Module):
    """Linear layer x @ weight.T + bias, packed by the device."""

    def __init__(self, linear: Callable[[Tensor], Tensor], num_outputs: int) -> None:
        super().__init__()
        self._linear = linear
        self._num_outputs = num_outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., cols] to [..., num_outputs]."""
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self._num_outputs)


PackedExperts = tuple[list[Callable[[Tensor], Tensor]], list[Callable[[Tensor], Tensor]]]
"""Projection of each expert to gate and up values, or only to up values if the module has no gate, and down."""


def pack_experts(
    experts: Any,  # noqa: ANN401 - a module of transformers
    read: Callable[[str, int], Tensor],
    pack: Callable[[Tensor, Tensor | None, str], Callable[[Tensor], Tensor]],
) -> PackedExperts:
    """Pack the 3-D parameters of an experts module of transformers, one expert after the other.

    `read` returns an expert's matrix or bias of a parameter, and `pack` packs a weight [N, K] with its bias.
    """
    packed: PackedExperts = ([], [])
    names = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    for target, name in zip(packed, names, strict=True):
        for expert in range(len(getattr(experts, name))):
            weight = read(name, expert)
            weight = weight.mT if experts.is_transposed else weight
            bias = read(f"{name}_bias", expert) if experts.has_bias else None
            target.append(pack(weight, bias, f"{name}.{expert}"))
    return packed


def compute_experts(
    experts: Any,  # noqa: ANN401 - a module of transformers
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
) -> Tensor:
    """Map x [T, hidden] to the weighted sum of each token's experts [T, choices], in the order of its choices."""
    up, down = experts.packed_experts
    num_choices = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)
    counts = expert_ids.flatten().bincount(minlength=len(up)).tolist()
    outputs = []
    for expert, rows in enumerate(x.index_select(0, order // num_choices).split(counts)):
        if len(rows):
            hidden = up[expert](rows)
            hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)  # noqa: SLF001 - the module's documented extension point
            outputs.append(down[expert](hidden))
    pair_outputs = torch.empty(order.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    pair_outputs.index_copy_(0, order, torch.cat(outputs))
    choices = pair_outputs.view(len(x), num_choices, -1)
    if experts.has_post_expert_norm:
        choices = experts.post_expert_norm(choices)
    total = choices[:, 0] * expert_weights[:, :1]
    for choice in range(1, num_choices):
        total = total + choices[:, choice] * expert_weights[:, choice : choice + 1]
    return total.to(x.dtype)
