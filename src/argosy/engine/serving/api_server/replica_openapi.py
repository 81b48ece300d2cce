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
    DrainRequest,
    ErrorBody,
    KvEvent,
    Load,
    ModelCard,
    ModelList,
    Status,
    Text,
    TokenizeRequest,
    Tokens,
    Version,
)

_GENERATE_ERRORS = {
    "400": "The request cannot be served; `param` names what to change.",
    "404": "The model is not served here.",
    "408": "No token within the request's time, or the body did not come.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "499": "The request was cancelled.",
    "500": "The engine failed.",
    "503": "Not ready, or draining; try again after `Retry-After`.",
}
_READ_ERRORS = {code: _GENERATE_ERRORS[code] for code in ("400", "404", "408", "413", "415", "503")}
_ANY_ERROR = {"500": "An internal error; the log has it under the request id."}


@functools.cache
def document() -> bytes:
    """The document as JSON."""
    bodies = (
        *(ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest),
        *(DrainRequest, ChatCompletion, Completion, Tokens, Text, ModelCard, ModelList, Status),
        *(Version, Load, KvEvent, ErrorBody),
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
    generate = functools.partial(_operation, errors=_GENERATE_ERRORS)
    read = functools.partial(_operation, errors=_READ_ERRORS)
    look = functools.partial(_operation, errors={"503": _GENERATE_ERRORS["503"]})
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
        "/tokenize": {"post": read("tokenize", Tokens, body=TokenizeRequest)},
        "/detokenize": {"post": read("detokenize", Text, body=DetokenizeRequest)},
        "/health": {"get": look("health", Status)},
        "/ready": {"get": look("ready", Status)},
        "/load": {"get": look("load", Load)},
        "/kv_events": {
            "get": _answers(
                "followKvEvents",
                {"text/event-stream": {"schema": _ref(KvEvent)}},
                {"503": _GENERATE_ERRORS["503"]},
            )
        },
        "/version": {"get": look("version", Version)},
        "/drain": {"post": read("drain", Status, body=DrainRequest, optional_body=True)},
        "/metrics": {
            "get": _answers("metrics", {"text/plain": {"schema": {"type": "string"}}}, {})
        },
        "/openapi.json": {
            "get": _answers("openapi", {"application/json": {"schema": {"type": "object"}}}, {})
        },
    }


def _operation(
    name: str,
    answer: type,
    *,
    errors: dict[str, str],
    body: type | None = None,
    streams: bool = False,
    optional_body: bool = False,
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation = _answers(name, content, errors)
    if body is not None:
        operation["requestBody"] = {
            "required": not optional_body,
            "content": {"application/json": {"schema": _ref(body)}},
        }
    return operation


def _answers(name: str, content: dict[str, Any], errors: dict[str, str]) -> dict[str, Any]:
    error_content = {"application/json": {"schema": _ref(ErrorBody)}}
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status, description in (errors | _ANY_ERROR).items():
        answers[status] = {"description": description, "content": error_content}
    return {"operationId": name, "responses": answers}


def _ref(body: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{body.__name__}"}
