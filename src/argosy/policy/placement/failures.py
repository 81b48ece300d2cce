"""Failed attempts: whether their requests may be tried again.

Attempts that are bounded in another way do not draw on the retry budget. A response that has started must continue
somewhere, limited by the failover timeout and by the number of replicas it may lose without progress. After
backpressure (429, 503) the request waits for capacity, limited by the same time. All other retries draw on the budget,
because retries are what overloads pools. An error response needs budget at once. After the loss of a replica that had
failed before, the next attempt waits for budget or for a healthy replica.
"""

from __future__ import annotations

from typing import Any

from argosy.policy.breaker import AttemptOutcome
from argosy.policy.placement.attempt import AttemptEnding
from argosy.policy.placement.messages import AttemptEnded, RefusalReason, Refuse
from argosy.policy.placement.pool import PlacementPool
from argosy.policy.placement.request import PlacementRequest


def record_failure(
    pool: PlacementPool[Any],
    event: AttemptEnded,
    max_failed_attempts: int,
    now: float,
) -> Refuse | None:
    """Record the failure of a request's last running attempt.

    Args:
        pool: The request's pool.
        event: The end of the attempt: lost or refused.
        max_failed_attempts: Maximum error responses of live replicas, or replicas lost without progress.
        now: Monotonic time.

    Returns:
        Why the request fails; None if it may be tried again.
    """
    request, has_output = event.request, event.output_tokens > 0
    # A replica that refuses to resume a response may only lack that; another one may do it.
    is_resumption = has_output and not event.attempt.is_stream
    request.failed.add(event.attempt.replica.name)
    request.failed_attempts += 1
    if (
        event.outcome is AttemptOutcome.SUCCESS
        and event.ending is AttemptEnding.REFUSED
        and not is_resumption
    ):
        return Refuse(
            request,
            RefusalReason.REFUSED_BY_REPLICA,
            status=event.status,
            detail=event.reason,
        )
    is_exempt = has_output or event.outcome is AttemptOutcome.BACKPRESSURE
    if event.ending is AttemptEnding.LOST:
        request.replica_losses += event.is_sent
        if event.is_too_large and request.replica_losses > 1:
            return Refuse(request, RefusalReason.TOO_LARGE, detail=event.reason)
        request.must_wait_for_budget = (
            not (is_exempt or event.attempt.was_breaker_closed) and event.is_sent
        )
        is_exempt = True
    elif event.outcome is AttemptOutcome.FAILURE:
        request.error_responses += 1
    refusal = _quarantine(pool, request, max_failed_attempts, now, has_output=has_output)
    if refusal is not None:
        return refusal
    is_exhausted = max(request.replica_losses, request.error_responses) >= max_failed_attempts
    if is_exhausted or not (is_exempt or pool.retry_budget.try_acquire(now)):
        return upstream_failed(pool, request, now)
    if not event.can_resume:
        if event.ending is AttemptEnding.LOST:
            return Refuse(request, RefusalReason.INTERRUPTED)
        return upstream_failed(pool, request, now)
    return None


def _quarantine(
    pool: PlacementPool[Any],
    request: PlacementRequest,
    max_failed_attempts: int,
    now: float,
    *,
    has_output: bool,
) -> Refuse | None:
    """Quarantine a request that cost too many replicas. One that was quarantined before may cost only one."""
    if not request.replica_losses:
        return None
    poison_requests, digest = pool.poison_requests, request.compute_digest()
    is_quarantined = poison_requests.is_quarantined(digest, now) and not has_output
    if request.replica_losses < (1 if is_quarantined else max(2, max_failed_attempts)):
        return None
    poison_requests.quarantine(digest, now)
    return Refuse(request, RefusalReason.QUARANTINED, poison_requests.retry_after_s(digest, now))


def upstream_failed(pool: PlacementPool[Any], request: PlacementRequest, now: float) -> Refuse:
    """Return the refusal of a request whose attempts failed, by what is known about the pool."""
    last = request.last_attempt
    was_refused_as_full = (
        last is not None and last.record.outcome == AttemptOutcome.BACKPRESSURE.value
    )
    if was_refused_as_full and pool.is_available():
        return Refuse(request, RefusalReason.REPLICAS_FULL, pool.retry_after_s(now))
    if not request.has_reached_replica:
        return Refuse(request, RefusalReason.NO_REPLICA)
    return Refuse(request, RefusalReason.UPSTREAM_FAILED)
