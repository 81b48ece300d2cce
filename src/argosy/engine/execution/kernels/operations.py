"""Interfaces of the operations that a device creates, beside attention and linears, and the recurrent states.

All recurrent states are in one table. Its first slots are those of the rows of the persistent batch, and the others
hold snapshots. A snapshot is a copy of the state that a sequence had after some number of tokens, from which another
one with the same tokens can start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch

from argosy.engine.execution.architectures.decoder import Activation, ModelArchitecture, NormKind
from argosy.engine.execution.kernels.batch import Batch, BatchStates
from argosy.engine.execution.kernels.huge_pages import huge_zeros
from argosy.engine.scheduling import StepPlan

if TYPE_CHECKING:
    from torch import Tensor


class Norm(Protocol):
    """RMS norm (Zhang & Sennrich 2019) over the last dimension, in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x, [T, size] or [T, heads, size] with its last two dimensions contiguous."""
        ...

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        """Add delta to x [T, size] in place, rounded to x's dtype, and return the normalized sum."""
        ...


class ElementwiseOps(Protocol):
    """Factory of a device's row operations."""

    def create_norm(self, kind: NormKind, weight: Tensor, eps: float) -> Norm:
        """Create the norm with weight [size], in the weight's dtype."""
        ...

    def create_gated_activation(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """Create a function that maps [T, 2 * size] to activation(first half, second half), [T, size]."""
        ...


class Experts(Protocol):
    """Experts of a layer."""

    def __call__(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Map x [T, hidden] to float32 [T, hidden], the sums of the weighted outputs of each token's experts.

        The weights, float32, and the ids of the experts are [T, experts per token]. Outputs are added in their order.
        """
        ...


@dataclass(frozen=True, slots=True)
class DeltaRuleWeights:
    """Weights of a layer, all float32."""

    conv: Tensor
    """[width, channels]."""
    decay_rate: Tensor
    """[value_heads], negative: logarithm of the decay for each unit of the softplus of its logit."""
    decay_bias: Tensor
    """[value_heads], added to the logit of the decay."""


class DeltaRule(Protocol):
    """Gated delta rule of one layer."""

    def __call__(
        self, qkv: Tensor, factors: Tensor, states: BatchStates, layer: int, batch: Batch
    ) -> Tensor:
        """Update the states of the batch's sequences by all their tokens, and read them after each token.

        Args:
            qkv: Queries, keys and values of all heads [T, channels], before the convolution.
            factors: Logits of the update's factor for each value head, then of the decay, [T, 2 * value_heads].
            states: States of the sequences.
            layer: Index of the layer in the states.
            batch: The batch.

        Returns:
            Tensor [T, value_heads, value_dim] in qkv's dtype.
        """
        ...


def norm_scale(kind: NormKind, weight: Tensor) -> Tensor:
    """Return the float32 factor of a norm, which is the weight, or 1 + weight for kind "offset"."""
    scale = weight.detach().float()
    return scale + 1.0 if kind == "offset" else scale.contiguous()


class RecurrentStates:
    """Table of the states of `num_rows` rows and of `num_snapshots` snapshots of a model with recurrent layers."""

    def __init__(self, architecture: ModelArchitecture, num_rows: int, num_snapshots: int) -> None:
        if architecture.delta_net is None:
            raise ValueError(f"{architecture.architecture} has no recurrent layers")
        layer_size = architecture.delta_net.state_elements
        size = architecture.num_recurrent_layers * layer_size
        self._num_rows = num_rows
        self._states = BatchStates(
            huge_zeros((num_rows + num_snapshots, size), torch.float32), layer_size
        )

    def load_snapshots(self, loads: list[tuple[int, int]]) -> None:
        """Copy snapshots to rows, given as (snapshot, row) pairs."""
        table = self._states.table
        for snapshot, row in loads:
            table[row].copy_(table[self._num_rows + snapshot])

    def attach(self, batch: Batch, plan: StepPlan | None = None) -> Batch:
        """Return the batch with the states of its sequences, and the snapshots that the plan saves."""
        if plan is None or not plan.snapshot_saves:
            return replace(batch, states=self._states)
        save_slots = torch.full_like(batch.positions, -1)
        ends = [0, *accumulate(plan.counts)]
        for chunk, position, snapshot in plan.snapshot_saves:
            flat_token = ends[chunk] + position - 1 - plan.starts[chunk]
            save_slots[flat_token] = self._num_rows + snapshot
        return replace(batch, states=replace(self._states, save_slots=save_slots))
