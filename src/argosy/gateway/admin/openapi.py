"""OpenAPI 3.1 document of the admin API, generated from its endpoints."""

from __future__ import annotations

import functools
from typing import Any

from argosy.gateway.admin.answer_encoding import COLUMNS_MEDIA_TYPE, COLUMNS_SCHEMA, is_page
from argosy.gateway.admin.endpoints import (
    AdminEndpoint,
    AdminEndpoints,
    AdminRequest,
    AdminScope,
)
from argosy.protocol import JSON_MEDIA_TYPE, OpenApiBuilder, path_parameter, query_parameters

_ERROR_DESCRIPTIONS = {
    "400": "A parameter is not valid. `param` names it.",
    "401": "The key is missing or not accepted.",
    "403": "The key's role or the web page's origin does not permit this call.",
    "404": "Resource not found.",
    "405": "The path does not support this method.",
    "408": "The body did not arrive in time.",
    "409": "The request conflicts with an existing resource.",
    "413": "The body is too large.",
    "415": "The body is compressed or not declared as `application/json`.",
    "429": "Too many wrong keys, or too many waiting calls of the organisation.",
    "500": "Internal error. The gateway's log has it under the request id.",
    "503": "The store or the token issuer's keys are not available at the moment.",
}


def add_openapi_endpoint(endpoints: AdminEndpoints, path: str) -> AdminEndpoints:
    """Add the endpoint that returns the OpenAPI document of all endpoints, including itself. Returns `endpoints`."""

    @functools.cache
    def encode_document() -> bytes:
        return _render_document(endpoints)

    def get_openapi_document(scope: AdminScope, request: AdminRequest) -> bytes:  # noqa: ARG001 - the document is the same for all
        """Get this OpenAPI document."""
        return encode_document()

    endpoints.register("GET", path, "user", is_nonblocking=True)(get_openapi_document)
    return endpoints


def described_types(endpoints: AdminEndpoints) -> list[Any]:
    """Return the types of the bodies that endpoints accept and return."""
    response_types = [
        endpoint.response_type
        for endpoint in endpoints
        if endpoint.media_type == JSON_MEDIA_TYPE and endpoint.response_type is not bytes
    ]
    body_types = [endpoint.body_type for endpoint in endpoints if endpoint.body_type is not None]
    return [*response_types, *body_types]


def add_operations(builder: OpenApiBuilder, endpoints: AdminEndpoints) -> None:
    """Add the endpoints to a document whose builder knows the `described_types`."""
    for endpoint in endpoints:
        builder.add(endpoint.path, endpoint.method, _describe_endpoint(builder, endpoint))


def _render_document(endpoints: AdminEndpoints) -> bytes:
    builder = OpenApiBuilder(described_types(endpoints), has_shared_operations=False)
    add_operations(builder, endpoints)
    description = (
        "Tenants, keys, limits, prices, usage, the audit log and explanations of requests."
    )
    return builder.render("Argosy admin API", description, has_keys=True)


def _describe_endpoint(builder: OpenApiBuilder, endpoint: AdminEndpoint) -> dict[str, Any]:
    is_json = endpoint.media_type == JSON_MEDIA_TYPE
    schema = builder.schema(endpoint.response_type) if is_json else {"type": "string"}
    content = {endpoint.media_type: schema}
    if is_page(endpoint.response_type):
        content[COLUMNS_MEDIA_TYPE] = COLUMNS_SCHEMA
    operation = builder.describe(
        endpoint.name,
        content,
        _ERROR_DESCRIPTIONS,
        body=endpoint.body_type,
        parameters=_describe_parameters(endpoint),
    )
    return operation | {
        "summary": endpoint.summary,
        "description": _describe_access(endpoint),
    }


def _describe_access(endpoint: AdminEndpoint) -> str:
    scope = " for the whole gateway" if endpoint.scope == "gateway" else ""
    return f"Requires the role {endpoint.role} or higher{scope}."


def _describe_parameters(endpoint: AdminEndpoint) -> list[dict[str, Any]]:
    """Describe the id in the path and the query parameters."""
    parameters = query_parameters(endpoint.query_type)
    return [path_parameter("id"), *parameters] if "{id}" in endpoint.path else parameters
