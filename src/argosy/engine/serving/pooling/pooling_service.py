"""Asynchronous service of pooling requests over an engine, for the replica server and for programs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from argosy.engine.engine_request import EngineRequest
from argosy.engine.pooling import PoolingInfo
from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.pooling.pooling_processor import PoolingProcessor, read_vector
from argosy.engine.serving.pooling.results import Classes, Embeddings, Scores
from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders

T = TypeVar("T")


class RunInThread(Protocol):
    """Function that runs another one in a worker thread, such as `asyncio.to_thread`."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]:
        """Return the result of `function`."""
        ...


class VectorStream(Protocol):
    """Stream of one request, which ends with the delta that has the vector."""

    def set_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a delta is available or the request has ended."""
        ...

    def drain(self) -> Delta | None:
        """Return everything since the last call as one delta, or None if nothing is new."""
        ...

    def close(self) -> None:
        """Abort the request, unless it has ended."""
        ...


class PoolingEngine(Protocol):
    """Interface of the engine client that the service requires."""

    def generate(self, request: EngineRequest) -> VectorStream:
        """Submit a request at once.

        Raises:
            ApiError: No engine can serve the request.
        """
        ...


class PoolingService:
    """Embeds, scores and classifies with one engine. Use it from the engine's event loop.

    The inputs of a call are separate sequences of the scheduler, in the caller's tier and with its weight. Cancelling
    a call aborts its sequences. A core that restarts computes them again. Methods raise `ApiError` for inputs that
    cannot be served, and if the engine fails a sequence.
    """

    def __init__(
        self,
        engine: PoolingEngine,
        processor: PoolingProcessor,
        run_in_thread: RunInThread = asyncio.to_thread,
    ) -> None:
        """Create the service. Inputs are tokenized with `run_in_thread`."""
        self._engine = engine
        self._processor = processor
        self._run_in_thread = run_in_thread

    @property
    def info(self) -> PoolingInfo:
        """Properties of the model."""
        return self._processor.info

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        headers: GatewayHeaders,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_tokens: int | None = None,
        token_level: bool = False,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """Embed texts or token ids.

        Args:
            inputs: Texts, or their token ids, which are taken as they are.
            headers: Request id, tenant, cache domain, tier and weight.
            prompt_name: Name of the model's prompt that precedes each text. None takes the default prompt.
            prompt: Text that precedes each text, instead of a prompt of the model.
            dimensions: Number of leading elements that are kept (Kusupati et al. 2022).
            normalize: Whether vectors are scaled to length 1. None does what the model does.
            truncate_tokens: Limit to which longer inputs are truncated, -1 for the model's. None refuses inputs
                that exceed the model's limit.
            token_level: Whether to return a vector for each token.
            timeout_s: Seconds after which the request fails.
        """
        prepared = await self._run_in_thread(
            partial(
                self._processor.prepare_embed,
                inputs,
                headers,
                prompt_name=prompt_name,
                prompt=prompt,
                dimensions=dimensions,
                truncate_tokens=truncate_tokens,
                is_token_level=token_level,
                timeout_s=timeout_s,
            )
        )
        vectors = await self._compute(prepared.requests)
        return self._processor.to_embeddings(
            prepared, vectors, dimensions=dimensions, normalize_vectors=normalize
        )

    async def score(
        self,
        pairs: Sequence[tuple[str, str]],
        headers: GatewayHeaders,
        *,
        instruction: str | None = None,
        activation: bool | None = None,
        truncate_tokens: int | None = None,
        max_tokens_per_query: int | None = None,
        max_tokens_per_doc: int | None = None,
        timeout_s: float | None = None,
    ) -> Scores:
        """Score the relevance of the second text of each pair, a document, to the first, a query.

        A reranker computes pairs. The score of an embedding model is the similarity of both embeddings.

        Args:
            pairs: Pairs of query and document.
            headers: Request id, tenant, cache domain, tier and weight.
            instruction: Description of the task, instead of the model's prompt for queries.
            activation: Whether the model's activation, such as the sigmoid, is applied. None applies it.
            truncate_tokens: Limit of a pair, as of `embed`.
            max_tokens_per_query: Limit to which queries are truncated.
            max_tokens_per_doc: Limit to which documents are truncated.
            timeout_s: Seconds after which the request fails.
        """
        prepared = await self._run_in_thread(
            partial(
                self._processor.prepare_score,
                pairs,
                headers,
                instruction=instruction,
                truncate_tokens=truncate_tokens,
                max_tokens_per_query=max_tokens_per_query,
                max_tokens_per_doc=max_tokens_per_doc,
                timeout_s=timeout_s,
            )
        )
        vectors = await self._compute(prepared.pooling.requests)
        return self._processor.to_scores(prepared, vectors, use_activation=activation)

    async def classify(
        self,
        inputs: Sequence[str | Sequence[int]],
        headers: GatewayHeaders,
        *,
        activation: bool | None = None,
        truncate_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> Classes:
        """Compute the probabilities of the model's labels, or its raw outputs without `activation`."""
        prepared = await self._run_in_thread(
            partial(
                self._processor.prepare_classify,
                inputs,
                headers,
                truncate_tokens=truncate_tokens,
                timeout_s=timeout_s,
            )
        )
        vectors = await self._compute(prepared.requests)
        return self._processor.to_classes(prepared, vectors, use_activation=activation)

    async def _compute(self, requests: list[EngineRequest]) -> list[NDArray[np.float32]]:
        """Run requests on the engine. If one fails or the caller is cancelled, abort the others."""
        streams: list[VectorStream] = []
        vectors: dict[int, NDArray[np.float32]] = {}
        has_delta = asyncio.Event()
        updated: list[int] = []

        def on_delta(index: int) -> None:
            updated.append(index)
            has_delta.set()

        try:
            for index, request in enumerate(requests):
                streams.append(self._engine.generate(request))
                streams[-1].set_listener(partial(on_delta, index))
            while len(vectors) < len(requests):
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
        return [vectors[index] for index in range(len(requests))]
