"""Gated delta rule (Yang et al. 2024) in torch.

The recurrence runs token by token in float32, so that a result depends only on the tokens of its own sequence, bit for
bit, however they are divided into chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.engine.execution.architectures.decoder import DeltaNetArchitecture
from argosy.engine.execution.kernels.batch import Batch, BatchStates
from argosy.engine.execution.kernels.operations import DeltaRuleWeights

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
