"""Proxy of one request: performs what placement decides about it, until its response is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import structlog

from argosy.deployment import Timeouts
from argosy.gateway.backends import (
    MALFORMED_EVENT_ERRORS,
    FirstContentDetector,
    StreamContinuation,
    UpstreamPlan,
    UpstreamTarget,
    build_nonstreaming_body,
)
from argosy.gateway.pool import Pool, ReplicaEndpoint
from argosy.gateway.proxy.adapter_loading import (
    AdapterLoad,
    AdapterUnavailableError,
    check_adapter,
    load_adapter,
)
from argosy.gateway.proxy.constraint_check import check_queued_parameters
from argosy.gateway.proxy.placement_driver import PlacementDriver
from argosy.gateway.proxy.refusal_errors import build_refusal_error
from argosy.gateway.proxy.response_relay import ResponseRelay
from argosy.gateway.proxy.response_writers import ResponseWriter
from argosy.gateway.proxy.upstream_call import (
    CALL_ERRORS,
    BufferedResponse,
    CallError,
    ResponseStart,
    UnsuitableReplicaError,
    UpstreamCall,
    check_buffered_response,
)
from argosy.gateway.proxy.upstream_headers import (
    encode_request_headers,
    forward_request_notes,
    parse_arithmetic_id,
)
from argosy.gateway.request_context import REFUSED_BY_REPLICA, EndReason, RequestContext
from argosy.gateway.upstream import (
    ResponseTooLargeError,
    StreamPausedError,
    UpstreamError,
    UpstreamResponse,
)
from argosy.http_server import Deadlines, HttpExchange
from argosy.policy import BATCH_TIER, AttemptOutcome, classify_status
from argosy.policy.placement import (
    Attempt,
    AttemptAnswered,
    AttemptEnded,
    AttemptEnding,
    AttemptMode,
    Move,
    Pause,
    RefusalReason,
    Refuse,
    RequestState,
)
from argosy.protocol import ApiError, format_event
from argosy.store import Adapter

HTTP_CREATED = 201
"""Treated as 200, because some web frameworks answer every POST with it."""
ARITHMETIC_MISMATCH_STATUS = 409
"""Status of a native replica whose arithmetic identity differs from the one that started the response."""

FALLBACK_REASONS = frozenset(
    {
        RefusalReason.NO_REPLICA,
        RefusalReason.STARTING,
        RefusalReason.REPLICAS_FULL,
        RefusalReason.QUEUE_TIMEOUT,
        RefusalReason.UPSTREAM_FAILED,
        RefusalReason.INTERRUPTED,
    }
)
"""Reasons that concern the replicas. The others concern the request or the share of its tenant."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """Configuration that all requests share."""

    timeouts: Timeouts
    queue_timeout_s: float
    clock: Callable[[], float]
    stream_start_deadlines: Deadlines[UpstreamResponse]
    """Deadlines of attempts that wait for the start of a stream."""
    buffered_deadlines: Deadlines[UpstreamResponse]
    """Deadlines of attempts that wait for a buffered response."""
    native_headers: tuple[tuple[bytes, bytes], ...]
    """Headers with the gateway's settings for native replicas."""


class RequestProxy:
    """Makes the attempts of one request that placement asks for, and reports how they end. A `PlacedRequest`."""

    def __init__(
        self,
        config: ProxyConfig,
        driver: PlacementDriver,
        context: RequestContext,
        continuation: StreamContinuation,
        relay: ResponseRelay,
        writer: ResponseWriter,
    ) -> None:
        self._config = config
        self._driver = driver
        self._context = context
        self._request = context.start_placement()
        self._continuation = continuation
        self._relay = relay
        self._writer = writer
        self._calls: list[UpstreamCall] = []
        """The attempts that run."""
        self._next_attempt: Attempt | None = None
        """Attempt that is to be sent."""
        self._refusal: Refuse | None = None
        self._wake: asyncio.Future[None] | None = None
        """Done when placement has decided something."""

    async def run(self) -> None:
        """Produce the response. The caller finishes the writer.

        Raises:
            ApiError: The request was refused, or failed.
        """
        context, request = self._context, self._request
        self._driver.arrive(request, self, context.pool)
        if request.queued_at is not None:
            context.trace.queued_at = request.queued_at
            context.trace.queued_ahead = request.queued_ahead
        if request.state is RequestState.WAITING and context.api.generates:
            check_queued_parameters(context.pool, context.fields, context.api.path)
        try:
            while not await self._run_attempt(await self._wait_for_attempt()):
                pass
        finally:
            for call in self._calls:
                call.cancel()

    @property
    def permits_fallback(self) -> bool:
        """Whether another model may answer: the replicas could not, and the client has received no output."""
        refusal = self._refusal
        return refusal is not None and refusal.reason in FALLBACK_REASONS and not self._has_started

    # --- effects of placement --------------------------------------------------------------------

    def on_send(self, attempt: Attempt) -> None:
        self._next_attempt = attempt
        if attempt.mode is not AttemptMode.HEDGE:
            self._context.record_replica(cast("ReplicaEndpoint", attempt.replica))
        self._notify()

    def on_cancel(self, attempt: Attempt) -> None:
        for call in tuple(self._calls):
            if call.attempt is attempt:
                self._calls.remove(call)
                call.cancel()
        if self._next_attempt is attempt:
            self._next_attempt = None

    def on_move(self, move: Move) -> None:
        if self._context.is_copy:  # the answer of another version is of no use
            self.on_refuse(Refuse(self._request, RefusalReason.NO_REPLICA))
            return
        self._context.move_to_pool(cast("Pool", move.pool), move.reason)

    def on_pause(self, pause: Pause) -> None:
        gives_way = pause.waiting is not None or self._request.tier == BATCH_TIER
        reason = "it gives way to other requests" if gives_way else "the replica drains"
        if self._request.state is RequestState.SENT:
            self._calls[0].abort(StreamPausedError(reason))
        else:
            self._relay.pause(reason)

    def on_refuse(self, refusal: Refuse) -> None:
        self._refusal = refusal
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _wait_for_attempt(self) -> Attempt:
        """Wait until placement decides on an attempt.

        Raises:
            ApiError: It refused the request.
        """
        while self._next_attempt is None or self._refusal is not None:
            if self._refusal is not None:
                raise build_refusal_error(
                    self._refusal,
                    self._context,
                    self._config.queue_timeout_s,
                    self._config.clock(),
                )
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        attempt, self._next_attempt = self._next_attempt, None
        return attempt

    # --- attempts --------------------------------------------------------------------------------

    async def _run_attempt(self, attempt: Attempt) -> bool:
        """Make an attempt, hedged if placement decides so, and report its end.

        Returns:
            Whether the response is complete.
        """
        call = self._start_call(attempt)
        try:
            if attempt.may_be_hedged:
                call, start = await self._open_fastest(call)
            else:
                start = await self._open(call)
            if isinstance(start, BufferedResponse):
                await self._deliver_buffered(start, call)
            else:
                await self._forward_stream(start, call)
        except CALL_ERRORS as error:
            # The traceback refers to the response and to this frame, a cycle that only the garbage collector frees.
            return self._on_failure(self._calls[0], error.with_traceback(None))
        return True

    def _start_call(self, attempt: Attempt) -> UpstreamCall:
        call = UpstreamCall(attempt, self._config.clock)
        self._calls.append(call)
        return call

    async def _open_fastest(self, first: UpstreamCall) -> tuple[UpstreamCall, ResponseStart]:
        """Wait for the first content of a stream, from whichever attempt is the first to send some.

        Raises:
            UpstreamError: The last attempt failed.
            UpstreamRefusedError: The last attempt was refused.
            UnsuitableReplicaError: The last attempt's replica does not suit the request.
        """
        loop = asyncio.get_running_loop()
        first.task = loop.create_task(self._open_content(first))
        is_hedged = False
        while True:
            self._wake = loop.create_future()
            running: list[asyncio.Future[Any]] = [self._wake]
            running += [call.task for call in self._calls if call.task is not None]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            hedge, self._next_attempt = self._next_attempt, None
            if hedge is not None:
                is_hedged = True
                call = self._start_call(hedge)
                call.task = loop.create_task(self._open_content(call))
            for call in tuple(self._calls):
                if call.task is None or not call.task.done():
                    continue
                task, call.task = call.task, None
                error = task.exception()
                if error is None:
                    start = task.result()
                    self._on_opened(call, start)
                    if is_hedged and isinstance(start, UpstreamPlan):
                        # The continuation only supports its latest plan.
                        start = (
                            self._continuation.plan_upstream(self._target(call.replica)) or start
                        )
                    return call, start
                if not isinstance(error, CALL_ERRORS) or len(self._calls) == 1:
                    raise error
                self._report_end(call, error)
                self._context.record_replica(self._calls[0].replica)

    async def _open_content(self, call: UpstreamCall) -> ResponseStart:
        """Send the request and wait for the first content of the response.

        Some servers send a stream's headers and comments earlier, which does not count as a start.
        """
        timeout_s = self._config.timeouts.first_token_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                start = await self._open(call, is_fastest=False)
                if not isinstance(start, BufferedResponse):
                    await call.wait_for_piece(FirstContentDetector().feed)
        except TimeoutError:
            raise UpstreamError(f"no response within {timeout_s:g} s") from None
        return start

    async def _open(self, call: UpstreamCall, *, is_fastest: bool = True) -> ResponseStart:
        """Send the request to one replica and wait for the start of its response.

        Args:
            call: The attempt.
            is_fastest: Whether it provides the response as soon as it has started.

        Raises:
            UpstreamError: The replica was lost.
            UpstreamRefusedError: The replica's response is not usable.
            UnsuitableReplicaError: The replica cannot resume the response.
        """
        context, replica = self._context, call.replica
        if replica.name in self._request.unsuitable or not replica.has_arithmetic(
            context.delivered.arithmetic_id
        ):
            raise UnsuitableReplicaError
        adapter = context.adapter
        load = None if adapter is None else await load_adapter(replica, adapter.digest)
        uses_stream, target = self._request.uses_stream(replica), self._target(replica)
        plan = self._continuation.plan_upstream(target) if uses_stream else None
        if uses_stream and plan is None:
            raise UnsuitableReplicaError
        is_restarted = context.delivered.output_tokens > 0 and plan is None
        if is_restarted:
            self._relay.restart()  # a buffered response starts from the beginning
        headers = encode_request_headers(
            context, replica, resumable=uses_stream, native_headers=self._config.native_headers
        )
        path = context.api.path if plan is None else plan.path
        body = build_nonstreaming_body(context.fields, path, target) if plan is None else plan.body
        request = replica.upstream.build_post(path, body, headers)
        self._driver.record_sent(self._request, call.attempt, is_restarted=is_restarted)
        deadlines = (
            self._config.stream_start_deadlines if uses_stream else self._config.buffered_deadlines
        )
        deadlines.add(call)
        try:
            await call.send(replica.upstream, request)
            status = await call.status
            if status == HTTP_CREATED:
                status = 200
            if plan is not None and status == 200:
                if adapter is not None:
                    check_adapter(replica, adapter.digest, load, status, call.headers)
                if is_fastest:
                    self._on_opened(call, plan)
                return plan
            if replica.health.is_down and classify_status(status) is AttemptOutcome.SUCCESS:
                self._driver.handle(AttemptAnswered(self._request, call.attempt, is_response=False))
            if status == ARITHMETIC_MISMATCH_STATUS and context.delivered.arithmetic_id:
                raise UnsuitableReplicaError
            content = await call.read_body()
            if adapter is not None:
                self._check_adapter(call, adapter, load, status, content)
        finally:
            deadlines.remove(call)
        return check_buffered_response(
            status, content, call.content_type, target.adapter, has_started=self._has_started
        )

    def _check_adapter(
        self,
        call: UpstreamCall,
        adapter: Adapter,
        load: AdapterLoad | None,
        status: int,
        body: bytes,
    ) -> None:
        """Check that a buffered response is that of the request's adapter. Raises as `check_adapter`."""
        found, may_reload = (status, call.headers, body), not self._request.failed_attempts
        check_adapter(call.replica, adapter.digest, load, *found, may_reload=may_reload)

    def _on_opened(self, call: UpstreamCall, start: ResponseStart) -> None:
        """Report that the response of this attempt is used."""
        context, replica = self._context, call.replica
        is_stream = not isinstance(start, BufferedResponse)
        if is_stream and not context.delivered.output_tokens:
            context.delivered.arithmetic_id = (
                parse_arithmetic_id(call.headers) if replica.is_native else replica.arithmetic_id
            )
            context.delivered.is_exact = replica.is_exact
        if call.attempt.mode is AttemptMode.HEDGE:  # the others are recorded when they are sent
            context.record_replica(replica)
        self._driver.handle(
            AttemptAnswered(
                self._request,
                call.attempt,
                is_stream=is_stream,
                arithmetic_id=context.delivered.arithmetic_id,
            )
        )

    async def _forward_stream(self, plan: UpstreamPlan, call: UpstreamCall) -> None:
        """Forward a stream to its end.

        Raises:
            UpstreamError: The replica was lost.
            UpstreamRefusedError: The server rejected the request within its stream.
        """
        context, relay = self._context, self._relay
        if context.exchange.status is None:
            forward_request_notes(context, call.replica, call.headers)
        await self._writer.start()
        relay.attach(call, plan.parser)
        try:
            await call.end_of_body
        finally:
            relay.end_splice()
        relay.finish_upstream()
        self._report_completed(call, relay.completed_tokens_per_choice)

    async def _deliver_buffered(self, buffered: BufferedResponse, call: UpstreamCall) -> None:
        """Send a buffered response to the client, including an error response that blames the request."""
        context, exchange = self._context, self._context.exchange
        if exchange.status is None:
            forward_request_notes(context, call.replica, call.headers)
        if buffered.status == 200:
            received_at = call.last_activity_at
            tokens = self._relay.record_buffered(buffered, received_at, call.replica.adapter)
            self._report_completed(call, tokens, received_at)
            context.status = context.final_status
        else:
            self._report_completed(call, None)
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
        body = buffered.body
        if buffered.status == 200:
            try:
                body = await self._writer.filter_body(body)
                if context.content is not None:
                    body = await self._writer.review_body(body)
            except ValueError as error:
                message = "The replica's response is malformed. Try again shortly."
                raise ApiError(502, "upstream_failed", message) from error
        await exchange.send_response(buffered.status, body, buffered.content_type)

    def _target(self, replica: ReplicaEndpoint) -> UpstreamTarget:
        """Describe a replica for the body of its request. All attempts of the request have the same priority."""
        adapter = replica.adapter
        priority = self._context.compute_priority(adapter) if adapter.priority_sign else None
        lora = "" if self._context.adapter is None else self._context.adapter.digest
        return UpstreamTarget(
            adapter, replica.upstream_model, replica.max_model_len or 0, lora, priority
        )

    @property
    def _has_started(self) -> bool:
        """Whether the client may have received events of the response, or tokens were received for it."""
        has_tokens = self._context.delivered.output_tokens > 0 and not self._writer.is_holding
        return self._writer.has_output or has_tokens

    # --- ends of attempts ------------------------------------------------------------------------

    def _report_completed(
        self,
        call: UpstreamCall,
        tokens_per_choice: float | None,
        received_at: float | None = None,
    ) -> None:
        self._calls.remove(call)
        self._driver.handle(
            AttemptEnded(
                self._request,
                call.attempt,
                AttemptEnding.COMPLETED,
                AttemptOutcome.SUCCESS,
                output_tokens=self._context.delivered.output_tokens,
                received_at=received_at,
                tokens_per_choice=tokens_per_choice,
            )
        )

    def _on_failure(self, call: UpstreamCall, error: CallError) -> bool:
        """Report a failed attempt. Returns whether the response is complete nevertheless."""
        context, relay = self._context, self._relay
        if context.end_reason is EndReason.STOPPED:
            self._calls.remove(call)
            call.cancel()
            return True
        if isinstance(error, UnsuitableReplicaError):
            if isinstance(error, AdapterUnavailableError):
                context.adapter_problem = str(error) or "it gives no reason"
            self._report_end(call, error)
            return False
        relay.detach()
        is_paused = isinstance(error, StreamPausedError)
        is_complete = isinstance(error, UpstreamError) and relay.complete_lost_stream()
        if not is_paused:
            upstream_message = getattr(error, "upstream_message", "")
            log_fields = {"upstream_message": upstream_message} if upstream_message else {}
            log.warning(
                "attempt_failed",
                replica=call.replica.name,
                model=context.pool.model,
                reason=str(error),
                **log_fields,
            )
        elif not is_complete:
            replica, model = call.replica, context.pool.model
            if replica.health.must_move_streams(self._config.clock()):
                log.info("stream_moved", replica=replica.name, model=model)
            else:
                log.debug("stream_paused", replica=replica.name, model=model)
        self._report_end(call, error, is_complete=is_complete)
        return is_complete

    def _report_end(
        self, call: UpstreamCall, error: CallError, *, is_complete: bool = False
    ) -> None:
        context = self._context
        self._calls.remove(call)
        call.cancel()
        ending, is_restarted = error.ending, False
        if ending is AttemptEnding.UNSUITABLE and context.delivered.arithmetic_id:
            is_restarted = self._writer.discard()
            if is_restarted:
                self._relay.restart()  # the client has received nothing, so any arithmetic may answer
        self._driver.handle(
            AttemptEnded(
                self._request,
                call.attempt,
                ending,
                error.outcome,
                str(error),
                status=getattr(error, "status", 0),
                retry_after_s=call.retry_after_s,
                is_sent=call.is_request_sent,
                is_too_large=isinstance(error, ResponseTooLargeError),
                output_tokens=context.delivered.output_tokens,
                can_resume=self._continuation.can_resume,
                is_complete=is_complete,
                is_restarted=is_restarted,
            )
        )


def _encode_refusal(body: bytes, error: ApiError, exchange: HttpExchange) -> bytes:
    """Return the replica's error on one line for an event; `error` if it has not the shape of the OpenAI API."""
    try:
        fields = msgspec.json.decode(body)
        if isinstance(fields, dict) and isinstance(fields.get("error"), dict):
            return msgspec.json.encode(fields)
    except MALFORMED_EVENT_ERRORS:
        pass
    return error.encode_body(exchange.request_id)
