"""A replica's turn at a request: asked until its answer begins, and against another while it is silent (a hedge)."""

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
    """An answer that came in one piece."""

    status: int
    body: bytes
    content_type: bytes
    """Its content type."""


class UpstreamRefusedError(Exception):
    """A replica answered, with what is no answer to the request."""

    def __init__(self, status: int, reason: str, upstream_message: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.upstream_message = upstream_message
        """What it said of that, for those who run it: it may be of our account there."""
        self.outcome = classify_status(status)


ResponseStart = BufferedResponse | UpstreamPlan
"""How an answer begins: it is whole at once, or its stream is there."""


class ReplicaAttempt(msgspec.Struct, frozen=True):
    """One replica's."""

    decision: RoutingDecision
    trace: AttemptTrace
    response: UpstreamResponse
    clock: Callable[[], float]
    is_breaker_closed: bool
    """Its breaker was closed when it got the request."""

    @property
    def replica(self) -> ReplicaEndpoint:
        """Whose it is."""
        return self.decision.replica

    def finish(self, outcome: AttemptOutcome | None, reason: str) -> None:
        """It is over; None: for a reason that says nothing about the replica. Call it once."""
        attempt, tried = self.response, self.trace
        if outcome is not AttemptOutcome.SUCCESS:  # else its answer has come to its end
            attempt.abort("nobody waits for it")
        tried.ended_at, tried.reason = self.clock(), reason
        tried.outcome = "ended" if outcome is None else outcome.value
        if outcome is AttemptOutcome.FAILURE and not attempt.is_request_sent:
            self.replica.on_unreachable(tried.ended_at)
        if tried.first_token_at is None:
            self.replica.on_prefill_done(self.decision.uncached_tokens, tried.chosen_at)
        self.replica.on_request_ended(outcome, tried.ended_at, _parse_retry_after(attempt))


class HedgedRequest:
    """One turn, or two until one of them has begun to answer: then `turn` is that one, and the other has ended."""

    def __init__(self, context: RequestContext, clock: Callable[[], float]) -> None:
        """For the replica that the request was placed on."""
        picked, tried = context.decision, context.attempt_trace
        assert picked is not None  # noqa: S101 - it was placed
        assert tried is not None  # noqa: S101 - it was placed
        self.is_hedged = False
        self._context = context
        self._clock = clock
        self.attempt = self._new_attempt(picked, tried)

    async def run(
        self,
        send_request: Callable[[ReplicaAttempt], Awaitable[ResponseStart]],
        hedge_after_s: float,
        timeout_s: float,
        select_hedge: Callable[[], RoutingDecision | None],
    ) -> ResponseStart:
        """How the answer begins. If it has not after `after_s`, `second` may name one more replica to ask.

        Each has `within_s`. Raises UpstreamError or RefusedError once no turn is left.
        """
        running = {
            asyncio.create_task(_await_start(send_request, self.attempt, timeout_s)): self.attempt
        }
        try:
            done, _ = await asyncio.wait(running, timeout=hedge_after_s)
            picked = None if done else select_hedge()
            if picked is not None:
                hedge = self._start_hedge(picked)
                running[asyncio.create_task(_await_start(send_request, hedge, timeout_s))] = hedge
            while True:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    begun, turn = task.result(), running.pop(task)
                    if not isinstance(begun, Exception):
                        self._set_attempt(turn)
                        return begun
                    if not running:
                        raise begun
                    turn.finish(begun.outcome, str(begun))
                    self._context.failed_replicas.add(turn.replica.name)
                    if isinstance(begun, UpstreamError):
                        self._context.replica_losses += turn.response.is_request_sent
                    self._set_attempt(*running.values())
        finally:
            for task, turn in running.items():
                task.cancel()
                if turn is not self.attempt:
                    turn.finish(None, "no longer needed")

    def _start_hedge(self, picked: RoutingDecision) -> ReplicaAttempt:
        self.is_hedged = True
        tried = self._context.record_attempt(picked, self._clock(), is_hedge=True)
        return self._new_attempt(picked, tried)

    def _new_attempt(self, picked: RoutingDecision, tried: AttemptTrace) -> ReplicaAttempt:
        clock = self._clock
        return ReplicaAttempt(
            picked,
            tried,
            UpstreamResponse(clock),
            clock,
            is_breaker_closed=picked.replica.breaker.is_closed,
        )

    def _set_attempt(self, turn: ReplicaAttempt) -> None:
        self.attempt = turn
        self._context.set_current_attempt(turn.decision, turn.trace)


async def _await_start(
    send_request: Callable[[ReplicaAttempt], Awaitable[ResponseStart]],
    attempt: ReplicaAttempt,
    timeout_s: float,
) -> ResponseStart | UpstreamError | UpstreamRefusedError:
    """Ask, and wait until the answer says something: some servers send a stream's head and comments before."""
    try:
        async with asyncio.timeout(timeout_s):
            begun = await send_request(attempt)
            if not isinstance(begun, BufferedResponse):
                await attempt.response.wait_for_piece(FirstContentDetector().feed)
    except TimeoutError:
        return UpstreamError("too late")
    except (UpstreamError, UpstreamRefusedError) as error:
        return error
    return begun


def _parse_retry_after(attempt: UpstreamResponse) -> float | None:
    """In how many seconds the replica said that it may be asked again: as a number, or a date (RFC 9110, 10.2.3)."""
    told = attempt.headers.get(b"retry-after", b"").decode("latin-1")
    if not told:
        return None
    try:
        seconds = float(told) if told[:1].isdigit() else _parse_http_date(told) - time.time()
    except (ValueError, OverflowError):
        return None
    return max(0.0, seconds)


def _parse_http_date(told: str) -> float:
    """Seconds since 1970. Raises ValueError or OverflowError when it is no date."""
    return parsedate_to_datetime(told).timestamp()
