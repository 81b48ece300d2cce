"""Processor of pooling requests: validates inputs, builds engine requests and assembles results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import EngineRequest
from argosy.engine.pooling import PoolingInfo, PoolingParams, PoolingTask
from argosy.engine.serving.core_messages import CoreReady, Delta
from argosy.engine.serving.pooling.input_encoder import InputEncoder, InputLimits
from argosy.engine.serving.pooling.results import (
    Classes,
    Embeddings,
    Scores,
    activate,
    compute_similarity,
    normalize,
)
from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.tokenizer import EncodedInput, Tokenizer
from argosy.protocol import MAX_INPUTS, ApiError, SamplingParams, invalid_request

NO_TOKENS = SamplingParams(max_tokens=0)
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names under which sentence-transformers looks for the prompts of queries and of documents."""
_TASK_NAMES: dict[PoolingTask, str] = {
    "embed": "embeddings",
    "token_embed": "embeddings of tokens",
    "classify": "labels",
    "score": "scores",
}


@dataclass(frozen=True, slots=True)
class PreparedPooling:
    """Engine requests of one pooling request."""

    requests: list[EngineRequest]

    @property
    def prompt_tokens(self) -> list[int]:
        """Number of tokens of each request."""
        return [len(request.prompt) for request in self.requests]


@dataclass(frozen=True, slots=True)
class PreparedScores:
    """Engine requests that score pairs."""

    pooling: PreparedPooling
    pair_indices: list[tuple[int, ...]]
    """Requests of each pair, which is one for a reranker, and one for each text of an embedding model."""


class PoolingProcessor:
    """Validates pooling requests for one model, and computes their results from the core's vectors.

    Tokenizing takes time, so call the `prepare_*` methods in a worker thread. They raise `ApiError` (400) naming the
    parameter before anything is computed. Immutable and thread-safe.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, ready: CoreReady, config: EngineConfig
    ) -> None:
        """Create the processor of a core whose model computes vectors."""
        if ready.pooling is None:
            raise ValueError("the model generates text; use a RequestProcessor")
        self.info: PoolingInfo = ready.pooling
        self._encoder = InputEncoder(tokenizer, template, self.info, ready.vocab_size)
        self._timeout_s = config.request_timeout_s

    def prepare_embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        headers: GatewayHeaders,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate_tokens: int | None = None,
        is_token_level: bool = False,
        timeout_s: float | None = None,
        param: str = "input",
    ) -> PreparedPooling:
        """Build the engine requests that embed texts or token ids."""
        self._require("token_embed" if is_token_level else "embed")
        self._check_dimensions(dimensions)
        _check_count(inputs, param)
        text_prompt = self._resolve_prompt(prompt_name, prompt)
        limits = InputLimits(truncate_tokens)
        encoded = [
            EncodedInput(self._encoder.encode_text(each, text_prompt, limits, param), None)
            for each in inputs
        ]
        skipped = 0
        if text_prompt and not self.info.includes_prompt:
            skipped = self._encoder.count_prompt_tokens(text_prompt)
        return self._build(
            encoded,
            headers,
            timeout_s,
            [skipped if isinstance(each, str) else 0 for each in inputs],
            is_token_level=is_token_level,
        )

    def prepare_classify(
        self,
        inputs: Sequence[str | Sequence[int]],
        headers: GatewayHeaders,
        *,
        truncate_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> PreparedPooling:
        """Build the engine requests that classify texts or token ids."""
        self._require("classify")
        _check_count(inputs, "input")
        prompt, limits = self._resolve_prompt(None, None), InputLimits(truncate_tokens)
        encoded = [
            EncodedInput(self._encoder.encode_text(each, prompt, limits, "input"), None)
            for each in inputs
        ]
        return self._build(encoded, headers, timeout_s)

    def prepare_score(
        self,
        pairs: Sequence[tuple[str, str]],
        headers: GatewayHeaders,
        *,
        instruction: str | None = None,
        truncate_tokens: int | None = None,
        max_tokens_per_query: int | None = None,
        max_tokens_per_doc: int | None = None,
        timeout_s: float | None = None,
        param: str = "documents",
    ) -> PreparedScores:
        """Build the engine requests that score the relevance of documents (second) to queries (first).

        A text that occurs several times is embedded once.
        """
        self._require("score")
        _check_count(pairs, param)
        limits = InputLimits(truncate_tokens, max_tokens_per_query, max_tokens_per_doc)
        if "embed" not in self.info.tasks:
            prompt = self._resolve_prompt(None, instruction)
            encoded = [
                self._encoder.encode_pair(query, document, prompt, limits, param)
                for query, document in pairs
            ]
            prepared = self._build(encoded, headers, timeout_s)
            return PreparedScores(prepared, [(index,) for index in range(len(pairs))])
        prompts = (
            self._find_prompt(QUERY_PROMPTS) if instruction is None else instruction,
            self._find_prompt(DOCUMENT_PROMPTS),
        )
        sides = (
            InputLimits(_smaller(truncate_tokens, max_tokens_per_query)),
            InputLimits(_smaller(truncate_tokens, max_tokens_per_doc)),
        )
        index_by_text: dict[tuple[int, str], int] = {}
        texts: list[EncodedInput] = []
        skipped: list[int] = []
        indices: list[tuple[int, ...]] = []
        for pair in pairs:
            pair_index = []
            for side, text in enumerate(pair):
                key = (side, text)
                if key not in index_by_text:
                    index_by_text[key] = len(texts)
                    ids = self._encoder.encode_text(text, prompts[side], sides[side], param)
                    texts.append(EncodedInput(ids, None))
                    has_prompt = bool(prompts[side]) and not self.info.includes_prompt
                    skipped.append(
                        self._encoder.count_prompt_tokens(prompts[side]) if has_prompt else 0
                    )
                pair_index.append(index_by_text[key])
            indices.append(tuple(pair_index))
        return PreparedScores(self._build(texts, headers, timeout_s, skipped), indices)

    def to_embeddings(
        self,
        prepared: PreparedPooling,
        vectors: Sequence[NDArray[np.float32]],
        *,
        dimensions: int | None,
        normalize_vectors: bool | None,
    ) -> Embeddings:
        """Truncate and normalize the core's vectors."""
        is_normalized = self.info.is_normalized if normalize_vectors is None else normalize_vectors
        results = []
        for request, vector in zip(prepared.requests, vectors, strict=True):
            if request.pooling is not None and request.pooling.is_token_level:
                vector = vector.reshape(len(request.prompt), -1)  # noqa: PLW2901 - the same values
            kept = vector[..., :dimensions]
            results.append(normalize(kept) if is_normalized else kept)
        return Embeddings(results, prepared.prompt_tokens)

    def to_scores(
        self,
        prepared: PreparedScores,
        vectors: Sequence[NDArray[np.float32]],
        *,
        use_activation: bool | None,
    ) -> Scores:
        """Compute the scores of pairs, which are the similarities of embeddings or the outputs of a reranker."""
        counts = prepared.pooling.prompt_tokens
        values = []
        for indices in prepared.pair_indices:
            if len(indices) == 1:
                activation = "identity" if use_activation is False else self.info.activation
                values.append(float(activate(vectors[indices[0]], activation)[0]))
            else:
                first, second = (vectors[index] for index in indices)
                if self.info.is_normalized:
                    first, second = normalize(first), normalize(second)
                values.append(compute_similarity(first, second, self.info.similarity))
        return Scores(
            np.array(values, dtype=np.float32),
            [sum(counts[index] for index in indices) for indices in prepared.pair_indices],
        )

    def to_classes(
        self,
        prepared: PreparedPooling,
        vectors: Sequence[NDArray[np.float32]],
        *,
        use_activation: bool | None,
    ) -> Classes:
        """Compute the probabilities of labels."""
        activation = "identity" if use_activation is False else self.info.activation
        rows = [activate(vector, activation) for vector in vectors]
        return Classes(np.stack(rows), prepared.prompt_tokens)

    def _require(self, task: PoolingTask) -> None:
        if task not in self.info.tasks:
            served = ", ".join(_TASK_NAMES[each] for each in self.info.tasks)
            raise ApiError(
                400,
                "unsupported_task",
                f"This model computes {served}, but no {_TASK_NAMES[task]}. Use another model.",
            )

    def _resolve_prompt(self, name: str | None, prompt: str | None) -> str:
        if prompt is not None:
            return prompt
        name = self.info.default_prompt_name if name is None else name
        if name is None:
            return ""
        if name not in self.info.prompts:
            known = ", ".join(self.info.prompts) or "none"
            raise invalid_request(
                f"The model has no prompt named '{name}'. Its prompts are: {known}.", "prompt_name"
            )
        return self.info.prompts[name]

    def _find_prompt(self, names: tuple[str, ...]) -> str:
        """Return the first prompt with one of the names, or the default prompt."""
        for name in names:
            if name in self.info.prompts:
                return self.info.prompts[name]
        return self._resolve_prompt(None, None)

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is None:
            return
        size, allowed = self.info.output_size, self.info.matryoshka_dimensions
        if allowed is not None and dimensions not in (*allowed, size):
            listed = ", ".join(map(str, sorted({*allowed, size})))
            raise invalid_request(
                f"'dimensions' is {dimensions}. This model's embeddings have one of the sizes {listed}.",
                "dimensions",
            )
        if not 1 <= dimensions <= size:
            raise invalid_request(
                f"'dimensions' is {dimensions}. Send a number from 1 to {size}, the size of this model's embeddings.",
                "dimensions",
            )

    def _build(
        self,
        encoded: Sequence[EncodedInput],
        headers: GatewayHeaders,
        timeout_s: float | None,
        first_tokens: Sequence[int] | None = None,
        *,
        is_token_level: bool = False,
    ) -> PreparedPooling:
        requests = [
            EngineRequest(
                id=f"{headers.request_id}-{index}",
                prompt=each.token_ids,
                params=NO_TOKENS,
                cache_domain=headers.cache_domain,
                tenant=headers.tenant,
                tier=headers.tier,
                weight=headers.weight,
                timeout_s=timeout_s or self._timeout_s,
                pooling=PoolingParams(
                    reads_all_tokens=self.info.reads_all_tokens or is_token_level,
                    first_token=0 if first_tokens is None else first_tokens[index],
                    second_text_start=each.second_text_start,
                    is_token_level=is_token_level,
                ),
            )
            for index, each in enumerate(encoded)
        ]
        return PreparedPooling(requests)


def read_vector(delta: Delta) -> NDArray[np.float32]:
    """Return the vector of a request's last delta.

    Raises:
        ApiError: The request failed, was cancelled or has timed out.
    """
    if delta.finish_reason == "error":
        reason = delta.error or "the engine gave no reason"
        raise ApiError(
            500,
            delta.error_code or "engine_error",
            f"The engine could not finish the request: {reason}.",
        )
    if delta.finish_reason == "cancelled":
        raise ApiError(499, "cancelled", "The request was cancelled before it finished.")
    if delta.finish_reason == "timeout":
        raise ApiError(
            408,
            "timeout",
            "The request was not computed before its deadline. Send fewer inputs, or raise timeout_s.",
        )
    return np.frombuffer(delta.pooled, dtype=np.float32)


def _check_count(inputs: Sequence[object], param: str) -> None:
    if not inputs:
        raise invalid_request(f"'{param}' is empty. Send at least one input.", param)
    if len(inputs) > MAX_INPUTS:
        raise invalid_request(
            f"'{param}' has {len(inputs)} inputs. Send at most {MAX_INPUTS} in a request.", param
        )


def _smaller(first: int | None, second: int | None) -> int | None:
    """Return the smaller of two limits, of which each may be absent, or -1 for the model's limit."""
    stated = [limit for limit in (first, second) if limit is not None and limit >= 0]
    if stated:
        return min(stated)
    return first if first is not None else second
