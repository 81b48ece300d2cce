"""The OpenAPI 3.1 document of the admin API, made from its operations."""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

import msgspec

from argosy.gateway.admin.endpoints import JSON, Call, Desk, Operation, Operations
from argosy.protocol import ErrorBody

_ERRORS = {
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
_TEMPLATE = "#/components/schemas/{name}"


def add_document(operations: Operations, path: str) -> Operations:
    """Add the operation that gives the document of all of them, itself included."""

    @functools.cache
    def written() -> bytes:
        return msgspec.json.encode(_document(operations))

    def get_openapi_document(desk: Desk, call: Call) -> bytes:  # noqa: ARG001 - it needs neither
        """This document."""
        return written()

    operations.add("GET", path, "caller", quick=True)(get_openapi_document)
    return operations


def _document(operations: Operations) -> dict[str, Any]:
    told = [operation for operation in operations if operation.media_type == JSON]
    answers = [operation.answer for operation in told if operation.answer is not bytes]
    bodies = [operation.body for operation in operations if operation.body is not None]
    types = [*answers, *bodies, ErrorBody]
    refs, schemas = msgspec.json.schema_components(types, ref_template=_TEMPLATE)
    by_type = dict(zip(types, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        described = _described(operation, by_type)
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


def _described(operation: Operation, by_type: dict[Any, Any]) -> dict[str, Any]:
    schema = by_type.get(operation.answer, {"type": "object"})
    content = {"schema": schema if operation.media_type == JSON else {"type": "string"}}
    answers: dict[str, Any] = {
        "200": {"description": "The answer.", "content": {operation.media_type: content}}
    }
    for status, description in _ERRORS.items():
        error = {"schema": by_type[ErrorBody]}
        answers[str(status)] = {"description": description, "content": {JSON: error}}
    described = {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": _for_whom(operation),
        "parameters": _parameters(operation),
        "responses": answers,
    }
    if operation.body is not None:
        body = {"schema": by_type[operation.body]}
        described["requestBody"] = {"required": True, "content": {JSON: body}}
    return described


def _for_whom(operation: Operation) -> str:
    where = " of the whole gateway" if operation.scope == "gateway" else ""
    return f"For the role {operation.role}{where} and above."


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    """The id in the path, and what the query may have."""
    (_,), components = msgspec.json.schema_components([operation.query])
    (query,) = components.values()
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in query["properties"].items()
    ]
    if "{id}" not in operation.path:
        return in_query
    text = {"type": "string", "minLength": 1}
    return [{"name": "id", "in": "path", "required": True, "schema": text}, *in_query]
