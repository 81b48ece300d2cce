"""Attempts at replicas: sending a request until its response starts, with an optional hedge."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime

import msgspec

from argosy.gateway.backends import FirstContentDetector, UpstreamPlan
from argosy.gateway.pool import ReplicaEndpoint, RoutingDecision
from argosy.gateway.request_context import RequestContext
from argosy.gateway.request_trace import AttemptTrace
from argosy.gateway.upstream import UpstreamError, UpstreamResponse
from argosy.policy import AttemptOutcome, classify_status


class BufferedResponse(msgspec.Struct, frozen=True):
    """A response that was received in one piece."""

    status: int
    body: bytes
    content_type: bytes


class UpstreamRefusedError(Exception):
    """A replica answered, but not with a usable response to the request."""

    def __init__(self, status: int, reason: str, upstream_message: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.upstream_message = upstream_message
        """The replica's error message, for operators. It may be about the fleet's account at a hosted API."""
        self.outcome = classify_status(status)


ResponseStart = BufferedResponse | UpstreamPlan
"""Start of a response: complete at once, or a stream that the plan's parser reads."""


class ReplicaAttempt(msgspec.Struct, frozen=True):
    """An attempt at one replica."""

    decision: RoutingDecision
    trace: AttemptTrace
    response: UpstreamResponse
    clock: Callable[[], float]
    is_breaker_closed: bool
    """Whether the replica's circuit breaker was closed when the attempt started."""

    @property
    def replica(self) -> ReplicaEndpoint:
        """The replica of the attempt."""
        return self.decision.replica

    def finish(self, outcome: AttemptOutcome | None, reason: str) -> None:
        """End the attempt, and update its trace and the replica's statistics. Call it once.

        Args:
            outcome: What the attempt says about the replica. None if nothing.
            reason: Error text for the trace.
        """
        response, trace = self.response, self.trace
        if outcome is not AttemptOutcome.SUCCESS:  # a success has ended by itself
            response.abort("attempt ended")
        trace.ended_at, trace.reason = self.clock(), reason
        trace.outcome = "ended" if outcome is None else outcome.value
        if outcome is AttemptOutcome.FAILURE and not response.is_request_sent:
            self.replica.health.on_unreachable(trace.ended_at)
        if trace.first_token_at is None:
            self.replica.on_prefill_done(self.decision.uncached_tokens, trace.chosen_at)
        self.replica.on_request_ended(outcome, trace.ended_at, _parse_retry_after(response), reason)


class HedgedRequest:
    """An attempt, and a second one at another replica if the first is silent.

    The first attempt that starts to answer wins. It becomes `attempt`, and the other one is cancelled.
    """

    def __init__(self, context: RequestContext, clock: Callable[[], float]) -> None:
        """Create the first attempt, at the replica that was selected for the request."""
        decision, trace = context.decision, context.attempt_trace
        assert decision is not None  # noqa: S101 - set by the dispatcher
        assert trace is not None  # noqa: S101 - set by the dispatcher
        self.is_hedged = False
        self._context = context
        self._clock = clock
        self.attempt = self._new_attempt(decision, trace)

    async def run(
        self,
        send_request: Callable[[ReplicaAttempt], Awaitable[ResponseStart]],
        hedge_after_s: float,
        timeout_s: float,
        select_hedge: Callable[[], RoutingDecision | None],
    ) -> ResponseStart:
        """Run the attempts until one of them starts to answer.

        Args:
            send_request: Sends one attempt's request.
            hedge_after_s: Silence before a hedge.
            timeout_s: Limit for the start of each response.
            select_hedge: Selects the second replica, or none.

        Raises:
            UpstreamError: The last attempt failed.
            UpstreamRefusedError: The last attempt was refused.
        """
        running = {
            asyncio.create_task(_await_start(send_request, self.attempt, timeout_s)): self.attempt
        }
        try:
            done, _ = await asyncio.wait(running, timeout=hedge_after_s)
            decision = None if done else select_hedge()
            if decision is not None:
                hedge = self._start_hedge(decision)
                running[asyncio.create_task(_await_start(send_request, hedge, timeout_s))] = hedge
            while True:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    start, attempt = task.result(), running.pop(task)
                    if not isinstance(start, Exception):
                        self._set_attempt(attempt)
                        return start
                    if not running:
                        raise start
                    attempt.finish(start.outcome, str(start))
                    self._context.failed_replicas.add(attempt.replica.name)
                    if isinstance(start, UpstreamError):
                        self._context.replica_losses += attempt.response.is_request_sent
                    self._set_attempt(*running.values())
        finally:
            for task, attempt in running.items():
                task.cancel()
                if attempt is not self.attempt:
                    attempt.finish(None, "no longer needed")

    def _start_hedge(self, decision: RoutingDecision) -> ReplicaAttempt:
        self.is_hedged = True
        trace = self._context.record_attempt(decision, self._clock(), is_hedge=True)
        return self._new_attempt(decision, trace)

    def _new_attempt(self, decision: RoutingDecision, trace: AttemptTrace) -> ReplicaAttempt:
        clock = self._clock
        return ReplicaAttempt(
            decision,
            trace,
            UpstreamResponse(clock),
            clock,
            is_breaker_closed=not decision.replica.health.is_ejected,
        )

    def _set_attempt(self, attempt: ReplicaAttempt) -> None:
        self.attempt = attempt
        self._context.set_current_attempt(attempt.decision, attempt.trace)


async def _await_start(
    send_request: Callable[[ReplicaAttempt], Awaitable[ResponseStart]],
    attempt: ReplicaAttempt,
    timeout_s: float,
) -> ResponseStart | UpstreamError | UpstreamRefusedError:
    """Send the request and wait for the first content of the response.

    Some servers send a stream's headers and comments earlier, which does not count as a start.

    Returns:
        The start of the response, or the error.
    """
    try:
        async with asyncio.timeout(timeout_s):
            start = await send_request(attempt)
            if not isinstance(start, BufferedResponse):
                await attempt.response.wait_for_piece(FirstContentDetector().feed)
    except TimeoutError:
        return UpstreamError(f"no response within {timeout_s:g} s")
    except (UpstreamError, UpstreamRefusedError) as error:
        return error
    return start


def _parse_retry_after(response: UpstreamResponse) -> float | None:
    """Return the seconds of the replica's `Retry-After` header, a number or a date (RFC 9110, 10.2.3)."""
    value = response.headers.get(b"retry-after", b"").decode("latin-1")
    if not value:
        return None
    try:
        seconds = float(value) if value[:1].isdigit() else _parse_http_date(value) - time.time()
    except (ValueError, OverflowError):
        return None
    return max(0.0, seconds)


def _parse_http_date(value: str) -> float:
    """Parse an HTTP date into seconds since the epoch.

    Raises:
        ValueError: The value is not a date.
        OverflowError: The date is out of range.
    """
    return parsedate_to_datetime(value).timestamp()
