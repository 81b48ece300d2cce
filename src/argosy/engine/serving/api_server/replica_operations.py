"""Descriptions of a replica's routes for its OpenAPI document."""

from __future__ import annotations

from argosy.protocol import (
    EVENTS_MEDIA_TYPE,
    DrainRequest,
    KvEvent,
    LoadResponse,
    Operation,
    RerankRequest,
    RerankResponse,
    SharedErrors,
    StatusResponse,
    json_operation,
    shared_operations,
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


OPERATIONS = shared_operations(
    SharedErrors(
        generation=_GENERATION_ERRORS,
        utility=_UTILITY_ERRORS,
        listing=_UNAVAILABLE,
        status=_UNAVAILABLE,
        liveness=_UNAVAILABLE,
        operator={},
    )
) | {
    "/tokenizer_info": json_operation("tokenizerInfo", {"type": "object"}, _UNAVAILABLE),
    "/v2/rerank": json_operation("rerankV2", RerankResponse, _GENERATION_ERRORS, RerankRequest),
    "/load": json_operation("load", LoadResponse, _UNAVAILABLE),
    "/kv_events": Operation("followKvEvents", {EVENTS_MEDIA_TYPE: KvEvent}, _UNAVAILABLE),
    "/drain": json_operation(
        "drain", StatusResponse, _DRAIN_ERRORS, DrainRequest, is_body_optional=True
    ),
    "/undrain": json_operation(
        "undrain", StatusResponse, _UNAVAILABLE | {"403": _DRAIN_ERRORS["403"]}
    ),
}
"""Operations by path."""
