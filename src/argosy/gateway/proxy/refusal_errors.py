"""Errors that clients receive for the refusals of placement."""

from __future__ import annotations

import math
import time

from argosy.gateway.pool import Pool
from argosy.gateway.request_context import REFUSED_BY_REPLICA, REQUEST_TOO_LARGE, RequestContext
from argosy.policy.placement import RefusalReason, Refuse
from argosy.protocol import ApiError

RETRY_AFTER_S = 1.0
NO_REPLICA_RETRY_AFTER_S = 10.0
"""Retry-After when no replica is available and none is expected to recover."""

MAX_PROBLEM_CHARS = 300
"""Length of a server's reason in an error."""
MAX_START_RETRY_AFTER_S = 55.0
"""Longest Retry-After for a model that starts. All versions of the SDKs respect it, some none above 60 s."""
MAX_RETRIED_START_S = 3 * MAX_START_RETRY_AFTER_S
"""Time to the end of a start from which SDKs would use up their retries before it."""


def build_refusal_error(
    refusal: Refuse, context: RequestContext, queue_timeout_s: float, now: float
) -> ApiError:
    """Build the error for a refusal of the request.

    Args:
        refusal: The refusal.
        context: The request.
        queue_timeout_s: How long requests may wait.
        now: Monotonic time.
    """
    pool, detail = context.pool, refusal.detail
    match refusal.reason:
        case RefusalReason.QUEUE_TIMEOUT:
            return _overloaded_error(pool, f"no free slot within {queue_timeout_s:g} s")
        case RefusalReason.STARTING:
            return starting_error(pool, context.response_headers)
        case RefusalReason.REFUSED_BY_REPLICA:
            message = f"The replica refused the request: {detail.rstrip('.')}."
            return ApiError(refusal.status, REFUSED_BY_REPLICA, message)
        case RefusalReason.TOO_LARGE:
            remedy = (
                "Request less output, or stream it"
                if context.fields.generates
                else "Send fewer inputs, or set encoding_format to base64"
            )
            message = f"The response is too large: {detail}. {remedy}."
            return ApiError(413, REQUEST_TOO_LARGE, message)
        case RefusalReason.INTERRUPTED | RefusalReason.NO_REPLICA if context.adapter_problem:
            problem = context.adapter_problem[:MAX_PROBLEM_CHARS].rstrip(".")
            message = f"No replica could load the adapter {context.model!r}: {problem}."
            return ApiError(
                503, "adapter_load_failed", message, retry_after_s=NO_REPLICA_RETRY_AFTER_S
            )
        case RefusalReason.INTERRUPTED:
            reason = (
                "no other replica with the same arithmetic can resume it"
                if context.delivered.is_exact
                else "its results are not exact, so that no other replica can resume it"
            )
            message = (
                f"The replica failed during the response, and {reason}. Send the request again."
            )
            return ApiError(502, "upstream_failed", message)
        case RefusalReason.UPSTREAM_FAILED:
            message = f"No replica could answer for {pool.model!r}. Try again shortly."
            return ApiError(502, "upstream_failed", message, retry_after_s=RETRY_AFTER_S)
        case reason:
            return build_arrival_error(reason, refusal.retry_after_s, pool, now)


def build_arrival_error(
    reason: RefusalReason, retry_after_s: float | None, pool: Pool, now: float
) -> ApiError:
    """Build the error for a refusal at the arrival of a request.

    Args:
        reason: Why the request is refused.
        retry_after_s: Time until it may be sent again, if placement knows it.
        pool: Pool that refuses it.
        now: Monotonic time.
    """
    match reason:
        case RefusalReason.REPLICAS_FULL:
            wait_s = max(RETRY_AFTER_S, retry_after_s or 0.0)
            when = f"in {math.ceil(wait_s)} s." if wait_s > RETRY_AFTER_S else "shortly."
            message = f"The replicas for {pool.model!r} are full. Try again {when}"
            return ApiError(429, "overloaded", message, retry_after_s=wait_s)
        case RefusalReason.STARTING:
            return starting_error(pool, [])
        case RefusalReason.NO_REPLICA:
            return no_replica_error(pool, now)
        case RefusalReason.QUARANTINED:
            wait_s = retry_after_s or 0.0
            message = (
                f"Replicas for {pool.model!r} failed while they ran this request. "
                f"Change it, or try again in {math.ceil(wait_s)} s."
            )
            return ApiError(502, "upstream_failed", message, retry_after_s=wait_s)
        case _:  # the queue is full, for this tenant or tier
            return _overloaded_error(pool, reason.value)


def no_replica_error(pool: Pool, now: float) -> ApiError:
    """Build the 503 error for a pool without an available replica."""
    message = f"No replica is available for {pool.model!r}. Try again shortly."
    if pool.is_out_of_service:
        message = f"Operators took all replicas for {pool.model!r} out of service; see `argosy replicas list`."
    if pool.startup is not None and pool.startup.is_failing:
        message = f"The replicas for {pool.model!r} do not start; `argosy status` shows why."
        if pool.startup.problem:
            message = f"The model {pool.model!r} {pool.startup.problem}"
    may_recover = pool.may_recover(now)
    return ApiError(
        503,
        "no_replica",
        message,
        retry_after_s=RETRY_AFTER_S if may_recover else NO_REPLICA_RETRY_AFTER_S,
    )


def starting_error(pool: Pool, response_headers: list[tuple[bytes, bytes]]) -> ApiError:
    """Build the 503 error for a model that is not ready when the client would give up.

    Args:
        pool: The model's pool.
        response_headers: Receives the header that ends the retries of SDKs, if the start takes longer than these.
    """
    startup, wall_now = pool.startup, time.time()
    eta_s = None if startup is None else startup.eta_s(wall_now)
    if eta_s is not None and eta_s > MAX_RETRIED_START_S:
        response_headers.append((b"x-should-retry", b"false"))
    when = "shortly" if eta_s is None else f"in about {math.ceil(eta_s)} s"
    message = f"The model {pool.model!r} starts and is ready {when}. Try again then, or stream the response to wait."
    return ApiError(
        503,
        "model_starting",
        message,
        retry_after_s=min(math.inf if eta_s is None else eta_s, MAX_START_RETRY_AFTER_S),
        details=None if startup is None else startup.describe(wall_now),
    )


def _overloaded_error(pool: Pool, reason: str) -> ApiError:
    message = f"Too many requests for {pool.model!r} ({reason}). Try again shortly."
    return ApiError(429, "overloaded", message, retry_after_s=RETRY_AFTER_S)
