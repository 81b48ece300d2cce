"""Results of `LLM.embed`, `LLM.score` and `LLM.classify`, with the attributes that vLLM's have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Output = TypeVar("Output")


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """Embedding of a text."""

    embedding: NDArray[np.float32]

    @property
    def hidden_size(self) -> int:
        """Number of elements."""
        return int(self.embedding.shape[-1])


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Score of a pair of texts."""

    score: float


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """Probabilities of labels."""

    probs: NDArray[np.float32]
    label: str
    """Name of the most probable label."""

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[Output]):
    """Result of one text or one pair of texts."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    """Token ids of the text, or of the pair. Those of both texts in turn if they were embedded."""

    @property
    def finished(self) -> bool:
        """True, because results are complete."""
        return True
