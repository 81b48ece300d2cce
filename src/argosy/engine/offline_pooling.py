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
        job = self._processor.prepare_embed(
            [parse_prompt(each).content for each in prompts],
            self._next_headers(),
            prompt_name=prompt_name,
            prompt=prompt,
            dimensions=dimensions,
            normalizes=normalize,
            truncate_tokens=truncate_tokens,
            param="prompts",
        )
        embeddings = job.finish(self._run(job.requests))
        return [
            PoolingRequestOutput(request.id, EmbeddingOutput(vector), request.prompt)
            for request, vector in zip(job.requests, embeddings.values, strict=True)
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
        job = self._processor.prepare_score(
            pairs,
            headers,
            instruction=instruction,
            use_activation=use_activation,
            truncate_tokens=truncate_tokens,
        )
        scores = job.finish(self._run(job.requests))
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
        prompts: Sequence[PromptInput],
        *,
        use_activation: bool | None,
        truncate_tokens: int | None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Classify texts or token ids."""
        job = self._processor.prepare_classify(
            [parse_prompt(each).content for each in prompts],
            self._next_headers(),
            use_activation=use_activation,
            truncate_tokens=truncate_tokens,
        )
        classes = job.finish(self._run(job.requests))
        labels = self._processor.info.labels or ()
        return [
            PoolingRequestOutput(
                request.id, ClassificationOutput(row, labels[int(row.argmax())]), request.prompt
            )
            for request, row in zip(job.requests, classes.values, strict=True)
        ]

    def _next_headers(self) -> GatewayHeaders:
        return GatewayHeaders(request_id=f"offline-pooling-{next(self._request_numbers)}")
