"""The OpenAPI 3.1 document of the replica, made from the types that the server decodes and encodes."""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

import msgspec

from argosy.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    DrainRequest,
    ErrorBody,
    KvEvent,
    LoadResponse,
    ModelCard,
    ModelList,
    StatusResponse,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
)

_GENERATION_ERRORS = {
    "400": "The request cannot be served; `param` names what to change.",
    "404": "The model is not served here.",
    "408": "No token within the request's time, or the body did not come.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "499": "The request was cancelled.",
    "500": "The engine failed.",
    "503": "Not ready, or draining; try again after `Retry-After`.",
}
_UTILITY_ERRORS = {
    code: _GENERATION_ERRORS[code] for code in ("400", "404", "408", "413", "415", "503")
}
_INTERNAL_ERROR = {"500": "An internal error; the log has it under the request id."}


@functools.cache
def render_openapi() -> bytes:
    """The document as JSON."""
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
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Argosy replica",
                "version": version("argosy"),
                "description": "The OpenAI API on one model, and what operators need.",
            },
            "paths": _paths(),
            "components": {"schemas": schemas},
        }
    )


def _paths() -> dict[str, Any]:
    generate = functools.partial(_body_operation, errors=_GENERATION_ERRORS)
    read = functools.partial(_body_operation, errors=_UTILITY_ERRORS)
    look = functools.partial(_body_operation, errors={"503": _GENERATION_ERRORS["503"]})
    return {
        "/v1/chat/completions": {
            "post": generate("chat", ChatCompletion, body=ChatCompletionRequest, streams=True)
        },
        "/v1/completions": {
            "post": generate("complete", Completion, body=CompletionRequest, streams=True)
        },
        "/v1/models": {"get": look("listModels", ModelList)},
        "/v1/models/{model}": {
            "get": read("getModel", ModelCard)
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
        "/tokenize": {"post": read("tokenize", TokenizeResponse, body=TokenizeRequest)},
        "/detokenize": {"post": read("detokenize", DetokenizeResponse, body=DetokenizeRequest)},
        "/health": {"get": look("health", StatusResponse)},
        "/ready": {"get": look("ready", StatusResponse)},
        "/load": {"get": look("load", LoadResponse)},
        "/kv_events": {
            "get": _build_operation(
                "followKvEvents",
                {"text/event-stream": {"schema": _schema_ref(KvEvent)}},
                {"503": _GENERATION_ERRORS["503"]},
            )
        },
        "/version": {"get": look("version", VersionResponse)},
        "/drain": {"post": read("drain", StatusResponse, body=DrainRequest, optional_body=True)},
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
    answer: type,
    *,
    errors: dict[str, str],
    body: type | None = None,
    streams: bool = False,
    optional_body: bool = False,
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _schema_ref(answer)}}
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
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status, description in (errors | _INTERNAL_ERROR).items():
        answers[status] = {"description": description, "content": error_content}
    return {"operationId": name, "responses": answers}


def _schema_ref(body: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{body.__name__}"}
