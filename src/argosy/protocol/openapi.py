"""OpenAPI 3.1 documents: what a route accepts and answers, and the document of all routes of a server.

Schemas are derived from the types that the servers decode and encode. `shared_operations` describes the routes that
gateway and replica share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from argosy.protocol.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
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
from argosy.protocol.pooling_api import (
    ClassificationList,
    ClassifyRequest,
    EmbeddingList,
    EmbeddingRequest,
    PoolingList,
    PoolingRequest,
    RerankRequest,
    RerankResponse,
    ScoreList,
    ScoreRequest,
)
from argosy.version import VERSION

JSON_MEDIA_TYPE = "application/json"
EVENTS_MEDIA_TYPE = "text/event-stream"
TEXT_SCHEMA: Mapping[str, Any] = {"type": "string"}
_REF_TEMPLATE = "#/components/schemas/{name}"
_REFERENCE = re.compile(r'"#/components/schemas/(\w+)"')
_PARAMETER = re.compile(r"\{(\w+)(\.\.\.)?\}")
"""Parameter of a path template: one segment, or with dots all that follows."""
_INTERNAL_ERROR = {"500": "Internal error. The log has the details under the request id."}


class Operation(msgspec.Struct, frozen=True):
    """Description of one method at one path: what it accepts and answers."""

    id: str
    content: Mapping[str, Any]
    """Type of the successful response by media type, or its schema as a dict."""
    errors: Mapping[str, str] = {}
    """Descriptions of errors by status."""
    body: type | dict[str, Any] | None = None
    """Type of the body, or its schema as a dict."""
    body_media_type: str = JSON_MEDIA_TYPE
    is_body_optional: bool = False
    refuses_unknown_fields: bool = False
    """Whether unknown fields of the body are errors, also by default."""
    query: type | None = None
    """Struct whose fields are the parameters of the query. All are optional."""
    error_schema: Mapping[str, Any] | None = None
    """Schema of errors; None for that of OpenAI's errors."""
    summary: str = ""
    description: str = ""


def json_operation(
    operation_id: str,
    response: Any,  # noqa: ANN401 - any type that msgspec knows, or a schema
    errors: Mapping[str, str],
    body: type | dict[str, Any] | None = None,
    *,
    stream: str | None = None,
    **options: Any,  # noqa: ANN401 - the other fields of `Operation`
) -> Operation:
    """Return an operation that answers with JSON, and also with a stream of this media type if one is given."""
    content = {JSON_MEDIA_TYPE: response} | ({} if stream is None else {stream: TEXT_SCHEMA})
    return Operation(operation_id, content, errors, body, **options)


def shared_operations(
    generation: Mapping[str, str],
    utility: Mapping[str, str],
    *,
    listing: Mapping[str, str],
    ready: Mapping[str, str],
    health: Mapping[str, str],
    operator: Mapping[str, str],
) -> dict[str, Operation]:
    """Return the operations that gateway and replica share, by path.

    Each argument describes errors by status. `utility` is for other operations on a model than completions, and
    `operator` for `/metrics` and the document itself.
    """
    operation = json_operation
    return {
        "/v1/chat/completions": operation(
            "chat", ChatCompletion, generation, ChatCompletionRequest, stream=EVENTS_MEDIA_TYPE
        ),
        "/v1/completions": operation(
            "complete", Completion, generation, CompletionRequest, stream=EVENTS_MEDIA_TYPE
        ),
        "/v1/embeddings": operation("embed", EmbeddingList, generation, EmbeddingRequest),
        "/pooling": operation("pool", PoolingList, generation, PoolingRequest),
        "/classify": operation("classify", ClassificationList, generation, ClassifyRequest),
        "/score": operation("score", ScoreList, generation, ScoreRequest),
        "/v1/score": operation("scoreV1", ScoreList, generation, ScoreRequest),
        "/rerank": operation("rerank", RerankResponse, generation, RerankRequest),
        "/v1/rerank": operation("rerankV1", RerankResponse, generation, RerankRequest),
        "/v1/models": operation("listModels", ModelList, listing),
        "/v1/models/{model...}": operation("getModel", ModelCard, utility),
        "/tokenize": operation("tokenize", TokenizeResponse, utility, TokenizeRequest),
        "/detokenize": operation("detokenize", DetokenizeResponse, utility, DetokenizeRequest),
        "/health": operation("health", StatusResponse, health),
        "/ready": operation("ready", StatusResponse, ready),
        "/version": operation("version", VersionResponse, {}),
        "/metrics": Operation("metrics", {"text/plain": TEXT_SCHEMA}, operator),
        "/openapi.json": operation("openapi", {"type": "object"}, operator),
    }


def render_openapi(
    title: str,
    description: str,
    operations: Iterable[tuple[str, str, Operation]],
    *,
    has_keys: bool,
) -> bytes:
    """Return the document as JSON.

    Args:
        title: Title of the API.
        description: Description of the API.
        operations: Path, method and operation of each route.
        has_keys: Whether requests may need an API key.
    """
    routes = list(operations)
    types = list(dict.fromkeys(_described_types(operation for _, _, operation in routes)))
    refs, schemas = msgspec.json.schema_components(types, ref_template=_REF_TEMPLATE)
    refs_by_type: dict[Any, dict[str, Any]] = dict(zip(types, refs, strict=True))
    for _, _, operation in routes:
        if not (
            operation.body is None
            or isinstance(operation.body, dict)
            or operation.refuses_unknown_fields
        ):
            _allow_unknown_fields(refs_by_type[operation.body], schemas)
    paths: dict[str, dict[str, Any]] = {}
    for path, method, operation in routes:
        described = _describe(operation, path, refs_by_type)
        paths.setdefault(_PARAMETER.sub(r"{\1}", path), {})[method.lower()] = described
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": VERSION, "description": description},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_keys:
        document["security"] = [{"bearer": []}, {}]
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(document)


def _allow_unknown_fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> None:
    """Let the objects to which a schema refers have unknown fields, and those to which they refer."""
    for name in _REFERENCE.findall(msgspec.json.encode(schema).decode()):
        if "additionalProperties" in schemas[name]:
            del schemas[name]["additionalProperties"]
            _allow_unknown_fields(schemas[name], schemas)


def _described_types(operations: Iterable[Operation]) -> Iterable[Any]:
    yield ErrorBody
    for operation in operations:
        if not (operation.body is None or isinstance(operation.body, dict)):
            yield operation.body
        yield from (each for each in operation.content.values() if not isinstance(each, dict))


def _describe(
    operation: Operation, path: str, refs: Mapping[Any, Mapping[str, Any]]
) -> dict[str, Any]:
    success = {}
    for media_type, each in operation.content.items():
        schema = each if isinstance(each, dict) else refs[each]
        is_stream = media_type == EVENTS_MEDIA_TYPE
        success[media_type] = {"schema": _describe_event(schema) if is_stream else schema}
    error_content = {JSON_MEDIA_TYPE: {"schema": operation.error_schema or refs[ErrorBody]}}
    responses: dict[str, Any] = {"200": {"description": "Successful response.", "content": success}}
    for status, description in {**_INTERNAL_ERROR, **operation.errors}.items():
        responses[status] = {"description": description, "content": error_content}
    described: dict[str, Any] = {"operationId": operation.id, "responses": responses}
    if operation.body is not None:
        schema = operation.body if isinstance(operation.body, dict) else refs[operation.body]
        body = {operation.body_media_type: {"schema": schema}}
        described["requestBody"] = {"required": not operation.is_body_optional, "content": body}
    parameters = [_path_parameter(name) for name, _ in _PARAMETER.findall(path)]
    parameters += [] if operation.query is None else _query_parameters(operation.query)
    described |= {"summary": operation.summary, "description": operation.description}
    described["parameters"] = parameters
    return {name: value for name, value in described.items() if value}


def _describe_event(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of one event of a stream whose `data` is a text, or a JSON value of this schema."""
    if data != TEXT_SCHEMA:
        data = {"type": "string", "contentMediaType": JSON_MEDIA_TYPE, "contentSchema": data}
    fields = {"event": TEXT_SCHEMA, "data": data, "id": TEXT_SCHEMA}
    return {"type": "object", "description": "One server-sent event.", "properties": fields}


def _query_parameters(query_type: type) -> list[dict[str, Any]]:
    (_,), components = msgspec.json.schema_components([query_type])
    (query,) = components.values()
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in query["properties"].items()
    ]


def _path_parameter(name: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}
