"""OpenAPI 3.1 document of the replica."""

from __future__ import annotations

import functools

from argosy.protocol import (
    DrainRequest,
    KvEvent,
    LoadResponse,
    OpenApiBuilder,
    RerankRequest,
    RerankResponse,
    SharedErrors,
    StatusResponse,
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
_UNAVAILABLE = {"503": _GENERATION_ERRORS["503"]}
_DRAIN_ERRORS = _UTILITY_ERRORS | {
    "403": "A web page sent the request.",
    "415": "The body is compressed or not declared as `application/json`.",
}


@functools.cache
def render_openapi() -> bytes:
    """Return the document as JSON."""
    builder = OpenApiBuilder([DrainRequest, KvEvent, LoadResponse])
    builder.add_shared_operations(
        SharedErrors(
            generation=_GENERATION_ERRORS,
            utility=_UTILITY_ERRORS,
            listing=_UNAVAILABLE,
            status=_UNAVAILABLE,
            liveness=_UNAVAILABLE,
            operator={},
        )
    )
    builder.add_json("/tokenizer_info", "GET", "tokenizerInfo", dict, _UNAVAILABLE)
    builder.add_json(
        "/v2/rerank", "POST", "rerankV2", RerankResponse, _GENERATION_ERRORS, body=RerankRequest
    )
    builder.add_json("/load", "GET", "load", LoadResponse, _UNAVAILABLE)
    events = {"text/event-stream": builder.schema(KvEvent)}
    builder.add("/kv_events", "GET", builder.describe("followKvEvents", events, _UNAVAILABLE))
    builder.add_json(
        "/drain",
        "POST",
        "drain",
        StatusResponse,
        _DRAIN_ERRORS,
        body=DrainRequest,
        is_body_optional=True,
    )
    undrain_errors = _UNAVAILABLE | {"403": _DRAIN_ERRORS["403"]}
    builder.add_json("/undrain", "POST", "undrain", StatusResponse, undrain_errors)
    description = "The OpenAI API for one model, and endpoints for operators."
    return builder.render("Argosy replica", description, has_keys=False)
