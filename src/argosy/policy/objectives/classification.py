"""Which ended requests miss an objective, by error code and by latency. The status of the response does not suffice.

Both an overloaded fleet and a tenant at its own limit answer 429. Only the first burns the error budget.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from argosy.policy.billing import RequestStatus
from argosy.policy.objectives.objective import Objective

CodeClass = Literal["miss", "deadline", "excluded"]
"""Class of an error.

- `miss`: the fleet failed the request.
- `deadline`: the fleet failed it, unless the client set the deadline.
- `excluded`: the caller or its own limit caused the error, or no endpoint for models has it.
"""
SLOW = "slow"
"""Cause of a miss by latency."""

_MISSES = (
    *("overloaded", "no_replica", "upstream_failed", "engine_error", "internal_error"),
    *("engine_unavailable", "adapter_load_failed", "limits_unavailable", "ledger_full"),
    *("moderation_unavailable", "signing_keys_missing", "draining"),
)
_EXCLUDED = (
    # what the request asks for or contains
    *("bad_http", "invalid_json", "missing_required_parameter", "invalid_type", "invalid_value"),
    *("unknown_parameter", "unsupported_parameter", "invalid_schema", "unsupported_schema"),
    *("invalid_grammar", "grammar_dead_end", "grammar_failed", "invalid_adapter"),
    "context_length_exceeded",
    *("unsupported_task", "invalid_prompt_variables", "content_refused"),
    *("content_not_filterable", "no_chat_template", "chat_template_error"),
    *("chat_template_limit_exceeded", "invalid_idempotency_key", "previous_response_not_found"),
    *("unsupported_thread", "adapters_not_supported", "prompt_not_found", "model_not_found"),
    *("idempotency_key_in_use", "idempotency_key_reused", "request_too_large", "request_timeout"),
    *("unsupported_encoding", "unsupported_media_type", "refused_by_replica", "not_found"),
    *("method_not_allowed", "not_implemented", "no_store", "host_not_allowed"),
    # who sends it
    *("missing_api_key", "invalid_api_key", "expired_api_key", "invalid_token", "no_keys_yet"),
    *("project_archived", "session_ended", "sign_in_failed", "user_disabled"),
    *("insufficient_role", "model_not_allowed", "address_not_allowed", "origin_not_allowed"),
    *("insecure_connection", "no_organisation", "unknown_organisation", "no_project"),
    *("unknown_project", "too_many_failures"),
    # limits of the tenant or its address, and what an operator has declared: routes that refuse, and scaling to zero
    *("rate_limit_exceeded", "insufficient_quota", "storage_quota_exceeded", "too_many_streams"),
    *("too_many_connections", "refused_by_route", "model_starting"),
    # the client's own end of the request
    *("client_closed_request", "cancelled"),
    # other endpoints: administration, and messages between processes of the fleet
    *("unknown_setting", "replica_not_found", "conflict", "other_fleet", "stale_version"),
    *("other_base_model", "other_model", "query_timeout", "issuer_unavailable"),
    *("store_unavailable", "no_blob_store", "storage_full"),
    # files and batches
    *("invalid_form", "invalid_upload", "file_in_use", "range_not_satisfiable"),
    *("batch_not_cancellable", "too_many_batches"),
)
CODE_CLASSES: dict[str, CodeClass] = {
    **dict.fromkeys(_MISSES, "miss"),
    **dict.fromkeys(("timeout", "deadline_exceeded"), "deadline"),
    **dict.fromkeys(_EXCLUDED, "excluded"),
}
"""Class of each error code. A code that is missing here counts as a miss."""
UNKNOWN_FAILURE = "failed"
"""Cause of a miss without an error code, such as a stream that broke."""
MISS_CAUSES = (*_MISSES, "timeout", "deadline_exceeded", UNKNOWN_FAILURE)
"""Causes of misses of availability."""


class EndedRequest(msgspec.Struct, frozen=True, gc=False):
    """End of a request, as far as objectives depend on it."""

    status: RequestStatus
    code: str
    """Error code; empty without an error."""
    has_own_deadline: bool
    """Whether the client set the deadline by which the request had to end."""
    is_stream: bool
    first_token_s: float | None
    """Time from arrival to the first token; None if none was delivered."""
    duration_s: float
    """Time from arrival to the end."""


def judge_request(objective: Objective, request: EndedRequest) -> str | None:
    """Return the cause if a request misses an objective, an empty text if it meets it, and None if it does not count.

    A request without an answer counts for latency only if it has waited longer than a good one may. So a slow fleet
    does not look better when its clients leave. No request counts for `itl`, which is about tokens.
    """
    if objective.sli == "availability":
        return _judge_availability(request)
    if objective.sli == "itl" or (objective.sli == "ttft" and not request.is_stream):
        return None
    limit_s = objective.below_s or 0.0
    is_answered = request.status in {"completed", "stopped"} and not request.code
    measured_s: float | None = request.duration_s if is_answered else None
    if objective.sli == "ttft":
        measured_s = request.first_token_s
    if measured_s is None:
        return SLOW if request.status != "refused" and request.duration_s > limit_s else None
    return SLOW if measured_s > limit_s else ""


def _judge_availability(request: EndedRequest) -> str | None:
    if request.code:
        code_class = CODE_CLASSES.get(request.code, "miss")
        is_excluded = code_class == "excluded" or (
            code_class == "deadline" and request.has_own_deadline
        )
        return None if is_excluded else request.code
    match request.status:
        case "failed":
            return UNKNOWN_FAILURE
        case "refused":
            return None
        case "cancelled" if request.first_token_s is None:
            return None
    return ""
