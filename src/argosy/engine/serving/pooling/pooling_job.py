"""Pooling job: engine requests of one call, and the computation of its result from their vectors.

Each vector is processed alone in float32, so that it does not depend on the other inputs of its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from argosy.engine.serving.core_messages import Delta, check_success
from argosy.protocol import ApiError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argosy.engine.engine_request import EngineRequest
    from argosy.engine.pooling import PoolingActivation, Similarity
    from argosy.engine.serving.engine_core.engine_client import EngineClient
    from argosy.engine.serving.engine_core.in_flight_requests import DeltaStream


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


@dataclass(frozen=True, slots=True)
class PoolingResult:
    """Result of each input of a call, in their order."""

    values: list[NDArray[np.float32]]
    """Embedding [size], embeddings of its tokens [tokens, size], probabilities of labels [labels], or score []."""
    prompts: list[list[int]]
    """Token ids of each input. Those of a pair are joined."""

    @property
    def prompt_tokens(self) -> list[int]:
        """Number of tokens of each input."""
        return [len(prompt) for prompt in self.prompts]


@dataclass(frozen=True, slots=True)
class PoolingJob:
    """Engine requests of one call, which may run beside any others."""

    requests: list[EngineRequest]
    finish: Callable[[Sequence[NDArray[np.float32]]], PoolingResult]
    """Returns the result, given the vector of each request."""

    async def run(self, engine: EngineClient) -> PoolingResult:
        """Run the requests. If one fails or the caller is cancelled, abort the others.

        A core that restarts computes them again. Call it on the engine's event loop.

        Raises:
            ApiError: A request failed, was cancelled or has timed out.
        """
        streams: list[DeltaStream] = []
        vectors: dict[int, NDArray[np.float32]] = {}
        has_delta = asyncio.Event()
        updated: list[int] = []

        def on_delta(index: int) -> None:
            updated.append(index)
            has_delta.set()

        try:
            for index, request in enumerate(self.requests):
                streams.append(engine.generate(request))
                streams[-1].set_listener(partial(on_delta, index))
            while len(vectors) < len(self.requests):
                await has_delta.wait()
                has_delta.clear()
                while updated:
                    index = updated.pop()
                    delta = streams[index].drain()
                    if delta is not None and delta.finish_reason is not None:
                        vectors[index] = read_vector(delta)
        finally:
            for stream in streams:
                stream.close()
        return self.finish([vectors[index] for index in range(len(self.requests))])


def read_vector(delta: Delta) -> NDArray[np.float32]:
    """Return the vector of a request's last delta.

    Raises:
        ApiError: The request failed, was cancelled or has timed out.
    """
    check_success(delta)
    if delta.finish_reason == "timeout":
        raise ApiError(
            408,
            "timeout",
            "The request was not computed before its deadline. Send fewer inputs, or raise timeout_s.",
        )
    return np.frombuffer(delta.pooled, dtype=np.float32)
