"""Norms, gated activations and the gated delta rule (Yang et al. 2024) in torch.

Every result depends only on its own token's row, bit for bit, whatever else is in the batch. Torch's fused activations
use other instructions for the last elements of an array than for the rest. The gates here therefore combine operations
that treat all elements alike. The delta rule runs token by token in float32, so that a result depends only on the
tokens of its own sequence, however they are divided into chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.engine.execution.architectures.decoder import (
    Activation,
    DeltaNetArchitecture,
    MoeArchitecture,
    NormKind,
    RoutingGroups,
)
from argosy.engine.execution.kernels.batch import Batch, BatchStates
from argosy.engine.execution.kernels.operations import DeltaRuleWeights, Norm, norm_scale
from argosy.engine.execution.kernels.torch.rowwise_ops import gelu, silu

GATE_CHUNK_ROWS = 32
"""Number of rows that a torch gate computes at a time, so that its float32 intermediates stay in the CPU cache."""


@dataclass(frozen=True, slots=True)
class TorchElementwiseOps:
    """Row operations in plain torch."""

    def create_norm(self, kind: NormKind, weight: Tensor, eps: float) -> Norm:
        return TorchNorm(kind, weight, eps)

    def create_gated_activation(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        activate = _ACTIVATIONS[activation]

        def compute(x: Tensor) -> Tensor:
            parts = []
            for rows in x.split(GATE_CHUNK_ROWS):
                gate, up = rows.chunk(2, -1)
                parts.append(activate(gate.float(), up.float()).to(up.dtype))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return compute


class TorchNorm:
    """Norm in plain torch."""

    def __init__(self, kind: NormKind, weight: Tensor, eps: float) -> None:
        self._rounded_weight = weight.detach() if kind == "narrow" else None
        self.scale = norm_scale(kind, weight)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        if self._rounded_weight is not None:
            return F.rms_norm(x, shape, None, self._eps).mul_(self._rounded_weight)
        return F.rms_norm(x.float(), shape, None, self._eps).mul_(self.scale).to(x.dtype)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        return self(x.add_(delta))


def _clamped_swiglu(x: Tensor, up: Tensor) -> Tensor:
    """Compute the activation of gpt-oss."""
    gate = x.clamp(max=7.0)
    scaled = gate.mul(-1.702).exp_().add_(1.0)
    return gate.div_(scaled).mul_(up.clamp(-7.0, 7.0).add_(1.0))


_ACTIVATIONS: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda x, up: silu(x).mul_(up),
    "gelu_tanh": lambda x, up: gelu(x, "tanh").mul_(up),
    "clamped_swiglu": _clamped_swiglu,
    "sigmoid": lambda x, up: up / x.neg().exp_().add_(1.0),
}
"""Functions of float32 gate and up."""


NORM_EPS = 1e-6
"""Epsilon of the norm of queries and keys."""
MAX_SOFTPLUS_INPUT = 20.0
"""Input above which softplus is the identity."""


class TorchDeltaRule:
    """Gated delta rule in plain torch. Every operation has the same shape for each token, and so the same result."""

    def __init__(self, architecture: DeltaNetArchitecture, weights: DeltaRuleWeights) -> None:
        self._architecture = architecture
        self._weights = weights

    def __call__(
        self, qkv: Tensor, factors: Tensor, states: BatchStates, layer: int, batch: Batch
    ) -> Tensor:
        net = self._architecture
        starts = batch.query_start_loc.tolist()
        saved = [-1] * len(qkv) if states.save_slots is None else states.save_slots.tolist()
        out = torch.empty(len(qkv), net.value_heads, net.value_dim, dtype=qkv.dtype)
        for row, start, end in zip(batch.rows.tolist(), starts, starts[1:], strict=False):
            state = states.layer_state(row, layer)
            if int(batch.positions[start]) == 0:
                state.zero_()
            for token in range(start, end):
                out[token] = self._step(state, qkv[token].float(), factors[token].float())
                if saved[token] >= 0:
                    states.layer_state(saved[token], layer).copy_(state)
        return out

    def _step(self, state: Tensor, qkv: Tensor, factors: Tensor) -> Tensor:
        """Update the state in place by one token, and read it."""
        net, weights = self._architecture, self._weights
        flat_matrices, flat_inputs = state.tensor_split((net.matrix_elements,))
        matrices = flat_matrices.view(net.value_heads, net.key_dim, net.value_dim)
        inputs = flat_inputs.view(net.conv_width - 1, net.channels)
        window = torch.cat((inputs, qkv.unsqueeze(0)))
        mixed = (window * weights.conv).sum(0)
        inputs.copy_(window[1:])
        mixed = mixed / mixed.neg().exp_().add_(1.0)
        keys = net.key_heads * net.key_dim
        query, key, value = mixed.split_with_sizes((keys, keys, net.value_size))
        heads_per_key = net.value_heads // net.key_heads
        query, key = (
            _normalize(x.view(net.key_heads, net.key_dim)).repeat_interleave(heads_per_key, 0)
            for x in (query, key)
        )
        update, decay = factors.chunk(2)
        factor = update.neg().exp_().add_(1.0).reciprocal_().unsqueeze(1)
        rate = weights.decay_rate * F.softplus(
            decay + weights.decay_bias, threshold=MAX_SOFTPLUS_INPUT
        )
        matrices.mul_(rate.exp_()[:, None, None])
        known = (matrices * key.unsqueeze(2)).sum(1)
        delta = (value.view(net.value_heads, net.value_dim) - known).mul_(factor)
        matrices.add_(key.unsqueeze(2) * delta.unsqueeze(1))
        return (matrices * query.unsqueeze(2)).sum(1).mul_(net.key_dim**-0.5)


def _normalize(x: Tensor) -> Tensor:
    """Normalize the rows of x to length 1."""
    return x * (x * x).sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()


def select_experts(
    logits: Tensor, correction: Tensor | None, architecture: MoeArchitecture, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Select experts, as `Device.select_experts` does."""
    logits = logits.float()
    scores = (
        logits.softmax(-1)
        if architecture.scoring == "softmax"
        # torch.sigmoid would treat the last elements differently
        else logits.neg_().exp_().add_(1.0).reciprocal_()
    )
    corrected = scores if correction is None else scores + correction
    if architecture.groups is not None:
        corrected = _mask_groups(corrected, architecture.groups)
    expert_ids = corrected.topk(architecture.num_experts_per_token, dim=-1).indices
    weights = scores.gather(1, expert_ids)
    if architecture.normalize_weights:
        weights = weights / weights.sum(-1, keepdim=True).add_(1e-20)
    if architecture.weight_factor != 1.0:
        weights = weights * architecture.weight_factor
    if architecture.round_weights:
        weights = weights.to(dtype).float()
    return weights, expert_ids


def _mask_groups(scores: Tensor, groups: RoutingGroups) -> Tensor:
    """Return scores [T, experts] that are -inf outside of each token's best groups."""
    by_group = scores.unflatten(1, (groups.num_groups, -1))
    best = by_group.topk(groups.scored_experts, dim=-1).values
    group_scores = best[..., 0]
    for index in range(1, groups.scored_experts):
        group_scores = group_scores + best[..., index]
    active = group_scores.topk(groups.num_active_groups, dim=-1).indices
    is_idle = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, active, value=False)
    masked: Tensor = by_group.masked_fill(is_idle.unsqueeze(-1), -torch.inf)
    return masked.flatten(1)
