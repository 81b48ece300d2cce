"""Mixture of experts over flat tokens, which are sorted by expert and summed per token in a fixed order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from argosy.engine.execution.architectures.decoder import Activation, MoeArchitecture, RoutingGroups
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.operations import Experts
from argosy.engine.execution.layers.modules import (
    GatedActivation,
    LoadableModule,
    Mlp,
    Projection,
)

SelectLargest = Callable[[Tensor, int], Tensor]
"""Function that returns the indices of each row's largest scores, `Device.select_largest`."""


class Router(Projection):
    """Linear layer that scores the experts, and the selection of a token's experts by the scores."""

    def __init__(self, hidden: int, architecture: MoeArchitecture) -> None:
        super().__init__(hidden, architecture.num_experts, architecture.has_biases)
        self.e_score_correction_bias = (
            nn.Parameter(torch.empty(architecture.num_experts))
            if architecture.has_score_correction
            else None
        )
        self.dtype = torch.float32 if architecture.routes_in_float32 else None
        self._architecture = architecture

    def select_experts(self, x: Tensor, select_largest: SelectLargest) -> tuple[Tensor, Tensor]:
        """Return float32 weights and ids of each token's experts, [T, num_experts_per_token], likeliest first."""
        architecture = self._architecture
        logits = self.forward(x if self.dtype is None else x.to(self.dtype)).float()
        if (
            architecture.scoring == "sigmoid"
        ):  # torch.sigmoid would treat the last elements differently
            scores = logits.neg_().exp_().add_(1.0).reciprocal_()
        else:
            scores = logits.softmax(-1)
        corrected = scores
        if self.e_score_correction_bias is not None:
            corrected = scores + self.e_score_correction_bias
        if architecture.groups is not None:
            corrected = _mask_groups(corrected, architecture.groups, select_largest)
        expert_ids = select_largest(corrected, architecture.num_experts_per_token)
        weights = scores.gather(1, expert_ids)
        if architecture.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True).add_(1e-20)
        if architecture.weight_factor != 1.0:
            weights = weights * architecture.weight_factor
        if architecture.round_weights:
            weights = weights.to(x.dtype).float()
        return weights, expert_ids


class MixtureOfExperts(LoadableModule):
    """Mixture of experts, in which the `num_experts_per_token` likeliest experts compute each token.

    The method follows Shazeer et al. 2017 and Jiang et al. 2024.
    """

    def __init__(self, hidden: int, architecture: MoeArchitecture, activation: Activation) -> None:
        super().__init__()
        self.router = Router(hidden, architecture)
        self.experts = nn.ModuleList(
            Mlp(
                hidden,
                architecture.intermediate_size,
                architecture.has_biases,
                activation,
                architecture.is_interleaved,
            )
            for _ in range(architecture.num_experts)
        )
        self.shared = (
            Mlp(hidden, architecture.shared_intermediate_size, bias=False, activation=activation)
            if architecture.shared_intermediate_size
            else None
        )
        self.shared_gate = (
            Projection(hidden, 1, bias=False) if architecture.has_shared_gate else None
        )
        self.shared_output = GatedActivation("sigmoid") if architecture.has_shared_gate else None
        self._architecture = architecture
        self._compute_experts: Experts = self._compute_one_by_one
        self._select_largest: SelectLargest

    def process_weights_after_loading(self, device: Device) -> None:
        """Let the device compute all experts at once, if it can. Their weights are loaded already."""
        experts = [expert for expert in self.experts if isinstance(expert, Mlp)]
        compute = device.create_experts(
            [expert.gate_up.linear for expert in experts],
            [expert.down.linear for expert in experts],
            experts[0].gate.forward,
        )
        self._select_largest = device.select_largest
        if compute is not None:
            self._compute_experts = compute
            self.experts = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to [T, hidden]. A token's experts are added likeliest first, in float32."""
        weights, expert_ids = self.router.select_experts(x, self._select_largest)
        total = self._compute_experts(x, weights, expert_ids)
        if self.shared is not None:
            total.add_(self._compute_shared(self.shared, x))
        return total.to(x.dtype)

    def _compute_one_by_one(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        num_active = self._architecture.num_experts_per_token
        # order[i] is the flat index of the i-th (token, choice) pair when sorted by expert
        order = expert_ids.flatten().argsort(stable=True)
        counts = expert_ids.flatten().bincount(minlength=self._architecture.num_experts).tolist()
        inputs = x.index_select(0, order // num_active).split(counts)
        outputs = [
            expert.forward(rows)
            for expert, rows in zip(self.experts, inputs, strict=True)
            if len(rows)
        ]
        pair_outputs = torch.empty(order.numel(), x.shape[1], dtype=x.dtype, device=x.device)
        pair_outputs.index_copy_(0, order, torch.cat(outputs))
        choices = pair_outputs.view(len(x), num_active, -1)
        total = choices[:, 0] * weights[:, :1]
        for choice in range(1, num_active):
            total.add_(choices[:, choice] * weights[:, choice : choice + 1])
        return total

    def _compute_shared(self, shared: Mlp, x: Tensor) -> Tensor:
        output = shared.forward(x)
        if self.shared_gate is None or self.shared_output is None:
            return output
        gate = self.shared_gate.forward(x).expand_as(output)
        return self.shared_output.forward(torch.cat((gate, output), 1))


def _mask_groups(scores: Tensor, groups: RoutingGroups, select_largest: SelectLargest) -> Tensor:
    """Return scores [T, experts] that are -inf outside of each token's best groups."""
    by_group = scores.unflatten(1, (groups.num_groups, -1))
    best = by_group.topk(groups.scored_experts, dim=-1).values
    group_scores = best[..., 0]
    for index in range(1, groups.scored_experts):
        group_scores = group_scores + best[..., index]
    active = select_largest(group_scores, groups.num_active_groups)
    is_idle = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, active, value=False)
    masked: Tensor = by_group.masked_fill(is_idle.unsqueeze(-1), -torch.inf)
    return masked.flatten(1)
