"""Translation of other APIs' requests to models that pool: Cohere's v2 API, text-embeddings-inference, and Ollama.

Each becomes a request for embeddings or a reranking, and its response is rendered from that one's. Vectors are
requested in base64, which is smaller than JSON numbers and faster to read.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from argosy.protocol.dialects.chat_request import RenderedRequest, SharedFields, drop_unset
from argosy.protocol.dialects.ollama_requests import strip_tag
from argosy.protocol.errors import invalid_request
from argosy.protocol.openai_requests import JsonObject
from argosy.protocol.parameter_rules import unsupported_parameter
from argosy.protocol.parsing import parse_request_body
from argosy.protocol.pooling_api import (
    MODEL_LIMIT,
    Document,
    PositiveInt,
    TextDocument,
)

Truncation = Literal["NONE", "START", "END"]
CohereEmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
_encode = msgspec.json.Encoder().encode


class CohereContent(msgspec.Struct, gc=False):
    """Part of an input. Only texts are supported."""

    type: str
    text: str | None = None


class CohereInput(msgspec.Struct, gc=False):
    """Input with several parts."""

    content: list[CohereContent]


class CohereEmbedRequest(SharedFields, frozen=True, kw_only=True):
    """Body of `POST /v2/embed`."""

    model: str | None = None
    input_type: str | None = None
    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None
    images: list[str] | None = None
    embedding_types: Annotated[list[CohereEmbeddingType], Meta(min_length=1)] | None = None
    output_dimension: PositiveInt | None = None
    truncate: Truncation | None = None
    max_tokens: PositiveInt | None = None


class CohereRerankRequest(SharedFields, frozen=True, kw_only=True):
    """Body of `POST /v2/rerank`."""

    model: str | None = None
    query: str
    documents: list[Document]
    top_n: PositiveInt | None = None
    max_tokens_per_doc: PositiveInt | None = None


class TeiRerankRequest(SharedFields, frozen=True, kw_only=True):
    """Body of text-embeddings-inference's `POST /rerank`."""

    model: str | None = None
    query: str
    texts: list[str]
    raw_scores: bool | None = None
    """Whether scores are those of the model, before their activation."""
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Number of results, as in the other shapes of this path; 0 or None for all."""


class OllamaEmbedRequest(SharedFields, frozen=True, kw_only=True):
    """Body of `POST /api/embed`."""

    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    """Whether longer inputs are truncated. Default true."""
    dimensions: int | None = None
    prompt: Any = None
    """Field of the older `/api/embeddings`, which is refused: without `input` there would be no embeddings."""
    keep_alive: float | str | None = None
    options: JsonObject | None = None


class OllamaEmbeddingsRequest(SharedFields, frozen=True, kw_only=True):
    """Body of the older `POST /api/embeddings`, which embeds one text."""

    model: str
    prompt: str | None = None
    keep_alive: float | str | None = None
    options: JsonObject | None = None


class _Vector(msgspec.Struct, gc=False):
    index: int
    embedding: str | list[float]
    """In base64, unless the server supports only lists of numbers."""


class _Tokens(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int = 0


class _VectorList(msgspec.Struct):
    data: list[_Vector]
    id: str = ""
    usage: _Tokens = _Tokens()


class _Rank(msgspec.Struct, gc=False):
    index: int
    relevance_score: float


class _Ranking(msgspec.Struct):
    results: list[_Rank]
    id: str = ""
    usage: _Tokens = _Tokens()


def translate_cohere_embed(body: bytes, *, refuse_unknown: bool = False) -> RenderedRequest:
    """Translate the body of Cohere's `POST /v2/embed`.

    Args:
        body: The JSON body.
        refuse_unknown: Raise an error for unknown fields.

    Raises:
        ApiError: 400 if the body is invalid or needs what is not supported, 413 if it has too many values.
    """
    request, ignored = parse_request_body(CohereEmbedRequest, body, refuse_unknown=refuse_unknown)
    types: list[CohereEmbeddingType] = list(dict.fromkeys(request.embedding_types or ["float"]))
    texts = _cohere_texts(request)
    fields = {
        "model": request.model,
        "input": texts,
        "input_type": request.input_type,
        "dimensions": request.output_dimension,
        "encoding_format": "base64",
        "truncate_prompt_tokens": _cohere_truncation(request),
        "truncation_side": "left" if request.truncate == "START" else None,
        **request.extension_fields(),
    }

    def render(response: bytes) -> bytes:
        vectors = _read_vectors(response)
        embeddings = {
            name: [_COHERE_ENCODERS[name](vector) for vector in vectors.data] for name in types
        }
        return _encode(
            {
                "id": vectors.id,
                "embeddings": embeddings,
                "texts": texts,
                "meta": _cohere_meta(vectors.usage.prompt_tokens, billed_units="input_tokens"),
                "response_type": "embeddings_by_type",
            }
        )

    return RenderedRequest(body=drop_unset(fields), render=render, ignored=ignored)


def translate_cohere_rerank(body: bytes, *, refuse_unknown: bool = False) -> RenderedRequest:
    """Translate the body of Cohere's `POST /v2/rerank`. Arguments and errors are those of `translate_cohere_embed`."""
    request, ignored = parse_request_body(CohereRerankRequest, body, refuse_unknown=refuse_unknown)
    fields = {
        "model": request.model,
        "query": request.query,
        "documents": [_document_text(document) for document in request.documents],
        "top_n": request.top_n,
        "max_tokens_per_doc": request.max_tokens_per_doc,
        "return_documents": False,
        "truncate_prompt_tokens": MODEL_LIMIT,
        **request.extension_fields(),
    }

    def render(response: bytes) -> bytes:
        ranking = msgspec.json.decode(response, type=_Ranking)
        results = [
            {"index": rank.index, "relevance_score": rank.relevance_score}
            for rank in ranking.results
        ]
        meta = _cohere_meta(ranking.usage.prompt_tokens, billed_units="search_units")
        return _encode({"id": ranking.id, "results": results, "meta": meta})

    return RenderedRequest(body=drop_unset(fields), render=render, ignored=ignored)


def translate_tei_rerank(body: bytes, *, refuse_unknown: bool = False) -> RenderedRequest:
    """Translate the body of text-embeddings-inference's `POST /rerank`.

    Arguments and errors are those of `translate_cohere_embed`.
    """
    request, ignored = parse_request_body(TeiRerankRequest, body, refuse_unknown=refuse_unknown)
    side = (request.truncation_direction or "right").lower()
    fields = {
        "model": request.model,
        "query": request.query,
        "documents": request.texts,
        "top_n": request.top_n,
        "use_activation": False if request.raw_scores else None,
        "return_documents": False,
        "truncate_prompt_tokens": MODEL_LIMIT if request.truncate else None,
        "truncation_side": side if request.truncate else None,
        **request.extension_fields(),
    }

    def render(response: bytes) -> bytes:
        ranks: list[dict[str, Any]] = []
        for rank in msgspec.json.decode(response, type=_Ranking).results:
            text = {"text": request.texts[rank.index]} if request.return_text else {}
            ranks.append({"index": rank.index, **text, "score": rank.relevance_score})
        return _encode(ranks)

    return RenderedRequest(body=drop_unset(fields), render=render, ignored=ignored)


def is_tei_request(body: bytes) -> bool:
    """Whether the body of a `POST /rerank` has the shape of text-embeddings-inference, whose documents are `texts`."""
    try:
        keys = msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return "texts" in keys and "documents" not in keys


def translate_ollama_embed(
    body: bytes, clock: Callable[[], float], *, refuse_unknown: bool = False
) -> RenderedRequest:
    """Translate the body of Ollama's `POST /api/embed`. A request without inputs has an empty list as `input`.

    Args:
        body: The JSON body.
        clock: Returns seconds.
        refuse_unknown: Raise an error for unknown fields.

    Raises:
        ApiError: 400 if the body is invalid, 413 if it has too many values.
    """
    request, ignored = parse_request_body(OllamaEmbedRequest, body, refuse_unknown=refuse_unknown)
    if request.prompt is not None:
        raise unsupported_parameter("prompt", "Send the texts in 'input', or use /api/embeddings.")
    started_at = clock()
    inputs = [request.input] if isinstance(request.input, str) else request.input
    fields = {
        "model": strip_tag(request.model),
        "input": inputs or [],
        "dimensions": request.dimensions or None,
        "encoding_format": "base64",
        "truncate_prompt_tokens": None if request.truncate is False else MODEL_LIMIT,
        **request.extension_fields(),
    }

    def render(response: bytes) -> bytes:
        vectors = _read_vectors(response)
        return _encode(
            {
                "model": request.model,
                "embeddings": [_to_numbers(vector) for vector in vectors.data],
                "total_duration": int((clock() - started_at) * 1e9),
                "load_duration": 0,
                "prompt_eval_count": vectors.usage.prompt_tokens,
            }
        )

    unused = tuple(f"options.{name}" for name in request.options or ())
    return RenderedRequest(body=drop_unset(fields), render=render, ignored=(*ignored, *unused))


def translate_ollama_embeddings(body: bytes, *, refuse_unknown: bool = False) -> RenderedRequest:
    """Translate the body of Ollama's `POST /api/embeddings`, with the errors of `translate_ollama_embed`."""
    request, ignored = parse_request_body(
        OllamaEmbeddingsRequest, body, refuse_unknown=refuse_unknown
    )
    fields = {
        "model": strip_tag(request.model),
        "input": [request.prompt] if request.prompt else [],
        "encoding_format": "base64",
        "truncate_prompt_tokens": MODEL_LIMIT,
        **request.extension_fields(),
    }

    def render(response: bytes) -> bytes:
        vectors = _read_vectors(response).data
        return _encode({"embedding": _to_numbers(vectors[0]) if vectors else []})

    unused = tuple(f"options.{name}" for name in request.options or ())
    return RenderedRequest(body=drop_unset(fields), render=render, ignored=(*ignored, *unused))


def _cohere_texts(request: CohereEmbedRequest) -> list[str]:
    """Return the texts of a request, which has them in one of two fields."""
    if request.images:
        raise unsupported_parameter("images", "Send 'texts'.")
    if (request.texts is None) == (request.inputs is None):
        raise invalid_request("Send either 'texts' or 'inputs'.", "texts")
    if request.texts is not None:
        return request.texts
    texts = []
    for index, item in enumerate(request.inputs or ()):
        if any(part.text is None for part in item.content):
            raise unsupported_parameter(f"inputs[{index}].content", "Send parts of type 'text'.")
        texts.append("".join(part.text or "" for part in item.content))
    return texts


def _cohere_truncation(request: CohereEmbedRequest) -> int | None:
    """Return the number of tokens to which inputs are truncated, -1 for the model's limit, None for no truncation."""
    if request.max_tokens is not None:
        return request.max_tokens
    return None if request.truncate == "NONE" else MODEL_LIMIT


def _cohere_meta(
    input_tokens: int, *, billed_units: Literal["input_tokens", "search_units"]
) -> dict[str, Any]:
    """Return the counts of a response. A ranking is billed as one search, whatever its tokens."""
    billed = {"search_units": 1}
    if billed_units == "input_tokens":
        billed = {"input_tokens": input_tokens, "image_tokens": 0}
    return {
        "api_version": {"version": "2"},
        "tokens": {"input_tokens": input_tokens},
        "billed_units": billed,
    }


def _document_text(document: Document) -> str:
    return document.text if isinstance(document, TextDocument) else document


def _read_vectors(response: bytes) -> _VectorList:
    vectors = msgspec.json.decode(response, type=_VectorList)
    vectors.data.sort(key=lambda vector: vector.index)
    return vectors


def _to_numbers(vector: _Vector) -> Raw:
    """Return a vector as a JSON list, encoded for itself so that other threads may run between two vectors."""
    return Raw(_encode(_read_numbers(vector)))


def _read_numbers(vector: _Vector) -> list[float]:
    if isinstance(vector.embedding, list):
        return vector.embedding
    numbers = array("f", b64decode(vector.embedding, validate=True))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def _to_bytes(vector: _Vector, zero: int) -> Raw:
    """Return a vector as integers: its largest number becomes 127 or -127, and 0 becomes `zero`.

    Each vector has a scale of its own, which the similarity of cosines does not depend on. A common scale would leave
    few values to vectors with many dimensions.
    """
    numbers = _read_numbers(vector)
    scale = 127 / (max(map(abs, numbers), default=0) or 1)
    return Raw(_encode([round(number * scale) + zero for number in numbers]))


def _to_bits(vector: _Vector, zero: int) -> Raw:
    """Return the signs of a vector, eight to a byte with the first in its highest bit, minus `zero`."""
    bits = "".join("1" if number > 0 else "0" for number in _read_numbers(vector))
    size = (len(bits) + 7) // 8
    packed = int(bits.ljust(8 * size, "0") or "0", 2).to_bytes(size, "big")
    return Raw(_encode([byte - zero for byte in packed]))


def _to_base64(vector: _Vector) -> str:
    if isinstance(vector.embedding, str):
        return vector.embedding
    numbers = array("f", vector.embedding)
    if sys.byteorder == "big":
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode()


_COHERE_ENCODERS: dict[CohereEmbeddingType, Callable[[_Vector], Raw | str]] = {
    "float": _to_numbers,
    "base64": _to_base64,
    "int8": partial(_to_bytes, zero=0),
    "uint8": partial(_to_bytes, zero=128),
    "binary": partial(_to_bits, zero=128),
    "ubinary": partial(_to_bits, zero=0),
}
