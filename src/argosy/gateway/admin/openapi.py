"""The OpenAPI 3.1 document of the admin API, made from its operations."""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

import msgspec

from argosy.gateway.admin.endpoints import (
    JSON_MEDIA_TYPE,
    AdminEndpoint,
    AdminEndpoints,
    AdminRequest,
    AdminScope,
)
from argosy.protocol import ErrorBody

_ERROR_DESCRIPTIONS = {
    400: "A parameter is wrong; `param` names it.",
    401: "No key, or one that is not let in.",
    403: "The key may not do this.",
    404: "There is no such thing.",
    405: "The path takes another method.",
    408: "The body did not come.",
    409: "What there is stands in the way.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many wrong keys, or calls of the organisation that wait.",
    500: "An internal error; the log has it under the request id.",
    503: "The store or the issuer's keys cannot be used at the moment.",
}
_REF_TEMPLATE = "#/components/schemas/{name}"


def add_openapi_endpoint(endpoints: AdminEndpoints, path: str) -> AdminEndpoints:
    """Add the operation that gives the document of all of them, itself included."""

    @functools.cache
    def encode_document() -> bytes:
        return msgspec.json.encode(_build_document(endpoints))

    def get_openapi_document(scope: AdminScope, request: AdminRequest) -> bytes:  # noqa: ARG001 - it needs neither
        """This document."""
        return encode_document()

    endpoints.register("GET", path, "caller", is_nonblocking=True)(get_openapi_document)
    return endpoints


def _build_document(endpoints: AdminEndpoints) -> dict[str, Any]:
    told = [operation for operation in endpoints if operation.media_type == JSON_MEDIA_TYPE]
    answers = [
        operation.response_type for operation in told if operation.response_type is not bytes
    ]
    bodies = [operation.body_type for operation in endpoints if operation.body_type is not None]
    types = [*answers, *bodies, ErrorBody]
    refs, schemas = msgspec.json.schema_components(types, ref_template=_REF_TEMPLATE)
    by_type = dict(zip(types, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in endpoints:
        described = _describe_endpoint(operation, by_type)
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Argosy admin",
            "version": version("argosy"),
            "description": "Tenants, keys, limits, prices, usage, the audit log, requests explained.",
        },
        "security": [{"bearer": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_endpoint(endpoint: AdminEndpoint, by_type: dict[Any, Any]) -> dict[str, Any]:
    schema = by_type.get(endpoint.response_type, {"type": "object"})
    content = {"schema": schema if endpoint.media_type == JSON_MEDIA_TYPE else {"type": "string"}}
    answers: dict[str, Any] = {
        "200": {"description": "The answer.", "content": {endpoint.media_type: content}}
    }
    for status, description in _ERROR_DESCRIPTIONS.items():
        error = {"schema": by_type[ErrorBody]}
        answers[str(status)] = {"description": description, "content": {JSON_MEDIA_TYPE: error}}
    described = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "description": _describe_access(endpoint),
        "parameters": _describe_parameters(endpoint),
        "responses": answers,
    }
    if endpoint.body_type is not None:
        body = {"schema": by_type[endpoint.body_type]}
        described["requestBody"] = {"required": True, "content": {JSON_MEDIA_TYPE: body}}
    return described


def _describe_access(endpoint: AdminEndpoint) -> str:
    where = " of the whole gateway" if endpoint.scope == "gateway" else ""
    return f"For the role {endpoint.role}{where} and above."


def _describe_parameters(endpoint: AdminEndpoint) -> list[dict[str, Any]]:
    """The id in the path, and what the query may have."""
    (_,), components = msgspec.json.schema_components([endpoint.query_type])
    (query,) = components.values()
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in query["properties"].items()
    ]
    if "{id}" not in endpoint.path:
        return in_query
    text = {"type": "string", "minLength": 1}
    return [{"name": "id", "in": "path", "required": True, "schema": text}, *in_query]
