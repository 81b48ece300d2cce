"""Pooling requests of `LLM`, which turn texts into engine requests and vectors into results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.checkpoint_formats.checkpoint import resolve_model_path
from argosy.engine.offline_prompts import PromptInput, parse_prompt
from argosy.engine.pooling_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.pooling import PoolingProcessor
from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.tokenizer import Tokenizer

RunRequests = Callable[[list[EngineRequest]], list[NDArray[np.float32]]]
"""Runs engine requests and returns their vectors."""


class OfflinePooling:
    """Pooling requests of a model that computes vectors."""

    def __init__(self, config: EngineConfig, ready: CoreReady, run: RunRequests) -> None:
        path = resolve_model_path(config.model, config.revision, config.digest)
        self.tokenizer = Tokenizer.load(path)
        self._processor = PoolingProcessor(self.tokenizer, ChatTemplate.load(path), ready, config)
        self._run = run
        self._request_numbers = itertools.count()

    def embed(
        self,
        prompts: Sequence[PromptInput],
        *,
        prompt_name: str | None,
        prompt: str | None,
        dimensions: int | None,
        normalize: bool | None,
        truncate_tokens: int | None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Embed texts or token ids."""
        headers = self._next_headers()
        prepared = self._processor.prepare_embed(
            [parse_prompt(each).content for each in prompts],
            headers,
            prompt_name=prompt_name,
            prompt=prompt,
            dimensions=dimensions,
            truncate_tokens=truncate_tokens,
            param="prompts",
        )
        embeddings = self._processor.to_embeddings(
            prepared,
            self._run(prepared.requests),
            dimensions=dimensions,
            normalize_vectors=normalize,
        )
        return [
            PoolingRequestOutput(request.id, EmbeddingOutput(vector), request.prompt)
            for request, vector in zip(prepared.requests, embeddings.vectors, strict=True)
        ]

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        instruction: str | None,
        use_activation: bool | None,
        truncate_tokens: int | None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Score pairs of query and document."""
        headers = self._next_headers()
        prepared = self._processor.prepare_score(
            pairs, headers, instruction=instruction, truncate_tokens=truncate_tokens
        )
        requests = prepared.pooling.requests
        scores = self._processor.to_scores(
            prepared, self._run(requests), use_activation=use_activation
        )
        return [
            PoolingRequestOutput(
                f"{headers.request_id}-{number}",
                ScoringOutput(float(value)),
                [token for index in indices for token in requests[index].prompt],
            )
            for number, (value, indices) in enumerate(
                zip(scores.values, prepared.pair_indices, strict=True)
            )
        ]

    def classify(
        self,
        prompts: Sequence[PromptInput],
        *,
        use_activation: bool | None,
        truncate_tokens: int | None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Classify texts or token ids."""
        prepared = self._processor.prepare_classify(
            [parse_prompt(each).content for each in prompts],
            self._next_headers(),
            truncate_tokens=truncate_tokens,
        )
        classes = self._processor.to_classes(
            prepared, self._run(prepared.requests), use_activation=use_activation
        )
        labels = self._processor.info.labels or ()
        return [
            PoolingRequestOutput(
                request.id, ClassificationOutput(row, labels[int(row.argmax())]), request.prompt
            )
            for request, row in zip(prepared.requests, classes.probabilities, strict=True)
        ]

    def _next_headers(self) -> GatewayHeaders:
        return GatewayHeaders(request_id=f"offline-pooling-{next(self._request_numbers)}")
