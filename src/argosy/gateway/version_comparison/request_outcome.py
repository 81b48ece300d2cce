"""Outcome of a request for the comparison of versions, from what the gateway knows about it anyway."""

from __future__ import annotations

from collections.abc import Collection

from argosy.gateway.request_context import RequestContext
from argosy.policy import AttemptOutcome
from argosy.policy.placement import AttemptRecord
from argosy.policy.rollout import Arm, OutcomeStatus, RequestOutcome

HTTP_BAD_GATEWAY = 502
_FAILURE = AttemptOutcome.FAILURE.value
_CONTENT_FILTER = "content_filter"
"""Finish reason of a response that the model or its server refused to complete."""


def build_outcome(
    context: RequestContext,
    arm: Arm,
    key: tuple[str, str],
    candidate_replicas: Collection[str] | None,
    now: float,
    *,
    is_running: bool = False,
) -> RequestOutcome | None:
    """Build the outcome of a request at the version that it is assigned to.

    Args:
        context: The request.
        arm: Version that it is assigned to.
        key: What was assigned as one.
        candidate_replicas: Names of the candidate's replicas. None if both versions are served by the same ones.
        now: Monotonic time.
        is_running: Whether the request has reached the scoring age and goes on.

    Returns:
        The outcome. None if the version has not processed the request: it was never sent there, or was sent elsewhere
        because the replicas were full or drained.
    """
    if context.adapter_problem and context.status == "failed":
        return RequestOutcome(arm=arm, key=key, status=OutcomeStatus.FAILED, age_s=0.0)
    own: list[AttemptRecord] = []
    others: list[AttemptRecord] = []
    for attempt in context.trace.attempts:
        if attempt.sent_at is not None:
            is_own = candidate_replicas is None or (
                (attempt.replica in candidate_replicas) is (arm is Arm.CANDIDATE)
            )
            (own if is_own else others).append(attempt)
    if not own:
        return None
    status = _find_status(context, own, others, is_running=is_running)
    if status is None:
        return None
    sent_at, ended_at = own[0].sent_at or now, own[-1].ended_at
    first_token_at = _find_first_token(context, own)
    return RequestOutcome(
        arm=arm,
        key=key,
        status=status,
        age_s=max(0.0, (now if is_running or ended_at is None else ended_at) - sent_at),
        ttft_s=None if first_token_at is None else max(0.0, first_token_at - sent_at),
        output_tokens=context.delivered.output_tokens,
        uncached_tokens=own[0].uncached_tokens,
        in_flight=own[0].in_flight,
    )


def _find_status(
    context: RequestContext,
    own: list[AttemptRecord],
    others: list[AttemptRecord],
    *,
    is_running: bool,
) -> OutcomeStatus | None:
    if any(attempt.outcome == _FAILURE for attempt in own):
        return OutcomeStatus.FAILED
    if others:  # the other version has taken the request over
        has_moved = any(attempt.delivered_tokens for attempt in others)
        return OutcomeStatus.FAILED if has_moved else None
    if is_running:
        return OutcomeStatus.RUNNING
    if context.status == "cancelled" or context.end_reason is not None:
        return (
            OutcomeStatus.CANCELLED
        )  # by the client, a limit or a deadline: the length says nothing
    if context.is_client_error or _CONTENT_FILTER in context.delivered.finish_reasons.values():
        return OutcomeStatus.REFUSED
    if context.status in {"completed", "stopped"}:
        return OutcomeStatus.COMPLETED
    if context.error is None or context.error.status == HTTP_BAD_GATEWAY:
        return OutcomeStatus.FAILED
    return OutcomeStatus.CANCELLED  # the version was full, or the gateway is shutting down


def _find_first_token(context: RequestContext, own: list[AttemptRecord]) -> float | None:
    """Return when the first token arrived; None for generated responses in one piece, whose first token is unknown."""
    placement = context.placement
    last = None if placement is None else placement.last_attempt
    if context.api.generates and last is not None and not last.is_stream:
        return None
    return next((each.first_token_at for each in own if each.first_token_at is not None), None)
