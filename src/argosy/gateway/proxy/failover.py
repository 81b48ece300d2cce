"""Failover of one request: attempts at one replica after another until the response is complete."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from argosy.gateway.backends import (
    MALFORMED_EVENT_ERRORS,
    BackendAdapter,
    StreamContinuation,
    UpstreamTarget,
    build_nonstreaming_request,
    infer_status,
    is_json_object,
    parse_error_message,
    status_in_body,
)
from argosy.gateway.config import Timeouts
from argosy.gateway.pool import ReplicaEndpoint, RoutingDecision
from argosy.gateway.proxy.attempts import (
    BufferedResponse,
    HedgedRequest,
    ReplicaAttempt,
    ResponseStart,
    UpstreamRefusedError,
)
from argosy.gateway.proxy.dispatcher import (
    RETRY_AFTER_S,
    Dispatcher,
    no_replica_error,
    replicas_full_error,
)
from argosy.gateway.proxy.response_relay import ResponseRelay
from argosy.gateway.proxy.response_writers import ResponseWriter
from argosy.gateway.proxy.upstream_headers import (
    build_request_headers,
    forward_request_notes,
    parse_arithmetic_id,
)
from argosy.gateway.request_context import REFUSED_BY_REPLICA, REQUEST_TOO_LARGE, RequestContext
from argosy.gateway.request_fields import RequestFields
from argosy.gateway.upstream import (
    ResponseTooLargeError,
    StreamMovedError,
    UpstreamError,
    UpstreamResponse,
)
from argosy.http_server import Deadlines, HttpExchange
from argosy.policy import AttemptOutcome, backoff_s, classify_status
from argosy.protocol import ApiError, format_event

HTTP_CREATED = 201
"""Treated as 200, because some web frameworks answer every POST with it."""
MAX_JSON_CONTAINERS = 1 << 21
"""Maximum objects and lists in a buffered response. More take long to parse, and log-probabilities need fewer."""
ARITHMETIC_MISMATCH_STATUS = 409
"""Status of a native replica whose arithmetic identity differs from the one that started the response."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """Configuration that all requests share."""

    timeouts: Timeouts
    max_failed_attempts: int
    """Maximum error responses of live replicas, or replicas lost without progress, before the request fails."""
    clock: Callable[[], float]
    stream_start_deadlines: Deadlines[UpstreamResponse]
    """Deadlines of attempts that wait for the start of a stream."""
    buffered_deadlines: Deadlines[UpstreamResponse]
    """Deadlines of attempts that wait for a buffered response."""
    native_headers: tuple[tuple[bytes, bytes], ...]
    """Headers with the gateway's settings for native replicas."""


class FailoverProxy:
    """Runs the attempts of one request."""

    def __init__(
        self,
        config: ProxyConfig,
        dispatcher: Dispatcher,
        context: RequestContext,
        continuation: StreamContinuation,
        relay: ResponseRelay,
        writer: ResponseWriter,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._context = context
        self._continuation = continuation
        self._relay = relay
        self._writer = writer
        self._must_wait_for_retry_budget = False
        """Whether the next attempt has to wait for the retry budget."""

    async def run(self) -> None:
        """Produce the response. The caller finishes the writer.

        Raises:
            ApiError: The request failed or is quarantined.
        """
        context, poison_requests = self._context, self._context.pool.poison_requests
        if len(poison_requests):
            wait_s = poison_requests.retry_after_s(context.prompt_digest, self._config.clock())
            if wait_s > 0:
                raise _quarantined_error(context, wait_s)
        while not await self._run_attempt():
            pass
        if len(poison_requests):
            poison_requests.clear(context.prompt_digest)

    async def _run_attempt(self) -> bool:
        """Run one attempt, hedged if configured.

        Returns:
            Whether the response is complete.

        Raises:
            ApiError: The request may not be tried again.
        """
        await self._acquire_replica()
        context, relay, continuation = self._context, self._relay, self._continuation
        tokens_before = context.delivered.output_tokens
        hedged_request = HedgedRequest(context, self._config.clock)
        outcome: AttemptOutcome | None = None
        failure: UpstreamError | UpstreamRefusedError | None = None
        try:
            buffered = await self._receive_response(hedged_request)
            outcome = AttemptOutcome.SUCCESS
        except CannotResumeError:
            self._on_cannot_resume(hedged_request.attempt.replica)
            return False
        except (UpstreamError, UpstreamRefusedError) as error:
            if relay.is_ended_early:
                return True
            # The traceback refers to the response and to this frame, a cycle that only the garbage collector frees.
            failure, outcome = error.with_traceback(None), error.outcome
            relay.detach()
            new_tokens = context.delivered.output_tokens - tokens_before
            if new_tokens > 0:
                context.record_progress(new_tokens)
        finally:
            hedged_request.attempt.finish(outcome, "" if failure is None else str(failure))
        if failure is not None:
            if isinstance(failure, StreamMovedError):
                return self._on_stream_moved(hedged_request.attempt.replica)
            replica, model = hedged_request.attempt.replica.name, context.pool.model
            upstream_message = (
                failure.upstream_message if isinstance(failure, UpstreamRefusedError) else ""
            )
            log_fields = {"upstream_message": upstream_message} if upstream_message else {}
            log.warning(
                "attempt_failed", replica=replica, model=model, reason=str(failure), **log_fields
            )
            is_replica_lost = isinstance(failure, UpstreamError)
            if is_replica_lost and self._complete_lost_stream():
                return True
            self._record_failure(hedged_request.attempt, failure)
            if not continuation.can_resume:
                raise (
                    _interrupted_error(context)
                    if is_replica_lost
                    else _upstream_failed_error(context, self._config.clock())
                )
            return False
        if buffered is not None:
            await self._deliver_buffered(buffered, hedged_request.attempt)
        return True

    async def _receive_response(self, hedged_request: HedgedRequest) -> BufferedResponse | None:
        """Send the request to one replica, or to two, and receive the response.

        Returns:
            The buffered response, or None if a stream was forwarded to its end.

        Raises:
            UpstreamError: The replica was lost.
            UpstreamRefusedError: The replica's response is not usable.
            CannotResumeError: The replica cannot resume the response.
        """
        context, relay, continuation = self._context, self._relay, self._continuation
        hedging = context.pool.hedging
        if (
            hedging is None
            or self._has_started
            or not _uses_stream(context.fields, hedged_request.attempt.replica.adapter)
        ):
            start = await self._send_request(hedged_request.attempt)
        else:
            timeout_s = self._config.timeouts.first_token_timeout_s
            start = await hedged_request.run(
                self._send_request, hedging.after_s, timeout_s, self._select_hedge
            )
        attempt = hedged_request.attempt
        if context.exchange.status is None:
            forward_request_notes(context, attempt.replica, attempt.response.headers)
        if isinstance(start, BufferedResponse):
            return start
        await self._writer.start()
        plan = start
        if hedged_request.is_hedged:  # the continuation only supports its latest plan
            plan = continuation.plan_upstream(_target(context, attempt.replica)) or start
        if not context.delivered.output_tokens:
            context.delivered.arithmetic_id = (
                parse_arithmetic_id(attempt.response.headers)
                if attempt.replica.adapter.is_native
                else attempt.replica.arithmetic_id
            )
            context.delivered.is_exact = attempt.replica.is_exact
        relay.attach_upstream(attempt.response, attempt.replica, plan.parser)
        try:
            await attempt.response.end_of_body
        finally:
            relay.exit_fast_path()
        relay.finish_upstream()
        return None

    async def _send_request(self, attempt: ReplicaAttempt) -> ResponseStart:
        """Send the request to one replica and wait for the start of its response.

        Raises:
            UpstreamError: The replica was lost.
            UpstreamRefusedError: The replica's response is not usable.
            CannotResumeError: The replica cannot resume the response.
        """
        context, replica, response = self._context, attempt.replica, attempt.response
        fields, path, adapter = context.fields, context.api.path, replica.adapter
        if replica.name in context.incompatible_replicas or not replica.has_arithmetic(
            context.delivered.arithmetic_id
        ):
            raise CannotResumeError
        uses_stream, target = _uses_stream(fields, adapter), _target(context, replica)
        plan = self._continuation.plan_upstream(target) if uses_stream else None
        if uses_stream and plan is None:
            raise CannotResumeError
        if context.delivered.output_tokens and plan is None:
            self._relay.restart()  # a buffered response starts from the beginning
            attempt.trace.delivered_tokens = 0
        upstream_request = (
            plan.request if plan else build_nonstreaming_request(fields, path, target)
        )
        headers = build_request_headers(
            context,
            replica,
            resumable=uses_stream,
            native_headers=self._config.native_headers,
        )
        request = replica.upstream.build_request(
            b"POST", upstream_request.path, upstream_request.body, headers
        )
        attempt.trace.sent_at = self._config.clock()
        deadlines = (
            self._config.stream_start_deadlines if uses_stream else self._config.buffered_deadlines
        )
        deadlines.add(response)
        try:
            await response.send(replica.upstream, request)
            status = await response.status
            if status == HTTP_CREATED:
                status = 200
            outcome = classify_status(status)
            if outcome is AttemptOutcome.SUCCESS:
                replica.on_response_started(self._config.clock())
            if plan is not None and status == 200:
                return plan
            if status == ARITHMETIC_MISMATCH_STATUS and context.delivered.arithmetic_id:
                raise CannotResumeError
            body = await response.read_body()
        finally:
            deadlines.remove(response)
        if body.count(b"{") + body.count(b"[") > MAX_JSON_CONTAINERS:
            raise UpstreamRefusedError(
                502, f"the response has more than {MAX_JSON_CONTAINERS} objects and lists"
            )
        received_status, status = status, infer_status(status, body, adapter.client_error_markers)
        outcome = classify_status(status)
        if outcome is not AttemptOutcome.SUCCESS or self._has_started:
            raise UpstreamRefusedError(
                status, f"status {received_status}", parse_error_message(body)
            )
        if status == 200 and not is_json_object(body):
            raise UpstreamRefusedError(502, "the response is not a JSON object")
        if status == 200 and not adapter.is_native:
            status = status_in_body(body)
            if classify_status(status) is not AttemptOutcome.SUCCESS:
                raise UpstreamError("the replica ended the response early")
        return BufferedResponse(status, body, response.content_type)

    async def _deliver_buffered(self, buffered: BufferedResponse, attempt: ReplicaAttempt) -> None:
        """Send a buffered response to the client, including an error response that blames the request."""
        context, exchange = self._context, self._context.exchange
        if buffered.status == 200:
            self._relay.record_buffered(
                buffered.body, attempt.response.last_activity_at, attempt.replica.adapter
            )
            context.status = context.final_status
        else:
            message = f"The replica refused the request with status {buffered.status}."
            error = ApiError(buffered.status, REFUSED_BY_REPLICA, message)
            context.record_error(error)
            exchange.error_code = error.code
            if exchange.status is not None:  # the stream has started early
                self._writer.write_events(
                    format_event(_encode_refusal(buffered.body, error, exchange))
                )
                await self._writer.finish()
                return
        await exchange.send_response(buffered.status, buffered.body, buffered.content_type)

    # --- replicas --------------------------------------------------------------------------------

    async def _acquire_replica(self) -> None:
        """Wait for the replica of the next attempt.

        Raises:
            ApiError: No replica was found within `failover_timeout_s`, or the queue rejected the request.
        """
        context = self._context
        if context.failing_since is None:
            await self._dispatcher.acquire_replica(context)
            return
        give_up_at = context.failing_since + self._config.timeouts.failover_timeout_s
        while not await self._try_reacquire():
            now = self._config.clock()
            is_too_late = now + context.pool.retry_after_s(now) > give_up_at
            if is_too_late or not (_has_reached_replica(context) or context.pool.may_recover(now)):
                if context.delivered.output_tokens and context.incompatible_replicas:
                    raise _interrupted_error(context)
                raise _upstream_failed_error(context, now)
            context.failed_replicas.clear()

    async def _try_reacquire(self) -> bool:
        """Try for a short backoff time to get another replica, and return whether one was assigned."""
        context = self._context
        now = self._config.clock()
        timeout_s = backoff_s(context.failed_attempts, random.random())  # noqa: S311 - jitter
        if self._must_wait_for_retry_budget and not (
            context.pool.has_healthy(context.tier, now)
            or context.pool.retry_budget.try_acquire(now)
        ):
            await asyncio.sleep(timeout_s)
            return False
        self._must_wait_for_retry_budget = False
        return await self._dispatcher.reacquire_replica(context, timeout_s)

    def _on_cannot_resume(self, replica: ReplicaEndpoint) -> None:
        """Exclude a replica that cannot give or resume the response. Start over if the client has received nothing yet.

        A replica that is down but may return within its grace period is waited for.

        Raises:
            ApiError: 502 if no replica of the pool can resume it.
        """
        context, now = self._context, self._config.clock()
        if context.delivered.arithmetic_id and self._writer.discard():
            self._relay.restart()  # the client has received nothing, so any arithmetic may answer
            return
        context.incompatible_replicas.add(replica.name)
        context.failing_since = context.failing_since or now
        if not any(
            now < other.health.grace_ends_at
            and other.has_arithmetic(context.delivered.arithmetic_id)
            and other.name not in context.incompatible_replicas
            for other in context.pool.replicas.values()
        ):
            raise _interrupted_error(context)

    @property
    def _has_started(self) -> bool:
        """Whether the client may have received events of the response, or tokens were received for it."""
        return self._writer.has_output or self._context.delivered.output_tokens > 0

    def _on_stream_moved(self, replica: ReplicaEndpoint) -> bool:
        """Let another replica resume a stream that was taken from a draining replica.

        This is not a failure: it counts neither against the request nor against the replica.

        Returns:
            Whether the response was already complete but for its end.
        """
        context = self._context
        if self._complete_lost_stream():
            return True
        log.info("stream_moved", replica=replica.name, model=context.pool.model)
        context.failed_replicas.add(replica.name)
        context.failing_since = context.failing_since or self._config.clock()
        return False

    def _select_hedge(self) -> RoutingDecision | None:
        """Select a second replica that streams and has not failed the request, if capacity can be spared.

        Its arithmetic must be that of the first one, so that the output does not depend on which of them is faster.
        """
        context = self._context
        assert context.decision is not None  # noqa: S101 - set by the dispatcher
        first = context.decision.replica
        unsuitable = {
            replica.name
            for replica in context.pool.replicas.values()
            if not _uses_stream(context.fields, replica.adapter)
            or replica.arithmetic_id != first.arithmetic_id
        }
        excluded = {first.name} | context.failed_replicas | unsuitable
        return self._dispatcher.select_hedge(context, excluded)

    def _record_failure(
        self, attempt: ReplicaAttempt, failure: UpstreamError | UpstreamRefusedError
    ) -> None:
        """Record a failed attempt and decide whether the request may be tried again.

        Attempts that are bounded in another way do not draw on the retry budget. A response that has started must
        continue somewhere, limited by `failover_timeout_s` and by the number of replicas it may lose without progress.
        After backpressure (429, 503) the request waits for capacity, limited by the same time. All other retries draw
        on the budget, because retries are what overloads pools. An error response needs budget at once. After the loss
        of a replica that had failed before, the next attempt waits for budget or for a healthy replica.

        Raises:
            ApiError: The request was tried often enough, is quarantined, or was refused as invalid.
        """
        context, now, replica = self._context, self._config.clock(), attempt.replica
        context.failed_replicas.add(replica.name)
        context.failed_attempts += 1
        context.failing_since = context.failing_since or now
        has_output = context.delivered.output_tokens > 0
        if (
            failure.outcome is AttemptOutcome.SUCCESS
            and isinstance(failure, UpstreamRefusedError)
            and not has_output
        ):
            message = f"The replica refused the request: {str(failure).rstrip('.')}."
            raise ApiError(failure.status, REFUSED_BY_REPLICA, message)
        is_exempt = has_output or failure.outcome is AttemptOutcome.BACKPRESSURE
        if isinstance(failure, UpstreamError):
            context.replica_losses += attempt.response.is_request_sent
            if isinstance(failure, ResponseTooLargeError) and context.replica_losses > 1:
                raise _too_large_error(failure)
            self._must_wait_for_retry_budget = (
                not (is_exempt or attempt.is_breaker_closed) and attempt.response.is_request_sent
            )
            is_exempt = True
        elif failure.outcome is AttemptOutcome.FAILURE:
            context.error_responses += 1
        poison_requests, digest = context.pool.poison_requests, context.prompt_digest
        is_quarantined = poison_requests.is_quarantined(digest, now) and not has_output
        if context.replica_losses >= (
            1 if is_quarantined else max(2, self._config.max_failed_attempts)
        ):
            poison_requests.quarantine(digest, now)
            raise _quarantined_error(context, poison_requests.retry_after_s(digest, now))
        is_exhausted = (
            max(context.replica_losses, context.error_responses) >= self._config.max_failed_attempts
        )
        if is_exhausted or not (is_exempt or context.pool.retry_budget.try_acquire(now)):
            raise _upstream_failed_error(context, now)

    def _complete_lost_stream(self) -> bool:
        """Complete a stream whose replica was lost after its last token.

        Returns whether it was complete but for its end.
        """
        tail = self._relay.build_tail()
        if tail is not None:
            self._relay.write_tail(tail)
        return tail is not None


class CannotResumeError(Exception):
    """The replica cannot resume the response at its current position, or does not enforce the request's constraint."""


def _uses_stream(fields: RequestFields, adapter: BackendAdapter) -> bool:
    """Return whether the replica is sent a streaming request, whose response may be aggregated for the client."""
    return fields.stream or (adapter.is_native and fields.can_aggregate_stream)


def _target(context: RequestContext, replica: ReplicaEndpoint) -> UpstreamTarget:
    """Describe a replica for the body of its request. All attempts of the request have the same priority."""
    adapter = replica.adapter
    priority = context.compute_priority(adapter) if adapter.priority_sign else None
    return UpstreamTarget(adapter, replica.upstream_model, replica.max_model_len or 0, priority)


def _encode_refusal(body: bytes, error: ApiError, exchange: HttpExchange) -> bytes:
    """Return the replica's error on one line for an event; `error` if it has not the shape of the OpenAI API."""
    try:
        fields = msgspec.json.decode(body)
        if isinstance(fields, dict) and isinstance(fields.get("error"), dict):
            return msgspec.json.encode(fields)
    except MALFORMED_EVENT_ERRORS:
        pass
    return error.encode_body(exchange.request_id)


def _interrupted_error(context: RequestContext) -> ApiError:
    reason = (
        "no other replica with the same arithmetic can resume it"
        if context.delivered.is_exact
        else "its results are not exact, so that no other replica can resume it"
    )
    message = f"The replica failed during the response, and {reason}. Send the request again."
    return ApiError(502, "upstream_failed", message)


def _too_large_error(failure: ResponseTooLargeError) -> ApiError:
    message = f"The response is too large: {failure}. Request less output, or stream it."
    return ApiError(413, REQUEST_TOO_LARGE, message)


def _quarantined_error(context: RequestContext, wait_s: float) -> ApiError:
    message = (
        f"Replicas for {context.pool.model!r} failed while they ran this request. "
        f"Change it, or try again in {math.ceil(wait_s)} s."
    )
    return ApiError(502, "upstream_failed", message, retry_after_s=wait_s)


def _has_reached_replica(context: RequestContext) -> bool:
    """Return whether a replica processed the request: an error response, a loss or output.

    Backpressure does not count.
    """
    return bool(
        context.error_responses or context.replica_losses or context.delivered.output_tokens
    )


def _upstream_failed_error(context: RequestContext, now: float) -> ApiError:
    model = context.pool.model
    attempt_trace = context.attempt_trace
    was_refused_as_full = (
        attempt_trace is not None and attempt_trace.outcome == AttemptOutcome.BACKPRESSURE.value
    )
    if was_refused_as_full and context.pool.is_available():
        return replicas_full_error(context.pool, context.pool.retry_after_s(now))
    if not _has_reached_replica(context):
        return no_replica_error(context.pool, now)
    message = f"No replica could answer for {model!r}. Try again shortly."
    return ApiError(502, "upstream_failed", message, retry_after_s=RETRY_AFTER_S)
