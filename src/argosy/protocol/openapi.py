"""OpenAPI 3.1 documents: the operations that gateway and replica share, and a builder for further ones.

Schemas are derived from the types that the servers decode and encode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import msgspec

from argosy.protocol.openai_requests import (
    ChatCompletionRequest,
    ChatMessageParam,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    ResumeInput,
    StreamOptions,
    TokenizeRequest,
)
from argosy.protocol.openai_responses import (
    ChatCompletion,
    Completion,
    DetokenizeResponse,
    ErrorBody,
    ModelCard,
    ModelList,
    StatusResponse,
    TokenizeResponse,
    VersionResponse,
)
from argosy.protocol.pooling_requests import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from argosy.protocol.pooling_responses import (
    ClassificationList,
    EmbeddingList,
    PoolingList,
    RerankResponse,
    ScoreList,
)

JSON_MEDIA_TYPE = "application/json"
_REF_TEMPLATE = "#/components/schemas/{name}"
_POOLED_TYPES = (
    ClassificationList,
    EmbeddingList,
    PoolingList,
    RerankResponse,
    ScoreList,
)
_LENIENT_BODIES = (
    ChatCompletionRequest,
    ChatMessageParam,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ResumeInput,
    ScoreRequest,
    StreamOptions,
    TokenizeRequest,
)
"""Objects in request bodies whose unknown fields are ignored by default."""
_SHARED_TYPES = (
    *_LENIENT_BODIES,
    *_POOLED_TYPES,
    ChatCompletion,
    Completion,
    DetokenizeResponse,
    ErrorBody,
    ModelCard,
    ModelList,
    StatusResponse,
    TokenizeResponse,
    VersionResponse,
)
_Operation = tuple[str, str, type, type]
"""Path, operation id, and types of the request body and the response."""
_GENERATION_OPERATIONS: tuple[_Operation, ...] = (
    ("/v1/chat/completions", "chat", ChatCompletionRequest, ChatCompletion),
    ("/v1/completions", "complete", CompletionRequest, Completion),
)
_TOKENIZER_OPERATIONS: tuple[_Operation, ...] = (
    ("/tokenize", "tokenize", TokenizeRequest, TokenizeResponse),
    ("/detokenize", "detokenize", DetokenizeRequest, DetokenizeResponse),
)
_POOLING_OPERATIONS: tuple[_Operation, ...] = (
    ("/v1/embeddings", "embed", EmbeddingRequest, EmbeddingList),
    ("/pooling", "pool", PoolingRequest, PoolingList),
    ("/classify", "classify", ClassifyRequest, ClassificationList),
    ("/score", "score", ScoreRequest, ScoreList),
    ("/v1/score", "scoreV1", ScoreRequest, ScoreList),
    ("/rerank", "rerank", RerankRequest, RerankResponse),
    ("/v1/rerank", "rerankV1", RerankRequest, RerankResponse),
)
_INTERNAL_ERROR = {"500": "Internal error. The log has the details under the request id."}


class SharedErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptions of a server's errors by status, for each group of shared operations."""

    generation: Mapping[str, str]
    """Errors of completions."""
    utility: Mapping[str, str]
    """Errors of other operations on a model."""
    listing: Mapping[str, str]
    """Errors of the list of models."""
    status: Mapping[str, str]
    """Errors of `/ready`."""
    liveness: Mapping[str, str]
    """Errors of `/health`."""
    operator: Mapping[str, str]
    """Errors of `/metrics` and of the document itself."""


class OpenApiBuilder:
    """Builds the document of one server from its operations.

    Args:
        types: Types that operations refer to, besides those of the shared operations.
        lenient_bodies: Objects among them whose unknown fields are ignored by default.
        has_shared_operations: Whether the shared operations will be added.
    """

    def __init__(
        self,
        types: Iterable[Any],
        *,
        lenient_bodies: Iterable[type] = (),
        has_shared_operations: bool = True,
    ) -> None:
        shared_types = _SHARED_TYPES if has_shared_operations else (ErrorBody,)
        all_types = list(dict.fromkeys([*shared_types, *types]))
        refs, self._schemas = msgspec.json.schema_components(all_types, ref_template=_REF_TEMPLATE)
        self._refs: dict[Any, dict[str, Any]] = dict(zip(all_types, refs, strict=True))
        for lenient in self._refs.keys() & {*_LENIENT_BODIES, *lenient_bodies}:
            name = self._refs[lenient]["$ref"].rpartition("/")[2]
            self._schemas[name].pop("additionalProperties", None)
        self._paths: dict[str, dict[str, Any]] = {}

    def schema(self, described_type: Any) -> dict[str, Any]:  # noqa: ANN401 - any type that msgspec knows
        """Return the schema of a type. A type that was not given to the builder is described as an object."""
        found: dict[str, Any] = self._refs.get(described_type, {"type": "object"})
        return found

    def add(self, path: str, method: str, operation: dict[str, Any]) -> None:
        """Add an operation."""
        self._paths.setdefault(path, {})[method.lower()] = operation

    def describe(
        self,
        name: str,
        content: Mapping[str, Any],
        errors: Mapping[str, str],
        *,
        body: type | None = None,
        is_body_optional: bool = False,
        parameters: Iterable[Mapping[str, Any]] = (),
        error_schema: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe an operation.

        Args:
            name: Operation id.
            content: Schemas of the successful response by media type.
            errors: Descriptions of errors by status.
            body: Type of the request body, or None.
            is_body_optional: Whether the body may be left out.
            parameters: Parameters of the path and the query.
            error_schema: Schema of errors; None for that of OpenAI's errors.
        """
        success = {media_type: {"schema": schema} for media_type, schema in content.items()}
        responses: dict[str, Any] = {
            "200": {"description": "Successful response.", "content": success}
        }
        error_content = {JSON_MEDIA_TYPE: {"schema": error_schema or self.schema(ErrorBody)}}
        for status, description in {**_INTERNAL_ERROR, **errors}.items():
            responses[status] = {"description": description, "content": error_content}
        operation: dict[str, Any] = {"operationId": name, "responses": responses}
        if body is not None:
            body_content = {JSON_MEDIA_TYPE: {"schema": self.schema(body)}}
            operation["requestBody"] = {"required": not is_body_optional, "content": body_content}
        if parameters:
            operation["parameters"] = list(parameters)
        return operation

    def add_json(
        self,
        path: str,
        method: str,
        name: str,
        response_type: type,
        errors: Mapping[str, str],
        **options: Any,  # noqa: ANN401 - the keyword arguments of `describe`
    ) -> None:
        """Add an operation that answers with JSON of a type. `options` are those of `describe`."""
        content = {JSON_MEDIA_TYPE: self.schema(response_type)}
        self.add(path, method, self.describe(name, content, errors, **options))

    def add_shared_operations(self, errors: SharedErrors) -> None:
        """Add the operations that gateway and replica share."""
        for path, name, body, response in _GENERATION_OPERATIONS:
            content = {
                JSON_MEDIA_TYPE: self.schema(response),
                "text/event-stream": {"type": "string"},
            }
            self.add(path, "POST", self.describe(name, content, errors.generation, body=body))
        for path, name, body, response in _POOLING_OPERATIONS:
            self.add_json(path, "POST", name, response, errors.generation, body=body)
        self.add_json("/v1/models", "GET", "listModels", ModelList, errors.listing)
        self.add_json(
            "/v1/models/{model}",
            "GET",
            "getModel",
            ModelCard,
            errors.utility,
            parameters=[path_parameter("model")],
        )
        for path, name, body, response in _TOKENIZER_OPERATIONS:
            self.add_json(path, "POST", name, response, errors.utility, body=body)
        self.add_json("/health", "GET", "health", StatusResponse, errors.liveness)
        self.add_json("/ready", "GET", "ready", StatusResponse, errors.status)
        self.add_json("/version", "GET", "version", VersionResponse, {})
        text = {"text/plain": {"type": "string"}}
        self.add("/metrics", "GET", self.describe("metrics", text, errors.operator))
        document = {JSON_MEDIA_TYPE: {"type": "object"}}
        self.add("/openapi.json", "GET", self.describe("openapi", document, errors.operator))

    def render(self, title: str, description: str, *, has_keys: bool) -> bytes:
        """Return the document as JSON.

        Args:
            title: Title of the API.
            description: Description of the API.
            has_keys: Whether requests may need an API key.
        """
        document: dict[str, Any] = {
            "openapi": "3.1.0",
            "info": {"title": title, "version": version("argosy"), "description": description},
            "paths": self._paths,
            "components": {"schemas": self._schemas},
        }
        if has_keys:
            document["security"] = [{"bearer": []}, {}]
            document["components"]["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"}
            }
        return msgspec.json.encode(document)


def query_parameters(query_type: type) -> list[dict[str, Any]]:
    """Describe the parameters in the query, which are the fields of a struct. All are optional."""
    (_,), components = msgspec.json.schema_components([query_type])
    (query,) = components.values()
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in query["properties"].items()
    ]


def path_parameter(name: str) -> dict[str, Any]:
    """Describe a parameter in the path."""
    return {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
