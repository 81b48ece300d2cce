"""A mixture of experts over flat tokens: sorted by expert, each token summed in its own order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from argosy.engine.execution.layers import Mlp, Projection

if TYPE_CHECKING:
    from torch import Tensor

    from argosy.engine.execution.model_architecture import Activation, MoeArchitecture


class MixtureOfExperts(nn.Module):
    """Each token visits its `active` likeliest experts (Shazeer et al. 2017; Jiang et al. 2024)."""

    def __init__(self, hidden: int, architecture: MoeArchitecture, activation: Activation) -> None:
        super().__init__()
        self.router = Projection(hidden, architecture.num_experts, bias=False)
        self.experts = nn.ModuleList(
            Mlp(hidden, architecture.intermediate_size, bias=False, activation=activation)
            for _ in range(architecture.num_experts)
        )
        self._architecture = architecture

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]; a token's experts are added likeliest first, in float32."""
        weights, chosen = self._route(x)
        active = self._architecture.num_experts_per_token
        # order[i] is the (token, slot) pair, flattened, that comes i-th when sorted by expert
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self._architecture.num_experts).tolist()
        inputs = x.index_select(0, order // active).split(counts)
        outputs = [
            expert.forward(rows)
            for expert, rows in zip(self.experts, inputs, strict=True)
            if len(rows)
        ]
        pairs = torch.empty(order.numel(), x.shape[1], dtype=x.dtype, device=x.device)
        pairs.index_copy_(0, order, torch.cat(outputs))
        slots = pairs.view(len(x), active, -1)
        total = slots[:, 0] * weights[:, :1]
        for slot in range(1, active):
            total.add_(slots[:, slot] * weights[:, slot : slot + 1])
        return total.to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (float32) and ids of each token's experts, [T, active], likeliest first."""
        scores = self.router.forward(x).float().softmax(-1)
        weights, chosen = scores.topk(self._architecture.num_experts_per_token, dim=-1)
        if self._architecture.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        if self._architecture.round_weights:
            weights = weights.to(x.dtype).float()
        return weights, chosen
