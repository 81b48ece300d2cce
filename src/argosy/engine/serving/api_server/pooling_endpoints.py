"""Endpoints of models that pool: how each reads its body, what it computes, and how its response looks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import numpy as np
from msgspec import UNSET, Raw
from numpy.typing import NDArray

from argosy.engine.serving.api_server.vector_encoding import encode_vector, encode_vector_bytes
from argosy.engine.serving.pooling import PoolingInfo, PoolingService
from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders
from argosy.protocol import (
    Classification,
    ClassificationList,
    ClassifyRequest,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    NormalizedInput,
    PooledRequest,
    PooledResponse,
    PoolingList,
    PoolingOutput,
    PoolingRequest,
    PoolingTaskName,
    PoolingUsage,
    RerankedDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
    TaskName,
    list_inputs,
    rank_documents,
)

Body = TypeVar("Body", bound=PooledRequest)
Inputs = TypeVar("Inputs", bound=Sequence[Any])
Pairs = list[tuple[str, str]]
Vector = NDArray[np.float32]

_PURPOSES = {"search_query": "query", "search_document": "document", "passage": "document"}
"""Purposes of inputs that are known under another name."""
_PROMPT_NAMES = {
    "query": ("query", "search_query", "retrieval.query"),
    "document": ("document", "passage", "search_document", "retrieval.passage"),
}
"""Names of models' prompts by the purpose of inputs. Other purposes are names themselves."""
_DEFAULT_TASKS: tuple[PoolingTaskName, ...] = ("token_embed", "classify", "embed")


class ResponseHead(TypedDict):
    """Fields that all responses have."""

    id: str
    model: str
    usage: PoolingUsage


class PooledOutput(NamedTuple):
    """Result of one request, whose response is encoded later."""

    prompt_tokens: list[int]
    """Number of tokens of each input or pair."""
    num_values: int
    """Number of values of all vectors, which takes time to encode."""
    build: Callable[[ResponseHead, int], PooledResponse | RerankResponse]
    """Builds the response, given its head and its creation time."""


@dataclass(frozen=True, slots=True)
class PoolingEndpoint(Generic[Body, Inputs]):
    """Endpoint of one API."""

    request_type: type[Body]
    tasks: frozenset[TaskName]
    """Tasks of which the model needs one."""
    id_prefix: str
    read_inputs: Callable[[Body], Inputs]
    """Returns the inputs of a body. Raises ApiError (400) if one is malformed."""
    compute: Callable[[PoolingService, Body, Inputs, GatewayHeaders], Awaitable[PooledOutput]]


def _read_embedding_inputs(body: EmbeddingRequest) -> list[NormalizedInput]:
    body.check_encoding()
    return list_inputs(body.input)


def _read_inputs(body: ClassifyRequest) -> list[NormalizedInput]:
    return list_inputs(body.input)


async def _embed(
    service: PoolingService,
    body: EmbeddingRequest,
    inputs: Sequence[NormalizedInput],
    headers: GatewayHeaders,
) -> PooledOutput:
    vectors, prompt_tokens = await _compute_vectors(service, body, inputs, headers)
    encode = _vector_encoder(body)

    def build(head: ResponseHead, created: int) -> EmbeddingList:
        data = [
            Embedding(index=index, embedding=encode(vector)) for index, vector in enumerate(vectors)
        ]
        return EmbeddingList(**head, created=created, data=data)

    return PooledOutput(prompt_tokens, _count_values(vectors), build)


async def _pool(
    service: PoolingService,
    body: PoolingRequest,
    inputs: Sequence[NormalizedInput],
    headers: GatewayHeaders,
) -> PooledOutput:
    task = body.task or next(task for task in _DEFAULT_TASKS if task in service.info.tasks)
    vectors: Sequence[Vector]
    if task == "classify":
        classes = await service.classify(
            inputs,
            headers,
            activation=body.use_activation,
            truncate_tokens=body.truncate_prompt_tokens,
            timeout_s=body.timeout_s,
        )
        vectors, prompt_tokens = list(classes.probabilities), classes.prompt_tokens
    else:
        vectors, prompt_tokens = await _compute_vectors(
            service, body, inputs, headers, is_token_level=task == "token_embed"
        )
    encode = _vector_encoder(body)

    def build(head: ResponseHead, created: int) -> PoolingList:
        data = [
            PoolingOutput(index=index, data=encode(vector)) for index, vector in enumerate(vectors)
        ]
        return PoolingList(**head, created=created, data=data)

    return PooledOutput(prompt_tokens, _count_values(vectors), build)


async def _classify(
    service: PoolingService,
    body: ClassifyRequest,
    inputs: Sequence[NormalizedInput],
    headers: GatewayHeaders,
) -> PooledOutput:
    classes = await service.classify(
        inputs,
        headers,
        activation=body.use_activation,
        truncate_tokens=body.truncate_prompt_tokens,
        timeout_s=body.timeout_s,
    )
    labels, probabilities = service.info.labels, classes.probabilities

    def build(head: ResponseHead, created: int) -> ClassificationList:
        data = [
            Classification(
                index=index,
                label=None if labels is None else labels[int(row.argmax())],
                probs=row.tolist(),
                num_classes=len(row),
            )
            for index, row in enumerate(probabilities)
        ]
        return ClassificationList(**head, created=created, data=data)

    return PooledOutput(classes.prompt_tokens, probabilities.size, build)


async def _score(
    service: PoolingService, body: ScoreRequest, pairs: Pairs, headers: GatewayHeaders
) -> PooledOutput:
    values, prompt_tokens = await _compute_scores(service, body, pairs, headers)

    def build(head: ResponseHead, created: int) -> ScoreList:
        data = [Score(index=index, score=value) for index, value in enumerate(values)]
        return ScoreList(**head, created=created, data=data)

    return PooledOutput(prompt_tokens, len(values), build)


async def _rerank(
    service: PoolingService,
    body: RerankRequest,
    pairs: Pairs,
    headers: GatewayHeaders,
    *,
    returns_documents: bool,
) -> PooledOutput:
    """Rerank documents.

    `returns_documents` is whether results contain them if the request does not say so.
    """
    values, prompt_tokens = await _compute_scores(service, body, pairs, headers)
    has_documents = returns_documents if body.return_documents is None else body.return_documents

    def build(head: ResponseHead, created: int) -> RerankResponse:
        del created  # rerank APIs have no such field
        results = [
            RerankResult(
                index=index,
                relevance_score=values[index],
                document=RerankedDocument(text=pairs[index][1]) if has_documents else UNSET,
            )
            for index in rank_documents(values, body.top_n)
        ]
        return RerankResponse(**head, results=results)

    return PooledOutput(prompt_tokens, len(values), build)


EMBEDDINGS = PoolingEndpoint(
    EmbeddingRequest, frozenset({"embed"}), "embd", _read_embedding_inputs, _embed
)
POOLING = PoolingEndpoint(
    PoolingRequest,
    frozenset({"embed", "token_embed", "classify"}),
    "pool",
    _read_embedding_inputs,
    _pool,
)
CLASSIFY = PoolingEndpoint(
    ClassifyRequest, frozenset({"classify"}), "classify", _read_inputs, _classify
)
SCORE = PoolingEndpoint(
    ScoreRequest, frozenset({"score"}), "score", ScoreRequest.build_pairs, _score
)
RERANK = PoolingEndpoint(
    RerankRequest,
    frozenset({"score"}),
    "rerank",
    RerankRequest.build_pairs,
    partial(_rerank, returns_documents=True),
)
COHERE_RERANK = PoolingEndpoint(
    RerankRequest,
    frozenset({"score"}),
    "rerank",
    RerankRequest.build_pairs,
    partial(_rerank, returns_documents=False),
)


def find_prompt_name(info: PoolingInfo, input_type: str) -> str | None:
    """Return the name of the model's prompt for a purpose of inputs, like `query`; None if it has none."""
    purpose = _PURPOSES.get(input_type.lower(), input_type.lower())
    names = {name.lower(): name for name in info.prompts}
    candidates = _PROMPT_NAMES.get(purpose, (purpose,))
    return next((names[name] for name in candidates if name in names), None)


async def _compute_vectors(
    service: PoolingService,
    body: EmbeddingRequest,
    inputs: Sequence[NormalizedInput],
    headers: GatewayHeaders,
    *,
    is_token_level: bool = False,
) -> tuple[Sequence[Vector], list[int]]:
    """Return the vector of each input, or the vectors of its tokens, and the number of tokens of each input."""
    prompt_name = body.prompt_name
    if prompt_name is None and body.prompt is None and body.input_type is not None:
        prompt_name = find_prompt_name(service.info, body.input_type)
    embeddings = await service.embed(
        inputs,
        headers,
        prompt_name=prompt_name,
        prompt=body.prompt,
        dimensions=body.dimensions,
        normalize=body.normalizes,
        truncate_tokens=body.truncate_prompt_tokens,
        token_level=is_token_level,
        timeout_s=body.timeout_s,
    )
    return embeddings.vectors, embeddings.prompt_tokens


async def _compute_scores(
    service: PoolingService,
    body: ScoreRequest | RerankRequest,
    pairs: Pairs,
    headers: GatewayHeaders,
) -> tuple[list[float], list[int]]:
    """Return the score and the number of tokens of each pair."""
    scores = await service.score(
        pairs,
        headers,
        instruction=body.instruction,
        activation=body.use_activation,
        truncate_tokens=body.truncate_prompt_tokens,
        max_tokens_per_query=body.max_tokens_per_query,
        max_tokens_per_doc=body.max_tokens_per_doc,
        timeout_s=body.timeout_s,
    )
    return scores.values.tolist(), scores.prompt_tokens


def _vector_encoder(body: EmbeddingRequest) -> Callable[[Vector], Raw]:
    if body.encoding_format != "base64":
        return encode_vector
    return partial(
        encode_vector_bytes,
        dtype=body.embed_dtype or "float32",
        endianness=body.endianness or "native",
    )


def _count_values(vectors: Sequence[Vector]) -> int:
    return sum(vector.size for vector in vectors)
