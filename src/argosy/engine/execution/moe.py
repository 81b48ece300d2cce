"""Mixture of experts over flat tokens, which are sorted by expert and summed per token in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from argosy.engine.execution.layers import Mlp, Projection

if TYPE_CHECKING:
    from torch import Tensor

    from argosy.engine.execution.model_architecture import Activation, MoeArchitecture


class MixtureOfExperts(nn.Module):
    """Mixture of experts, in which the `num_experts_per_token` likeliest experts compute each token.

    The method follows Shazeer et al. 2017 and Jiang et al. 2024.
    """

    def __init__(self, hidden: int, architecture: MoeArchitecture, activation: Activation) -> None:
        super().__init__()
        self.router = Projection(hidden, architecture.num_experts, architecture.has_biases)
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
        self._architecture = architecture

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to [T, hidden]. A token's experts are added likeliest first, in float32."""
        weights, expert_ids = self._route(x)
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
        return total.to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 weights and ids of each token's experts, [T, num_experts_per_token], likeliest first."""
        scores = self.router.forward(x).float().softmax(-1)
        weights, expert_ids = scores.topk(self._architecture.num_experts_per_token, dim=-1)
        if self._architecture.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        if self._architecture.round_weights:
            weights = weights.to(x.dtype).float()
        return weights, expert_ids
