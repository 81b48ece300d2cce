"""Interfaces of the operations that a device creates, beside attention and linears."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from argosy.engine.execution.architectures.decoder import Activation, NormKind
from argosy.engine.execution.kernels.batch import Batch, BatchStates

if TYPE_CHECKING:
    from torch import Tensor


class Norm(Protocol):
    """RMS norm (Zhang & Sennrich 2019) over the last dimension, in float32."""

    scale: Tensor
    """Factors of the elements, float32 [size]."""

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
