"""Responses of models that pool, in the shapes of OpenAI's embeddings and of vLLM."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType


class PoolingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all inputs. No output is generated."""

    prompt_tokens: int
    total_tokens: int


class PooledResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Fields common to all responses but that of reranking."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: PoolingUsage


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """Vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Raw
    """List of numbers, or their bytes in base64."""


class EmbeddingList(PooledResponse, frozen=True, kw_only=True):
    """Response of `/v1/embeddings`."""

    data: list[Embedding]


class PoolingOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Vector, vectors of the tokens, or probabilities of one input."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: Raw
    """List of numbers, list of such lists, or their bytes in base64."""


class PoolingList(PooledResponse, frozen=True, kw_only=True):
    """Response of `/pooling`."""

    data: list[PoolingOutput]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Score of one pair of texts."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(PooledResponse, frozen=True, kw_only=True):
    """Response of `/score`."""

    data: list[Score]


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """Most probable label of one input, and the probabilities of all."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationList(PooledResponse, frozen=True, kw_only=True):
    """Response of `/classify`."""

    data: list[Classification]


class RerankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Document of a result."""

    text: str


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """Relevance of one document."""

    index: int
    """Position of the document in the request."""
    relevance_score: float
    document: RerankedDocument | UnsetType = UNSET


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/rerank`, most relevant documents first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RerankResult]
    usage: PoolingUsage


def rank_documents(scores: list[float], top_n: int | None) -> list[int]:
    """Return the positions of the `top_n` highest scores, highest first; of all without `top_n`."""
    ranking = sorted(range(len(scores)), key=lambda index: -scores[index])
    return ranking[: top_n or None]
