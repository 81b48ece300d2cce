"""Mixture of experts over flat tokens, which are sorted by expert and summed per token in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from argosy.engine.execution.architectures.decoder import Activation, MoeArchitecture
from argosy.engine.execution.kernels.batch import RowAdapters
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.operations import Experts
from argosy.engine.execution.layers.modules import (
    GatedActivation,
    LoadableModule,
    Mlp,
    Projection,
)


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

    def select_experts(self, x: Tensor, device: Device) -> tuple[Tensor, Tensor]:
        """Return float32 weights and ids of each token's experts, [T, num_experts_per_token], likeliest first."""
        logits = self.forward(x if self.dtype is None else x.to(self.dtype))
        correction = self.e_score_correction_bias
        return device.select_experts(logits, correction, self._architecture, x.dtype)


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
        self._device: Device

    def process_weights_after_loading(self, device: Device) -> None:
        """Let the device compute all experts at once, if it can. Their weights are loaded already."""
        experts = [expert for expert in self.experts if isinstance(expert, Mlp)]
        compute = device.create_experts(
            [expert.gate_up.linear for expert in experts],
            [expert.down.linear for expert in experts],
            experts[0].gate.forward,
        )
        self._device = device
        if compute is not None:
            self._compute_experts = compute
            self.experts = nn.ModuleList()

    def forward(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """Map x [T, hidden] to [T, hidden]. A token's experts are added likeliest first, in float32.

        Adapters change the expert that computes every token.
        """
        weights, expert_ids = self.router.select_experts(x, self._device)
        total = self._compute_experts(x, weights, expert_ids)
        if self.shared is not None:
            total.add_(self._compute_shared(self.shared, x, adapters))
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

    def _compute_shared(self, shared: Mlp, x: Tensor, adapters: RowAdapters | None) -> Tensor:
        output = shared.forward(x, adapters)
        if self.shared_gate is None or self.shared_output is None:
            return output
        gate = self.shared_gate.forward(x, adapters).expand_as(output)
        return self.shared_output.forward(torch.cat((gate, output), 1))
