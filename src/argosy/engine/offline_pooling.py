"""Calls of `LLM` for models that compute vectors, and their results with the attributes that vLLM's have."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.checkpoint_formats.checkpoint import resolve_model_path
from argosy.engine.offline_prompts import PromptsInput, parse_prompt, split_prompts
from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.pooling import PoolingProcessor
from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.tokenizer import Tokenizer

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


class PoolingCalls(ABC):
    """Calls that turn texts into engine requests, and their vectors into results."""

    def __init__(self, config: EngineConfig, ready: CoreReady) -> None:
        self._pooling_tokenizer: Tokenizer | None = None
        self._pooling_processor: PoolingProcessor | None = None
        self._pooling_numbers = itertools.count()
        if ready.pooling is not None:
            path = resolve_model_path(config.model, config.revision, config.digest)
            self._pooling_tokenizer = Tokenizer.load(path)
            self._pooling_processor = PoolingProcessor(
                self._pooling_tokenizer, ChatTemplate.load(path), ready, config
            )

    def embed(
        self,
        prompts: PromptsInput,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Embed texts or token ids, and return one output per prompt, in order.

        Args:
            prompts: One prompt or several, as for `generate`.
            prompt_name: Name of a prompt of the model, such as `query`, that precedes each text. None takes the
                model's default prompt.
            prompt: Text that precedes each text, instead of a prompt of the model.
            dimensions: Number of leading elements that are kept, for models that were trained for it.
            normalize: Whether vectors are scaled to length 1. None does what the model does.
            truncate_prompt_tokens: Limit to which longer prompts are truncated, -1 for the model's.

        Raises:
            ApiError: A prompt cannot be served. All prompts are validated before the first step.
            ValueError: The model computes no embeddings.
        """
        processor, headers = self._begin_pooling()
        job = processor.prepare_embed(
            [parse_prompt(each).content for each in split_prompts(prompts)],
            headers,
            prompt_name=prompt_name,
            prompt=prompt,
            dimensions=dimensions,
            normalizes=normalize,
            truncate_tokens=truncate_prompt_tokens,
            param="prompts",
        )
        embeddings = job.finish(self._run_pooling(job.requests))
        return [
            PoolingRequestOutput(request.id, EmbeddingOutput(vector), request.prompt)
            for request, vector in zip(job.requests, embeddings.values, strict=True)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Score the relevance of documents to queries, and return one output per pair, in order.

        Args:
            data_1: One query for all documents, or one query per document.
            data_2: Documents.
            instruction: Description of the task, for models that take one.
            use_activation: Whether the model's activation, such as the sigmoid, is applied. None applies it.
            truncate_prompt_tokens: Limit to which longer pairs are truncated, -1 for the model's.

        Raises:
            ApiError: A pair cannot be served.
            ValueError: The model computes no scores, or the numbers of queries and documents differ.
        """
        queries, documents = (
            [texts] if isinstance(texts, str) else list(texts) for texts in (data_1, data_2)
        )
        if len(queries) == 1:
            queries *= len(documents)
        if len(queries) != len(documents):
            raise ValueError(
                f"{len(queries)} queries for {len(documents)} documents; give one query, or one per document"
            )
        processor, headers = self._begin_pooling()
        job = processor.prepare_score(
            list(zip(queries, documents, strict=True)),
            headers,
            instruction=instruction,
            use_activation=use_activation,
            truncate_tokens=truncate_prompt_tokens,
        )
        scores = job.finish(self._run_pooling(job.requests))
        return [
            PoolingRequestOutput(
                f"{headers.request_id}-{number}", ScoringOutput(float(value)), prompt
            )
            for number, (value, prompt) in enumerate(
                zip(scores.values, scores.prompts, strict=True)
            )
        ]

    def classify(
        self,
        prompts: PromptsInput,
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Classify texts, and return the probabilities of the labels, one output per prompt, in order.

        The arguments and errors are those of `embed` and `score`.
        """
        processor, headers = self._begin_pooling()
        job = processor.prepare_classify(
            [parse_prompt(each).content for each in split_prompts(prompts)],
            headers,
            use_activation=use_activation,
            truncate_tokens=truncate_prompt_tokens,
        )
        classes = job.finish(self._run_pooling(job.requests))
        labels = processor.info.labels or ()
        return [
            PoolingRequestOutput(
                request.id, ClassificationOutput(row, labels[int(row.argmax())]), request.prompt
            )
            for request, row in zip(job.requests, classes.values, strict=True)
        ]

    @abstractmethod
    def _run_pooling(self, requests: list[EngineRequest]) -> list[NDArray[np.float32]]:
        """Run engine requests and return their vectors."""

    def _begin_pooling(self) -> tuple[PoolingProcessor, GatewayHeaders]:
        """Return the processor, and the headers of the next request."""
        if self._pooling_processor is None:
            raise ValueError(
                "the model generates text; use an embedding model or a reranker, "
                "or set task='embed' to pool this one"
            )
        number = next(self._pooling_numbers)
        return self._pooling_processor, GatewayHeaders(request_id=f"offline-pooling-{number}")
