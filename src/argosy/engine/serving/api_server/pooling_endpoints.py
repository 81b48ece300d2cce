"""Endpoints of models that pool: how each reads its body, prepares its job, and encodes its response."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Raw
from numpy.typing import NDArray

from argosy.engine.serving.pooling import PoolingInfo, PoolingJob, PoolingProcessor, PoolingResult
from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders
from argosy.protocol import (
    Classification,
    ClassificationList,
    ClassifyRequest,
    EmbeddingList,
    EmbeddingObject,
    EmbeddingRequest,
    EmbedDType,
    Endianness,
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
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class PoolingEndpoint(Generic[Body, Inputs]):
    """Endpoint of one API."""

    request_type: type[Body]
    tasks: frozenset[TaskName]
    """Tasks of which the model needs one."""
    id_prefix: str
    read_inputs: Callable[[Body], Inputs]
    """Returns the inputs of a body, except a conversation. Raises ApiError (400) if one is malformed."""
    prepare: Callable[[PoolingCall[Body, Inputs]], PoolingJob]
    """Tokenizes the inputs. Raises ApiError (400) if one is invalid for the model."""
    build: Callable[[PoolingCall[Body, Inputs], PoolingResult], PooledResponse | RerankResponse]


@dataclass(frozen=True, slots=True)
class PoolingCall(Generic[Body, Inputs]):
    """Validated request."""

    model_name: str
    """Name under which the client knows the model."""
    processor: PoolingProcessor
    endpoint: PoolingEndpoint[Body, Inputs]
    body: Body
    inputs: Inputs
    headers: GatewayHeaders

    def encode_response(self, result: PoolingResult) -> bytes:
        """Encode the response."""
        return _encode(self.endpoint.build(self, result))

    def head(self, result: PoolingResult) -> dict[str, Any]:
        """Return the fields that all responses have."""
        num_tokens = sum(result.prompt_tokens)
        return {
            "id": self.headers.request_id,
            "model": self.model_name,
            "usage": PoolingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        }

    def dated_head(self, result: PoolingResult) -> dict[str, Any]:
        """Return `head` with the creation time."""
        created = self.headers.created_at
        return self.head(result) | {"created": int(time.time()) if created is None else created}


TextsCall = PoolingCall[Body, list[NormalizedInput]]
PairsCall = PoolingCall[Body, Pairs]


def _read_embedding_inputs(body: EmbeddingRequest) -> list[NormalizedInput]:
    body.check_encoding()
    return body.list_inputs()


def _prepare_embed(call: TextsCall[Any], *, is_token_level: bool = False) -> PoolingJob:
    body: EmbeddingRequest = call.body
    prompt_name = body.prompt_name
    if prompt_name is None and body.prompt is None and body.input_type is not None:
        prompt_name = find_prompt_name(call.processor.info, body.input_type)
    return call.processor.prepare_embed(
        call.inputs,
        call.headers,
        prompt_name=prompt_name,
        prompt=body.prompt,
        dimensions=body.dimensions,
        normalizes=body.normalizes,
        truncate_tokens=body.truncate_prompt_tokens,
        keeps_end=body.keeps_end,
        is_token_level=is_token_level,
        timeout_s=body.timeout_s,
    )


def _prepare_classify(call: TextsCall[Any]) -> PoolingJob:
    return call.processor.prepare_classify(
        call.inputs,
        call.headers,
        use_activation=call.body.use_activation,
        truncate_tokens=call.body.truncate_prompt_tokens,
        keeps_end=call.body.keeps_end,
        timeout_s=call.body.timeout_s,
    )


def _prepare_pool(call: TextsCall[PoolingRequest]) -> PoolingJob:
    tasks = call.processor.info.tasks
    task = call.body.task or next(task for task in _DEFAULT_TASKS if task in tasks)
    if task == "classify":
        return _prepare_classify(call)
    return _prepare_embed(call, is_token_level=task == "token_embed")


def _prepare_score(call: PairsCall[Any]) -> PoolingJob:
    body: ScoreRequest | RerankRequest = call.body
    return call.processor.prepare_score(
        call.inputs,
        call.headers,
        instruction=body.instruction,
        use_activation=body.use_activation,
        truncate_tokens=body.truncate_prompt_tokens,
        keeps_end=body.keeps_end,
        max_tokens_per_query=body.max_tokens_per_query,
        max_tokens_per_doc=body.max_tokens_per_doc,
        timeout_s=body.timeout_s,
    )


def _build_embeddings(call: TextsCall[EmbeddingRequest], result: PoolingResult) -> EmbeddingList:
    encode = _vector_encoder(call.body)
    data = [EmbeddingObject(index=i, embedding=encode(v)) for i, v in enumerate(result.values)]
    return EmbeddingList(**call.dated_head(result), data=data)


def _build_pooled(call: TextsCall[PoolingRequest], result: PoolingResult) -> PoolingList:
    encode = _vector_encoder(call.body)
    data = [PoolingOutput(index=i, data=encode(v)) for i, v in enumerate(result.values)]
    return PoolingList(**call.dated_head(result), data=data)


def _build_classes(call: TextsCall[ClassifyRequest], result: PoolingResult) -> ClassificationList:
    labels = call.processor.info.labels
    data = [
        Classification(
            index=index,
            label=None if labels is None else labels[int(row.argmax())],
            probs=row.tolist(),
            num_classes=len(row),
        )
        for index, row in enumerate(result.values)
    ]
    return ClassificationList(**call.dated_head(result), data=data)


def _build_scores(call: PairsCall[ScoreRequest], result: PoolingResult) -> ScoreList:
    data = [Score(index=index, score=float(value)) for index, value in enumerate(result.values)]
    return ScoreList(**call.dated_head(result), data=data)


def _build_ranking(
    call: PairsCall[RerankRequest], result: PoolingResult, *, returns_documents: bool
) -> RerankResponse:
    """Build a ranking. `returns_documents` is whether it has the documents if the request does not say so."""
    body = call.body
    has_documents = returns_documents if body.return_documents is None else body.return_documents
    values = [float(value) for value in result.values]
    results = [
        RerankResult(
            index=index,
            relevance_score=values[index],
            document=RerankedDocument(text=call.inputs[index][1]) if has_documents else UNSET,
        )
        for index in rank_documents(values, body.top_n)
    ]
    return RerankResponse(**call.head(result), results=results)


_RERANK: PoolingEndpoint[RerankRequest, Pairs] = PoolingEndpoint(
    RerankRequest,
    frozenset({"score"}),
    "rerank",
    RerankRequest.build_pairs,
    _prepare_score,
    partial(_build_ranking, returns_documents=True),
)
_SCORE = PoolingEndpoint(
    ScoreRequest,
    frozenset({"score"}),
    "score",
    ScoreRequest.build_pairs,
    _prepare_score,
    _build_scores,
)
POOLING_ENDPOINTS: dict[str, PoolingEndpoint[Any, Any]] = {
    "/v1/embeddings": PoolingEndpoint(
        EmbeddingRequest,
        frozenset({"embed"}),
        "embd",
        _read_embedding_inputs,
        _prepare_embed,
        _build_embeddings,
    ),
    "/pooling": PoolingEndpoint(
        PoolingRequest,
        frozenset({"embed", "token_embed", "classify"}),
        "pool",
        _read_embedding_inputs,
        _prepare_pool,
        _build_pooled,
    ),
    "/classify": PoolingEndpoint(
        ClassifyRequest,
        frozenset({"classify"}),
        "classify",
        ClassifyRequest.list_inputs,
        _prepare_classify,
        _build_classes,
    ),
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": replace(_RERANK, build=partial(_build_ranking, returns_documents=False)),
}
"""Endpoint of `POST` by path."""


def find_prompt_name(info: PoolingInfo, input_type: str) -> str | None:
    """Return the name of the model's prompt for a purpose of inputs, like `query`; None if it has none."""
    purpose = _PURPOSES.get(input_type.lower(), input_type.lower())
    names = {name.lower(): name for name in info.prompts}
    candidates = _PROMPT_NAMES.get(purpose, (purpose,))
    return next((names[name] for name in candidates if name in names), None)


def _vector_encoder(body: EmbeddingRequest) -> Callable[[Vector], Raw]:
    if body.encoding_format != "base64":
        return encode_vector
    return partial(
        encode_vector_bytes,
        dtype=body.embed_dtype or "float32",
        endianness=body.endianness or "native",
    )


def encode_vector(vector: NDArray[np.float32]) -> Raw:
    """Encode a vector, or a matrix, as JSON lists of numbers."""
    return Raw(_encode(vector.tolist()))


def encode_vector_bytes(
    vector: NDArray[np.float32], dtype: EmbedDType = "float32", endianness: Endianness = "native"
) -> Raw:
    """Encode the bytes of a vector as a JSON string in base64, little-endian unless `endianness` is `big`."""
    order = ">" if endianness == "big" else "<"
    numbers: NDArray[Any]
    match dtype:
        case "float32":
            numbers = vector.astype(order + "f4")
        case "float16":
            numbers = vector.astype(order + "f2")
        case "bfloat16":
            numbers = _round_to_bfloat16(vector).astype(order + "u2")
    return Raw(b'"' + b64encode(numbers.tobytes()) + b'"')


def _round_to_bfloat16(vector: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the upper halves of the numbers' bits, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(vector, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
