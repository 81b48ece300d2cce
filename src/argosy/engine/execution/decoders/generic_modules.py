"""Modules that replace matrix products of a transformers model: packed linear layers and packed experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from argosy.engine.engine_config import WeightFormat
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.pack_cache import PackedWeightProvider

UNQUANTIZED_NAMES = {"gate", "router", "shared_expert_gate"}
"""Last names of linear layers that select experts. They are small, and are never quantized."""


class PackedLinear(nn.Module):
    """Linear layer x @ weight.T + bias, packed by the device."""

    def __init__(self, linear: Callable[[Tensor], Tensor], num_outputs: int) -> None:
        super().__init__()
        self._linear = linear
        self._num_outputs = num_outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., cols] to [..., num_outputs]."""
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self._num_outputs)


class PackedExperts:
    """Projections of all experts of one module, which `compute_experts` uses."""

    def __init__(self) -> None:
        self.up: list[Callable[[Tensor], Tensor]] = []
        """Projection of each expert to gate and up values, or only to up values if the module has no gate."""
        self.down: list[Callable[[Tensor], Tensor]] = []


def pack_experts(
    experts: Any,  # noqa: ANN401 - a module of transformers
    read: Callable[[str, int], Tensor],
    pack: Callable[[Tensor, Tensor | None, str], Callable[[Tensor], Tensor]],
) -> PackedExperts:
    """Pack the 3-D parameters of an experts module of transformers, one expert after the other.

    Args:
        experts: The module, whose class is decorated with `use_experts_implementation`.
        read: Returns the part of a parameter that belongs to one expert, a matrix or a bias.
        pack: Packs a weight [N, K] with its bias, under the given name.
    """
    packed = PackedExperts()
    for target, name in (
        (packed.up, "gate_up_proj" if experts.has_gate else "up_proj"),
        (packed.down, "down_proj"),
    ):
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
    """Map x [T, hidden] to the weighted sum of each token's experts, in the order of its choices.

    Args:
        experts: Experts module of transformers with `packed_experts`.
        x: Rows of the tokens.
        expert_ids: Ids of each token's experts, [T, choices].
        expert_weights: Their weights, [T, choices].
    """
    packed: PackedExperts = experts.packed_experts
    num_choices = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)
    counts = expert_ids.flatten().bincount(minlength=len(packed.up)).tolist()
    outputs = []
    for expert, rows in enumerate(x.index_select(0, order // num_choices).split(counts)):
        if len(rows):
            hidden = packed.up[expert](rows)
            hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)  # noqa: SLF001 - the module's documented extension point
            outputs.append(packed.down[expert](hidden))
    pair_outputs = torch.empty(order.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    pair_outputs.index_copy_(0, order, torch.cat(outputs))
    choices = pair_outputs.view(len(x), num_choices, -1)
    if experts.has_post_expert_norm:
        choices = experts.post_expert_norm(choices)
    total = choices[:, 0] * expert_weights[:, :1]
    for choice in range(1, num_choices):
        total = total + choices[:, choice] * expert_weights[:, choice : choice + 1]
    return total.to(x.dtype)


def weight_format_of(
    name: str, quantize: WeightFormat | None, *, is_head: bool
) -> WeightFormat | None:
    """Return the weight format of the linear layer `name` in a model quantized to `quantize`.

    The rules are those of `decoder.weight_format_for`.
    """
    if name.rpartition(".")[2] in UNQUANTIZED_NAMES:
        return None
    return "int8" if is_head and quantize == "int4" else quantize


def create_packed_linear(
    device: Device,
    weight: Tensor,
    bias: Tensor | None,
    weight_format: WeightFormat | None,
    get_packed: PackedWeightProvider,
) -> PackedLinear:
    """Pack weight [N, K] and bias [N] into a linear layer."""
    linear = device.create_linear(weight, bias, weight_format, get_packed)
    return PackedLinear(linear, weight.shape[0])
