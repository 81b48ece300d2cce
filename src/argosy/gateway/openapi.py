"""OpenAPI 3.1 document of the gateway: the APIs for models, the endpoints for operators, and the admin API."""

from __future__ import annotations

import functools

from argosy.gateway.admin import ENDPOINTS, add_operations, described_types
from argosy.gateway.dialects import DIALECT_BODIES, DIALECT_TYPES, add_dialect_operations
from argosy.protocol import OpenApiBuilder, SharedErrors, path_parameter

_ACCESS_ERRORS = {
    "401": "The key is missing or not accepted.",
    "403": "The key, the client's address or the web page's origin does not permit the request.",
    "429": "A limit is reached, or too many wrong keys were sent. Retry after `Retry-After` seconds.",
    "503": "No replica, or not the keys of the token issuer, are available. Retry after `Retry-After` seconds.",
}
_UTILITY_ERRORS = _ACCESS_ERRORS | {
    "400": "The request is invalid. `param` names the parameter to change.",
    "404": "The model does not exist.",
    "408": "The request timed out before its first token or before its body was complete.",
    "413": "The body is too large, or the request can never fit a limit.",
    "415": "Compressed bodies are not supported.",
}
_GENERATION_ERRORS = _UTILITY_ERRORS | {
    "409": "The first request with the idempotency key is still running.",
    "422": "The idempotency key was used with another request.",
    "499": "The request was cancelled.",
    "502": "All attempts at replicas failed.",
    "504": "The deadline of the request passed before the response began.",
}


@functools.cache
def render_openapi() -> bytes:
    """Return the document as JSON."""
    types = [*described_types(ENDPOINTS), *DIALECT_TYPES]
    builder = OpenApiBuilder(types, lenient_bodies=DIALECT_BODIES)
    builder.add_shared_operations(
        SharedErrors(
            generation=_GENERATION_ERRORS,
            utility=_UTILITY_ERRORS,
            listing=_ACCESS_ERRORS,
            status={"503": "A model has no available replica."},
            liveness={},
            operator=_ACCESS_ERRORS,
        )
    )
    metrics = builder.describe(
        "replicaMetrics",
        {"text/plain": {"type": "string"}},
        _ACCESS_ERRORS | {"404": "No replica has this name."},
        parameters=[path_parameter("name")],
    )
    builder.add("/replicas/{name}/metrics", "GET", metrics)
    model = {"name": "model", "in": "query", "required": False, "schema": {"type": "string"}}
    builder.add_json(
        "/tokenizer_info", "GET", "tokenizerInfo", dict, _UTILITY_ERRORS, parameters=[model]
    )
    add_dialect_operations(
        builder, generation=_GENERATION_ERRORS, utility=_UTILITY_ERRORS, listing=_ACCESS_ERRORS
    )
    add_operations(builder, ENDPOINTS)
    description = (
        "The APIs of OpenAI, Anthropic and Ollama for all models, and those for operators."
    )
    return builder.render("Argosy gateway", description, has_keys=True)
