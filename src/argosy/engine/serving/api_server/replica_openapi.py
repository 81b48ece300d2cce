"""OpenAPI 3.1 document of the replica, derived from the types that the server decodes and encodes."""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

import msgspec

from argosy.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    ChatMessageParam,
    Completion,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    DetokenizeResponse,
    DrainRequest,
    ErrorBody,
    KvEvent,
    LoadResponse,
    ModelCard,
    ModelList,
    ResumeInput,
    StatusResponse,
    StreamOptions,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
)

_GENERATION_ERRORS = {
    "400": "The request is invalid. `param` names the parameter to change.",
    "404": "The replica does not serve this model.",
    "408": "The request timed out before its first token or before its body was complete.",
    "413": "The body is too large.",
    "415": "Compressed bodies are not supported.",
    "499": "The request was cancelled.",
    "500": "The engine failed.",
    "503": "The replica is not ready or is draining. Retry after `Retry-After` seconds.",
}
_UTILITY_ERRORS = {
    code: _GENERATION_ERRORS[code] for code in ("400", "404", "408", "413", "415", "503")
}
_LENIENT_BODIES = (
    ChatCompletionRequest.__name__,
    ChatMessageParam.__name__,
    CompletionRequest.__name__,
    ContentPart.__name__,
    DetokenizeRequest.__name__,
    ResumeInput.__name__,
    StreamOptions.__name__,
    TokenizeRequest.__name__,
)
"""Objects in request bodies whose unknown fields are ignored by default."""
_INTERNAL_ERROR = {"500": "Internal error. The log has the details under the request id."}


@functools.cache
def render_openapi() -> bytes:
    """Return the document as JSON."""
    bodies = (
        *(ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest),
        *(
            DrainRequest,
            ChatCompletion,
            Completion,
            TokenizeResponse,
            DetokenizeResponse,
            ModelCard,
            ModelList,
            StatusResponse,
        ),
        *(VersionResponse, LoadResponse, KvEvent, ErrorBody),
    )
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for name in _LENIENT_BODIES:
        schemas[name].pop("additionalProperties", None)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Argosy replica",
                "version": version("argosy"),
                "description": "The OpenAI API for one model, and endpoints for operators.",
            },
            "paths": _paths(),
            "components": {"schemas": schemas},
        }
    )


def _paths() -> dict[str, Any]:
    generation_operation = functools.partial(_body_operation, errors=_GENERATION_ERRORS)
    utility_operation = functools.partial(_body_operation, errors=_UTILITY_ERRORS)
    status_operation = functools.partial(_body_operation, errors={"503": _GENERATION_ERRORS["503"]})
    return {
        "/v1/chat/completions": {
            "post": generation_operation(
                "chat", ChatCompletion, body=ChatCompletionRequest, streams=True
            )
        },
        "/v1/completions": {
            "post": generation_operation(
                "complete", Completion, body=CompletionRequest, streams=True
            )
        },
        "/v1/models": {"get": status_operation("listModels", ModelList)},
        "/v1/models/{model}": {
            "get": utility_operation("getModel", ModelCard)
            | {
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "minLength": 1},
                    }
                ]
            }
        },
        "/tokenize": {
            "post": utility_operation("tokenize", TokenizeResponse, body=TokenizeRequest)
        },
        "/detokenize": {
            "post": utility_operation("detokenize", DetokenizeResponse, body=DetokenizeRequest)
        },
        "/health": {"get": status_operation("health", StatusResponse)},
        "/ready": {"get": status_operation("ready", StatusResponse)},
        "/load": {"get": status_operation("load", LoadResponse)},
        "/kv_events": {
            "get": _build_operation(
                "followKvEvents",
                {"text/event-stream": {"schema": _schema_ref(KvEvent)}},
                {"503": _GENERATION_ERRORS["503"]},
            )
        },
        "/version": {"get": status_operation("version", VersionResponse)},
        "/drain": {
            "post": utility_operation(
                "drain", StatusResponse, body=DrainRequest, optional_body=True
            )
        },
        "/undrain": {"post": status_operation("undrain", StatusResponse)},
        "/metrics": {
            "get": _build_operation("metrics", {"text/plain": {"schema": {"type": "string"}}}, {})
        },
        "/openapi.json": {
            "get": _build_operation(
                "openapi", {"application/json": {"schema": {"type": "object"}}}, {}
            )
        },
    }


def _body_operation(
    name: str,
    response: type,
    *,
    errors: dict[str, str],
    body: type | None = None,
    streams: bool = False,
    optional_body: bool = False,
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _schema_ref(response)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation = _build_operation(name, content, errors)
    if body is not None:
        operation["requestBody"] = {
            "required": not optional_body,
            "content": {"application/json": {"schema": _schema_ref(body)}},
        }
    return operation


def _build_operation(name: str, content: dict[str, Any], errors: dict[str, str]) -> dict[str, Any]:
    error_content = {"application/json": {"schema": _schema_ref(ErrorBody)}}
    responses: dict[str, Any] = {"200": {"description": "Successful response.", "content": content}}
    for status, description in (errors | _INTERNAL_ERROR).items():
        responses[status] = {"description": description, "content": error_content}
    return {"operationId": name, "responses": responses}


def _schema_ref(body: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{body.__name__}"}
