"""OpenAPI 3.1 document of the admin API, generated from its endpoints."""

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
    400: "A parameter is not valid. `param` names it.",
    401: "The key is missing or not accepted.",
    403: "The key's role or the web page's origin does not permit this call.",
    404: "Resource not found.",
    405: "The path does not support this method.",
    408: "The body did not arrive in time.",
    409: "The request conflicts with an existing resource.",
    413: "The body is too large.",
    415: "The body is compressed or not declared as `application/json`.",
    429: "Too many wrong keys, or too many waiting calls of the organisation.",
    500: "Internal error. The gateway's log has it under the request id.",
    503: "The store or the token issuer's keys are not available at the moment.",
}
_REF_TEMPLATE = "#/components/schemas/{name}"


def add_openapi_endpoint(endpoints: AdminEndpoints, path: str) -> AdminEndpoints:
    """Add the endpoint that returns the OpenAPI document of all endpoints, including itself. Returns `endpoints`."""

    @functools.cache
    def encode_document() -> bytes:
        return msgspec.json.encode(_build_document(endpoints))

    def get_openapi_document(scope: AdminScope, request: AdminRequest) -> bytes:  # noqa: ARG001 - the document is the same for all
        """Get this OpenAPI document."""
        return encode_document()

    endpoints.register("GET", path, "user", is_nonblocking=True)(get_openapi_document)
    return endpoints


def _build_document(endpoints: AdminEndpoints) -> dict[str, Any]:
    json_endpoints = [endpoint for endpoint in endpoints if endpoint.media_type == JSON_MEDIA_TYPE]
    response_types = [
        endpoint.response_type for endpoint in json_endpoints if endpoint.response_type is not bytes
    ]
    body_types = [endpoint.body_type for endpoint in endpoints if endpoint.body_type is not None]
    types = [*response_types, *body_types, ErrorBody]
    refs, schemas = msgspec.json.schema_components(types, ref_template=_REF_TEMPLATE)
    by_type = dict(zip(types, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        description = _describe_endpoint(endpoint, by_type)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = description
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Argosy admin API",
            "version": version("argosy"),
            "description": "Tenants, keys, limits, prices, usage, the audit log and explanations of requests.",
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
    responses: dict[str, Any] = {
        "200": {"description": "Success.", "content": {endpoint.media_type: content}}
    }
    for status, description in _ERROR_DESCRIPTIONS.items():
        error = {"schema": by_type[ErrorBody]}
        responses[str(status)] = {"description": description, "content": {JSON_MEDIA_TYPE: error}}
    operation = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "description": _describe_access(endpoint),
        "parameters": _describe_parameters(endpoint),
        "responses": responses,
    }
    if endpoint.body_type is not None:
        body = {"schema": by_type[endpoint.body_type]}
        operation["requestBody"] = {"required": True, "content": {JSON_MEDIA_TYPE: body}}
    return operation


def _describe_access(endpoint: AdminEndpoint) -> str:
    scope = " for the whole gateway" if endpoint.scope == "gateway" else ""
    return f"Requires the role {endpoint.role} or higher{scope}."


def _describe_parameters(endpoint: AdminEndpoint) -> list[dict[str, Any]]:
    """Describe the id in the path and the query parameters."""
    (_,), components = msgspec.json.schema_components([endpoint.query_type])
    (query,) = components.values()
    query_parameters = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in query["properties"].items()
    ]
    if "{id}" not in endpoint.path:
        return query_parameters
    id_schema = {"type": "string", "minLength": 1}
    return [{"name": "id", "in": "path", "required": True, "schema": id_schema}, *query_parameters]
