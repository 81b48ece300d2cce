"""Computation of pooling results from the vectors of the core.

Each vector is processed alone in float32, so that it does not depend on the other inputs of its request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argosy.engine.pooling import PoolingActivation, Similarity

MIN_NORM = 1e-12
"""Smallest length by which a vector is divided."""


def normalize(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale vectors [..., size] to length 1."""
    norms = np.sqrt(np.square(vectors).sum(-1, keepdims=True))
    scaled: NDArray[np.float32] = vectors / np.maximum(norms, np.float32(MIN_NORM))
    return scaled


def activate(logits: NDArray[np.float32], activation: PoolingActivation) -> NDArray[np.float32]:
    """Apply an activation to the outputs [labels] of a classifier."""
    if activation == "sigmoid":
        # exp of a negative number does not overflow
        positive = 1 / (1 + np.exp(-np.abs(logits)))
        return np.where(logits >= 0, positive, 1 - positive)
    if activation == "softmax":
        weights: NDArray[np.float32] = np.exp(logits - logits.max())
        probabilities: NDArray[np.float32] = weights / weights.sum()
        return probabilities
    return np.tanh(logits) if activation == "tanh" else logits


def compute_similarity(
    first: NDArray[np.float32], second: NDArray[np.float32], similarity: Similarity
) -> float:
    """Return the similarity of two embeddings [size]. Larger is more similar."""
    if similarity == "cosine":
        first, second = normalize(first), normalize(second)
    if similarity in ("cosine", "dot"):
        return float(np.dot(first, second))
    difference = first - second
    if similarity == "manhattan":
        return -float(np.abs(difference).sum())
    return -float(np.sqrt(np.square(difference).sum()))
