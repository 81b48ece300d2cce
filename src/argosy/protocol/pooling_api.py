"""Requests and responses of models that pool: embeddings, pooling, classification, scores and reranking.

The shapes are those of OpenAI's embeddings, of vLLM, and of Jina's and Cohere's rerank APIs. A body without `model` is
for the only model that can answer it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from argosy.protocol.errors import ApiError, invalid_request
from argosy.protocol.openai_requests import ChatMessageParam, JsonObject, TokenizeRequest
from argosy.protocol.parameter_rules import unsupported_parameter

MAX_INPUTS = 2048
"""Maximum inputs of one request, as OpenAI's."""
MODEL_LIMIT = -1
"""Value of `truncate_prompt_tokens` that truncates to the model's own limit."""

TaskName = Literal["generate", "embed", "token_embed", "classify", "score"]
"""Task of a model, in vLLM's terms: `embed` gives a vector for each input, `token_embed` one for each token."""
PoolingTaskName = Literal["embed", "token_embed", "classify"]
EmbedDType = Literal["float32", "float16", "bfloat16"]
Endianness = Literal["native", "little", "big"]
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TruncationLimit = Annotated[int, Meta(ge=MODEL_LIMIT, le=2**31 - 1)]
TextInputs = str | list[str | int | list[int]]
"""Text, list of token ids, or list of both."""
NormalizedInput = str | list[int]
"""Text, or the ids of its tokens."""


class PooledRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields common to all requests to models that pool."""

    model: str | None = None
    user: str | None = None

    # Extensions of vLLM
    truncate_prompt_tokens: TruncationLimit | None = None
    """Number of tokens to which each input is truncated; -1 is the model's own limit. None refuses longer inputs."""
    truncation_side: Literal["left", "right"] | None = None
    """Side on which inputs are truncated; the right one by default. `left` keeps their ends."""
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    """Whether the model's last step is applied: normalisation of vectors, sigmoid or softmax of scores."""
    priority: Annotated[int, Meta(ge=0, le=8)] | None = None
    """Number of tiers by which the client lowers the priority of this request."""
    request_id: str | None = None
    session_id: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None

    # Extension of Argosy
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    """Seconds after which the request fails."""

    @property
    def keeps_end(self) -> bool:
        """Whether truncated inputs keep their ends."""
        return self.truncation_side == "left"

    def read_chat(self) -> TokenizeRequest | None:
        """Return the conversation that is the only input, or None for other inputs.

        Raises:
            ApiError(400): A field asks for a way of tokenization that is not supported.
        """
        if self.add_special_tokens is False:
            remedy = "Special tokens are always added to texts. Send token ids to choose them."
            raise unsupported_parameter("add_special_tokens", remedy)
        return None


class InputRequest(PooledRequest, frozen=True, kw_only=True):
    """Fields of requests whose inputs are texts, lists of token ids, or one conversation (vLLM)."""

    input: TextInputs | None = None
    messages: list[ChatMessageParam] | None = None
    """Conversation instead of `input`. The model's chat template turns it into one text."""
    add_generation_prompt: bool | None = None
    """Whether the text of a conversation ends with the beginning of an answer. Default false."""
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None

    def read_chat(self) -> TokenizeRequest | None:
        if self.messages is None:
            return super().read_chat()
        if self.input is not None:
            raise invalid_request("Send either 'input' or 'messages'.", "messages")
        return TokenizeRequest(
            messages=self.messages,
            add_special_tokens=bool(self.add_special_tokens),
            add_generation_prompt=bool(self.add_generation_prompt),
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def list_inputs(self) -> list[NormalizedInput]:
        """Return the inputs, without a conversation. Raises as `list_inputs`."""
        if self.input is None and self.messages is None:
            message = "Missing parameter 'input'. Add it."
            raise invalid_request(message, "input", "missing_required_parameter")
        return [] if self.input is None else list_inputs(self.input)


class EmbeddingRequest(InputRequest, frozen=True, kw_only=True):
    """Body of `POST /v1/embeddings`."""

    dimensions: PositiveInt | None = None
    """Length to which vectors are shortened. They are normalised again afterwards."""
    encoding_format: Literal["float", "base64"] | None = None

    # Extensions of vLLM
    embed_dtype: EmbedDType | None = None
    """Type of the numbers in base64."""
    endianness: Endianness | None = None
    """Byte order of the numbers in base64. `native` is little-endian."""
    normalize: bool | None = None
    """Older name of `use_activation`."""

    # Extensions of sentence-transformers and NVIDIA NIM
    prompt_name: str | None = None
    """Name of one of the model's prompts, which precedes each input."""
    prompt: str | None = None
    """Text that precedes each input."""
    input_type: str | None = None
    """Purpose of the inputs, like `query` or `search_document`. It selects the model's prompt for it, if it has one."""

    @property
    def normalizes(self) -> bool | None:
        """Whether vectors are normalised; None for the model's default."""
        return self.use_activation if self.normalize is None else self.normalize

    def check_encoding(self) -> None:
        """Refuse number formats that JSON lists cannot have.

        Raises:
            ApiError(400): A field contradicts `encoding_format`.
        """
        if self.encoding_format == "base64":
            return
        for name, default in (("embed_dtype", "float32"), ("endianness", "native")):
            if getattr(self, name) not in {None, default}:
                message = (
                    f"'{name}' needs the encoding_format 'base64'. Set it, or remove '{name}'."
                )
                raise invalid_request(message, name)


class PoolingRequest(EmbeddingRequest, frozen=True, kw_only=True):
    """Body of `POST /pooling`."""

    task: PoolingTaskName | None = None
    """Task to compute. Defaults to `token_embed` if the model embeds, and else to `classify`."""


class ClassifyRequest(InputRequest, frozen=True, kw_only=True):
    """Body of `POST /classify`."""


class TextDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Document as an object. Other fields than the text have no effect."""

    text: str


Document = str | TextDocument
"""A text, or an object with one."""
Documents = str | list[Document]


class ScoreRequest(PooledRequest, frozen=True, kw_only=True):
    """Body of `POST /score`: pairs of texts, under one of several names."""

    text_1: Documents | None = None
    text_2: Documents | None = None
    queries: Documents | None = None
    documents: Documents | None = None
    items: Documents | None = None
    data_1: Documents | None = None
    data_2: Documents | None = None
    instruction: str | None = None
    """Instruction of the pairs, for models whose prompt has one."""
    max_tokens_per_query: PositiveInt | None = None
    max_tokens_per_doc: PositiveInt | None = None

    def build_pairs(self) -> list[tuple[str, str]]:
        """Return the pairs: each text with the one at its position, or one query with all documents.

        Raises:
            ApiError(400): A side is missing, given twice or empty, or the sides have different lengths.
        """
        _, queries = self._find_side(("text_1", "queries", "data_1"))
        name, documents = self._find_side(("text_2", "documents", "items", "data_2"))
        if len(queries) == 1:
            queries *= len(documents)
        if len(queries) != len(documents):
            message = (
                f"There are {len(queries)} queries and {len(documents)} documents. "
                "Send one query, or as many queries as documents."
            )
            raise invalid_request(message, name)
        return list(zip(queries, documents, strict=True))

    def _find_side(self, names: tuple[str, ...]) -> tuple[str, list[str]]:
        """Return the name and the texts of one side."""
        given = [name for name in names if getattr(self, name) is not None]
        if not given:
            message = f"Missing parameter '{names[0]}'. Add it."
            raise invalid_request(message, names[0], "missing_required_parameter")
        if len(given) > 1:
            message = f"'{given[0]}' and '{given[1]}' are the same parameter. Remove one of them."
            raise invalid_request(message, given[1])
        return given[0], list_documents(getattr(self, given[0]), given[0])


class RerankRequest(PooledRequest, frozen=True, kw_only=True):
    """Body of `POST /rerank`."""

    query: str
    documents: list[Document]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Number of results; 0 or None for all documents."""
    return_documents: bool | None = None
    """Whether results contain their documents. Default true."""
    instruction: str | None = None
    """Instruction of the query, for models whose prompt has one."""
    max_tokens_per_query: PositiveInt | None = None
    max_tokens_per_doc: PositiveInt | None = None

    def build_pairs(self) -> list[tuple[str, str]]:
        """Return the query with each document.

        Raises:
            ApiError(400): The query or a document is empty, or there are too many documents.
        """
        if not self.query:
            raise _empty_text("query")
        return [(self.query, document) for document in list_documents(self.documents, "documents")]


def unsupported_task_error(model: str, path: str, tasks: Iterable[str]) -> ApiError:
    """Return the error for a request to a model that has none of the path's tasks."""
    message = (
        f"The model {model[:200]!r} does not support {path}: its tasks are {', '.join(sorted(tasks))}. "
        "Use another model; /v1/models lists the tasks of each."
    )
    return invalid_request(message, "model", "unsupported_task")


def list_inputs(value: TextInputs, param: str = "input") -> list[NormalizedInput]:
    """Return the inputs of a request: texts, and lists of token ids.

    Raises:
        ApiError(400): There are none or too many, one is empty, or ids stand outside of a list.
    """
    if isinstance(value, str):
        value = [value]
    elif value and isinstance(value[0], int):
        value = [_token_ids(value, param)]
    _check_count(value, param)
    inputs: list[NormalizedInput] = []
    for index, item in enumerate(value):
        path = param if len(value) == 1 else f"{param}[{index}]"
        if isinstance(item, int):
            message = (
                f"'{param}' mixes texts and single token ids. Send each input's ids as a list."
            )
            raise invalid_request(message, path, "invalid_type")
        inputs.append(item if isinstance(item, str) else _token_ids(item, path))
        if not item:
            raise _empty_text(path)
    return inputs


def list_documents(value: Documents, param: str) -> list[str]:
    """Return the texts of documents.

    Raises:
        ApiError(400): There are none or too many, or one is empty.
    """
    documents = [value] if isinstance(value, str) else value
    _check_count(documents, param)
    texts = [each if isinstance(each, str) else each.text for each in documents]
    if "" in texts:
        raise _empty_text(f"{param}[{texts.index('')}]" if len(texts) > 1 else param)
    return texts


def _token_ids(value: Sequence[object], param: str) -> list[int]:
    ids = [item for item in value if isinstance(item, int)]
    if len(ids) < len(value):
        message = f"'{param}' mixes texts and token ids. Send a list of one kind."
        raise invalid_request(message, param, "invalid_type")
    if min(ids, default=0) < 0:
        raise invalid_request(f"'{param}' has a negative token id. Remove it.", param)
    return ids


def _check_count(values: Sequence[object], param: str) -> None:
    if not values:
        raise invalid_request(f"'{param}' is empty. Send at least one text.", param)
    if len(values) > MAX_INPUTS:
        message = f"'{param}' has {len(values)} items. Send at most {MAX_INPUTS} in one request."
        raise invalid_request(message, param)


def _empty_text(param: str) -> ApiError:
    return invalid_request(f"'{param}' is an empty text. Remove it, or send a text.", param)


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


class EmbeddingObject(msgspec.Struct, frozen=True, kw_only=True):
    """Vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Raw
    """List of numbers, or their bytes in base64."""


class EmbeddingList(PooledResponse, frozen=True, kw_only=True):
    """Response of `/v1/embeddings`."""

    data: list[EmbeddingObject]


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
