"""Processor of pooling requests: validates and tokenizes inputs, and says how their results are computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import EngineRequest
from argosy.engine.pooling import PoolingActivation, PoolingInfo, PoolingParams, PoolingTask
from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.pooling.input_encoder import InputEncoder, InputLimits
from argosy.engine.serving.pooling.pooling_job import (
    PoolingJob,
    PoolingResult,
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


class PoolingProcessor:
    """Prepares pooling jobs for one model.

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
        normalizes: bool | None = None,
        truncate_tokens: int | None = None,
        keeps_end: bool = False,
        is_token_level: bool = False,
        timeout_s: float | None = None,
        param: str = "input",
    ) -> PoolingJob:
        """Prepare the embedding of texts or token ids.

        Args:
            inputs: Texts, or their token ids, which are taken as they are.
            headers: Request id, tenant, cache domain, tier and weight.
            prompt_name: Name of the model's prompt that precedes each text. None takes the default prompt.
            prompt: Text that precedes each text, instead of a prompt of the model.
            dimensions: Number of leading elements that are kept (Kusupati et al. 2022).
            normalizes: Whether vectors are scaled to length 1. None does what the model does.
            truncate_tokens: Limit to which longer inputs are truncated, -1 for the model's. None refuses inputs
                that exceed the model's limit.
            keeps_end: Whether truncated inputs keep their ends, and not their beginnings.
            is_token_level: Whether to return a vector for each token.
            timeout_s: Seconds after which the request fails.
            param: Name of the inputs in errors.
        """
        self._require("token_embed" if is_token_level else "embed")
        self._check_dimensions(dimensions)
        text_prompt = self._resolve_prompt(prompt_name, prompt)
        skipped = 0
        if text_prompt and not self.info.includes_prompt:
            skipped = self._encoder.count_prompt_tokens(text_prompt)
        requests = self._build_requests(
            self._encode_inputs(
                inputs, text_prompt, InputLimits(truncate_tokens, keeps_end=keeps_end), param
            ),
            headers,
            timeout_s,
            [skipped if isinstance(each, str) else 0 for each in inputs],
            is_token_level=is_token_level,
        )
        if normalizes is None:
            normalizes = self.info.is_normalized

        def finish(vectors: Sequence[NDArray[np.float32]]) -> PoolingResult:
            results = []
            for request, vector in zip(requests, vectors, strict=True):
                if is_token_level:
                    vector = vector.reshape(len(request.prompt), -1)  # noqa: PLW2901 - the same values
                kept = vector[..., :dimensions]
                results.append(normalize(kept) if normalizes else kept)
            return PoolingResult(results, [request.prompt for request in requests])

        return PoolingJob(requests, finish)

    def prepare_classify(
        self,
        inputs: Sequence[str | Sequence[int]],
        headers: GatewayHeaders,
        *,
        use_activation: bool | None = None,
        truncate_tokens: int | None = None,
        keeps_end: bool = False,
        timeout_s: float | None = None,
    ) -> PoolingJob:
        """Prepare the classification of texts or token ids.

        The result are the probabilities of the model's labels, or its raw outputs if `use_activation` is False.
        """
        self._require("classify")
        prompt = self._resolve_prompt(None, None)
        requests = self._build_requests(
            self._encode_inputs(
                inputs, prompt, InputLimits(truncate_tokens, keeps_end=keeps_end), "input"
            ),
            headers,
            timeout_s,
        )
        activation = self._activation(use_activation)

        def finish(vectors: Sequence[NDArray[np.float32]]) -> PoolingResult:
            rows = [activate(vector, activation) for vector in vectors]
            return PoolingResult(rows, [request.prompt for request in requests])

        return PoolingJob(requests, finish)

    def prepare_score(
        self,
        pairs: Sequence[tuple[str, str]],
        headers: GatewayHeaders,
        *,
        instruction: str | None = None,
        use_activation: bool | None = None,
        truncate_tokens: int | None = None,
        keeps_end: bool = False,
        max_tokens_per_query: int | None = None,
        max_tokens_per_doc: int | None = None,
        timeout_s: float | None = None,
        param: str = "documents",
    ) -> PoolingJob:
        """Prepare the scores of the relevance of the second text of each pair, a document, to the first, a query.

        A reranker computes pairs. The score of an embedding model is the similarity of both embeddings, and a text that
        occurs several times is embedded once.

        Args:
            pairs: Pairs of query and document.
            headers: Request id, tenant, cache domain, tier and weight.
            instruction: Description of the task, instead of the model's prompt for queries.
            use_activation: Whether the model's activation, such as the sigmoid, is applied. None applies it.
            truncate_tokens: Limit of a pair, as of `prepare_embed`.
            keeps_end: Whether truncated texts keep their ends.
            max_tokens_per_query: Limit to which queries are truncated.
            max_tokens_per_doc: Limit to which documents are truncated.
            timeout_s: Seconds after which the request fails.
            param: Name of the texts in errors.
        """
        self._require("score")
        _check_count(pairs, param)
        if "embed" in self.info.tasks:
            limits = [
                InputLimits(_smaller(truncate_tokens, each), keeps_end=keeps_end)
                for each in (max_tokens_per_query, max_tokens_per_doc)
            ]
            return self._prepare_similarities(pairs, headers, instruction, limits, timeout_s, param)
        limits_of_pair = InputLimits(
            truncate_tokens, max_tokens_per_query, max_tokens_per_doc, keeps_end
        )
        prompt = self._resolve_prompt(None, instruction)
        encoded = [
            self._encoder.encode_pair(query, document, prompt, limits_of_pair, param)
            for query, document in pairs
        ]
        requests = self._build_requests(encoded, headers, timeout_s)
        activation = self._activation(use_activation)

        def finish(vectors: Sequence[NDArray[np.float32]]) -> PoolingResult:
            scores = [activate(vector, activation)[0] for vector in vectors]
            return PoolingResult(
                [np.asarray(score) for score in scores], [request.prompt for request in requests]
            )

        return PoolingJob(requests, finish)

    def _prepare_similarities(
        self,
        pairs: Sequence[tuple[str, str]],
        headers: GatewayHeaders,
        instruction: str | None,
        limits: Sequence[InputLimits],
        timeout_s: float | None,
        param: str,
    ) -> PoolingJob:
        """Prepare the similarities of pairs of texts, whose two sides have prompts and limits of their own."""
        prompts = (
            self._find_prompt(QUERY_PROMPTS) if instruction is None else instruction,
            self._find_prompt(DOCUMENT_PROMPTS),
        )
        index_by_text: dict[tuple[int, str], int] = {}
        texts: list[EncodedInput] = []
        skipped: list[int] = []
        indices: list[list[int]] = []
        for pair in pairs:
            for side, text in enumerate(pair):
                if (side, text) in index_by_text:
                    continue
                index_by_text[side, text] = len(texts)
                ids = self._encoder.encode_text(text, prompts[side], limits[side], param)
                texts.append(EncodedInput(ids, None))
                has_prompt = bool(prompts[side]) and not self.info.includes_prompt
                skipped.append(
                    self._encoder.count_prompt_tokens(prompts[side]) if has_prompt else 0
                )
            indices.append([index_by_text[side, text] for side, text in enumerate(pair)])
        requests = self._build_requests(texts, headers, timeout_s, skipped)

        def finish(vectors: Sequence[NDArray[np.float32]]) -> PoolingResult:
            if self.info.is_normalized:
                vectors = [normalize(vector) for vector in vectors]
            scores = [
                compute_similarity(vectors[first], vectors[second], self.info.similarity)
                for first, second in indices
            ]
            return PoolingResult(
                [np.asarray(score, np.float32) for score in scores],
                [requests[first].prompt + requests[second].prompt for first, second in indices],
            )

        return PoolingJob(requests, finish)

    def _encode_inputs(
        self,
        inputs: Sequence[str | Sequence[int]],
        prompt: str,
        limits: InputLimits,
        param: str,
    ) -> list[EncodedInput]:
        _check_count(inputs, param)
        return [
            EncodedInput(self._encoder.encode_text(each, prompt, limits, param), None)
            for each in inputs
        ]

    def _activation(self, use_activation: bool | None) -> PoolingActivation:  # noqa: FBT001 - a value of the request
        return "identity" if use_activation is False else self.info.activation

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

    def _build_requests(
        self,
        encoded: Sequence[EncodedInput],
        headers: GatewayHeaders,
        timeout_s: float | None,
        first_tokens: Sequence[int] | None = None,
        *,
        is_token_level: bool = False,
    ) -> list[EngineRequest]:
        return [
            EngineRequest(
                id=f"{headers.request_id}-{index}",
                prompt=each.token_ids,
                params=NO_TOKENS,
                group_id=headers.request_id if len(encoded) > 1 else "",
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
