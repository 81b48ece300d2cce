"""One answer from one replica after another, until it is whole or has been tried enough."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from argosy.gateway.backends import (
    BackendAdapter,
    StreamContinuation,
    UpstreamPlan,
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
from argosy.gateway.proxy.upstream_headers import build_request_headers, parse_model_digest
from argosy.gateway.request_context import REFUSED_BY_REPLICA, REQUEST_TOO_LARGE, RequestContext
from argosy.gateway.request_fields import RequestFields
from argosy.gateway.upstream import ResponseTooLargeError, UpstreamError, UpstreamResponse
from argosy.http_server import Deadlines
from argosy.policy import AttemptOutcome, backoff_s, classify_status
from argosy.protocol import ApiError

HTTP_CREATED = 201
"""What some frameworks answer every POST with."""
MAX_JSON_CONTAINERS = 1 << 21
"""And lists, in a whole answer: more take long to read, and log-probabilities of what is kept are fewer."""
MODEL_MISMATCH_STATUS = 409
"""What a replica of ours answers that has another model than the one that began the answer."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """What goes for all requests."""

    timeouts: Timeouts
    max_failed_attempts: int
    """Failures that living replicas answer with, or replicas lost without getting on, before a request is given up."""
    clock: Callable[[], float]
    stream_start_deadlines: Deadlines[UpstreamResponse]
    """Attempts whose answer is to begin."""
    buffered_deadlines: Deadlines[UpstreamResponse]
    """Attempts whose answer is to come in one piece."""


class FailoverProxy:
    """One request's."""

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
        """Its next try has to wait until the retry budget allows it."""

    async def run(self) -> None:
        """Answer it, but for the end of what `out` has. Raises ApiError when that cannot be."""
        context, suspects = self._context, self._context.pool.poison_requests
        if len(suspects):
            wait_s = suspects.retry_after_s(context.prompt_digest, self._config.clock())
            if wait_s > 0:
                raise _quarantined_error(context, wait_s)
        while not await self._run_attempt():
            pass
        if len(suspects):
            suspects.clear(context.prompt_digest)

    async def _run_attempt(self) -> bool:
        """Let one replica give what it can; whether the answer is whole."""
        await self._acquire_replica()
        context, stream, carrier = self._context, self._relay, self._continuation
        before = context.delivered.output_tokens
        race = HedgedRequest(context, self._config.clock)
        outcome: AttemptOutcome | None = None
        failure: UpstreamError | UpstreamRefusedError | None = None
        try:
            whole = await self._receive_response(race)
            outcome = AttemptOutcome.SUCCESS
        except CannotResumeError:
            self._on_cannot_resume(race.attempt.replica)
            return False
        except (UpstreamError, UpstreamRefusedError) as error:
            if stream.early_finish_reason is not None:
                return True
            # Its frames have what was answered, and this one would have it: only the collector would find both.
            failure, outcome = error.with_traceback(None), error.outcome
            stream.detach()
            won = context.delivered.output_tokens - before
            if won > 0:
                context.record_progress(won)
        finally:
            race.attempt.finish(outcome, "" if failure is None else str(failure))
        if failure is not None:
            replica, model = race.attempt.replica.name, context.pool.model
            said = failure.upstream_message if isinstance(failure, UpstreamRefusedError) else ""
            more = {"said": said} if said else {}
            log.warning("attempt_failed", replica=replica, model=model, reason=str(failure), **more)
            lost = isinstance(failure, UpstreamError)
            if lost and self._complete_lost_stream():
                return True
            self._record_failure(race.attempt, failure)
            if not carrier.can_resume:
                raise (
                    _interrupted_error()
                    if lost
                    else _upstream_failed_error(context, self._config.clock())
                )
            return False
        if whole is not None:
            await self._deliver_buffered(whole, race.attempt)
        return True

    async def _receive_response(self, race: HedgedRequest) -> BufferedResponse | None:
        """Ask one replica, or two. The whole answer; None when it was a stream, which has been passed on.

        Raises UpstreamError when there was none, RefusedError when it is of no use, UnfitError when it cannot go on.
        """
        context, stream, carrier = self._context, self._relay, self._continuation
        hedging = context.pool.hedging
        if (
            hedging is None
            or _has_started(context)
            or not _uses_stream(context.fields, race.attempt.replica.adapter)
        ):
            begun = await self._send_request(race.attempt)
        else:
            within_s = self._config.timeouts.first_token_timeout_s
            begun = await race.run(
                self._send_request, hedging.after_s, within_s, self._select_hedge
            )
        if isinstance(begun, BufferedResponse):
            return begun
        turn = race.attempt
        await self._writer.start()
        leg = begun
        if race.is_hedged:  # the carrier goes by the last leg that it gave
            leg = _plan_upstream(carrier, turn.replica) or begun
        if not context.delivered.output_tokens:
            context.delivered.model_digest = parse_model_digest(turn.response.headers)
        stream.attach_upstream(turn.response, turn.replica, leg.parser)
        try:
            await turn.response.end_of_body
        finally:
            stream.exit_fast_path()
        stream.finish_upstream()
        return None

    async def _send_request(self, turn: ReplicaAttempt) -> ResponseStart:
        """Ask one replica, until it answers.

        Raises UpstreamError, RefusedError when that is of no use, UnfitError when it cannot go on.
        """
        context, replica, attempt = self._context, turn.replica, turn.response
        ask, path, adapter = context.fields, context.api.path, replica.adapter
        flows = _uses_stream(ask, adapter)
        leg = _plan_upstream(self._continuation, replica) if flows else None
        if flows and leg is None:
            raise CannotResumeError
        if context.delivered.output_tokens and leg is None:
            self._relay.restart()  # what does not flow is sent whole
            turn.trace.delivered_tokens = 0
        outgoing = (
            leg.request
            if leg
            else build_nonstreaming_request(ask, path, adapter, replica.upstream_model)
        )
        if adapter.priority_sign:
            outgoing = outgoing.with_priority(context.compute_priority(adapter))
        headers = build_request_headers(context, replica, resumable=flows)
        request = replica.upstream.build_request(b"POST", outgoing.path, outgoing.body, headers)
        turn.trace.sent_at = self._config.clock()
        deadlines = (
            self._config.stream_start_deadlines if flows else self._config.buffered_deadlines
        )
        deadlines.add(attempt)
        try:
            await attempt.send(replica.upstream, request)
            status = await attempt.status
            if status == HTTP_CREATED:
                status = 200
            outcome = classify_status(status)
            if outcome is AttemptOutcome.SUCCESS:
                replica.on_response_started()
            if leg is not None and status == 200:
                return leg
            if status == MODEL_MISMATCH_STATUS and context.delivered.model_digest:
                raise CannotResumeError
            content = await attempt.read_body()
        finally:
            deadlines.remove(attempt)
        if content.count(b"{") + content.count(b"[") > MAX_JSON_CONTAINERS:
            raise UpstreamRefusedError(
                502, f"what came has more than {MAX_JSON_CONTAINERS} objects and lists"
            )
        came, status = status, infer_status(status, content, adapter.client_error_markers)
        outcome = classify_status(status)
        if outcome is not AttemptOutcome.SUCCESS or _has_started(context):
            raise UpstreamRefusedError(status, f"status {came}", parse_error_message(content))
        if status == 200 and not is_json_object(content):
            raise UpstreamRefusedError(502, "what came is no JSON, and so no answer")
        if status == 200 and not adapter.is_native:
            status = status_in_body(content, adapter.incomplete_finish_reasons)
            if classify_status(status) is not AttemptOutcome.SUCCESS:
                raise UpstreamError("it broke the answer off")
        return BufferedResponse(status, content, attempt.content_type)

    async def _deliver_buffered(self, whole: BufferedResponse, turn: ReplicaAttempt) -> None:
        """Give the client a replica's whole answer, a refusal too that is the request's own fault."""
        context = self._context
        if whole.status == 200:
            self._relay.record_buffered(
                whole.body, turn.response.last_activity_at, turn.replica.adapter
            )
            context.status = context.final_status
        else:
            message = f"The replica refused the request with status {whole.status}."
            error = ApiError(whole.status, REFUSED_BY_REPLICA, message)
            context.record_error(error)
            context.exchange.error_code = error.code
        await context.exchange.send_response(whole.status, whole.body, whole.content_type)

    # --- replicas --------------------------------------------------------------------------------

    async def _acquire_replica(self) -> None:
        """Wait for the replica to try next. Raises ApiError when the request was tried enough."""
        context = self._context
        if context.failing_since is None:
            await self._dispatcher.acquire_replica(context)
            return
        until = context.failing_since + self._config.timeouts.failover_timeout_s
        while not await self._try_reacquire():
            now = self._config.clock()
            late = now + context.pool.retry_after_s(now) > until
            if late or not (_has_reached_replica(context) or context.pool.may_recover(now)):
                raise _upstream_failed_error(context, now)
            context.failed_replicas.clear()

    async def _try_reacquire(self) -> bool:
        """Whether it got another replica within some moments."""
        context = self._context
        now = self._config.clock()
        within_s = backoff_s(context.failed_attempts, random.random())  # noqa: S311 - jitter
        if self._must_wait_for_retry_budget and not (
            context.pool.has_healthy(context.tier, now)
            or context.pool.retry_budget.try_acquire(now)
        ):
            await asyncio.sleep(within_s)
            return False
        self._must_wait_for_retry_budget = False
        return await self._dispatcher.reacquire_replica(context, within_s)

    def _on_cannot_resume(self, replica: ReplicaEndpoint) -> None:
        """It cannot go on: perhaps another can. Raises ApiError 502 when none is left."""
        context = self._context
        if context.delivered.model_digest and self._writer.discard():
            self._relay.restart()  # the client has nothing of it yet, so any model may answer
            return
        context.incompatible_replicas.add(replica.name)
        if all(
            one.name in context.incompatible_replicas for one in context.pool.eligible_replicas()
        ):
            raise _interrupted_error()

    def _select_hedge(self) -> RoutingDecision | None:
        """Another replica, beside the one that is silent, if there is room to spare."""
        context = self._context
        replicas = context.pool.replicas.values()
        whole = {
            replica.name
            for replica in replicas
            if not _uses_stream(context.fields, replica.adapter)
        }
        others = {context.replica_name} | context.failed_replicas | whole
        return self._dispatcher.select_hedge(context, others)

    def _record_failure(
        self, turn: ReplicaAttempt, failure: UpstreamError | UpstreamRefusedError
    ) -> None:
        """Note that a replica failed the request. Raises ApiError when it was tried enough, or is itself at fault.

        What was carried on from a replica that died has to go somewhere: the time that recovery may take bounds it,
        and how many may be lost with it without getting on. What a full one refused waits as long for room. Of what
        has nothing yet the rest draws on the retry budget, since that is what overloaded pools do: what a living
        replica failed needs it at once, what one lost that had failed before waits for it, or for one that is well.
        """
        context, now, replica = self._context, self._config.clock(), turn.replica
        context.failed_replicas.add(replica.name)
        context.failed_attempts += 1
        context.failing_since = context.failing_since or now
        begun = context.delivered.output_tokens > 0
        if (
            failure.outcome is AttemptOutcome.SUCCESS
            and isinstance(failure, UpstreamRefusedError)
            and not begun
        ):
            message = f"The replica refused the request: {str(failure).rstrip('.')}."
            raise ApiError(failure.status, REFUSED_BY_REPLICA, message)
        free = begun or failure.outcome is AttemptOutcome.BACKPRESSURE
        if isinstance(failure, UpstreamError):
            context.replica_losses += turn.response.is_request_sent
            if isinstance(failure, ResponseTooLargeError) and context.replica_losses > 1:
                raise _too_large_error(failure)
            self._must_wait_for_retry_budget = (
                not (free or turn.is_breaker_closed) and turn.response.is_request_sent
            )
            free = True
        elif failure.outcome is AttemptOutcome.FAILURE:
            context.error_responses += 1
        suspects, digest = context.pool.poison_requests, context.prompt_digest
        suspected = suspects.is_quarantined(digest, now) and not begun
        if context.replica_losses >= (1 if suspected else max(2, self._config.max_failed_attempts)):
            suspects.quarantine(digest, now)
            raise _quarantined_error(context, suspects.retry_after_s(digest, now))
        tried_enough = (
            max(context.replica_losses, context.error_responses) >= self._config.max_failed_attempts
        )
        if tried_enough or not (free or context.pool.retry_budget.try_acquire(now)):
            raise _upstream_failed_error(context, now)

    def _complete_lost_stream(self) -> bool:
        """A replica was lost: had it told all but the end?"""
        ending = self._relay.build_tail()
        if ending is not None:
            self._relay.write_tail(ending)
        return ending is not None


class CannotResumeError(Exception):
    """A replica cannot go on where the answer stopped."""


def _uses_stream(ask: RequestFields, adapter: BackendAdapter) -> bool:
    """Whether the replica's answer is a stream, which the client gets as one or whole."""
    return ask.stream or (adapter.is_native and ask.can_aggregate_stream)


def _plan_upstream(carrier: StreamContinuation, replica: ReplicaEndpoint) -> UpstreamPlan | None:
    return carrier.plan_upstream(
        replica.adapter, replica.upstream_model, replica.max_model_len or 0
    )


def _has_started(context: RequestContext) -> bool:
    """Whether a part of the answer is there."""
    return context.exchange.status is not None or context.delivered.output_tokens > 0


def _interrupted_error() -> ApiError:
    message = "The replica failed in the middle of the answer, and it cannot be carried on."
    return ApiError(502, "upstream_failed", message)


def _too_large_error(failure: ResponseTooLargeError) -> ApiError:
    message = f"The answer cannot be sent: {failure}. Ask for less of it, or have it streamed."
    return ApiError(413, REQUEST_TOO_LARGE, message)


def _quarantined_error(context: RequestContext, wait_s: float) -> ApiError:
    message = (
        f"Replicas for {context.pool.model!r} were lost with this request. "
        f"Change it, or try again in {math.ceil(wait_s)} s."
    )
    return ApiError(502, "upstream_failed", message, retry_after_s=wait_s)


def _has_reached_replica(context: RequestContext) -> bool:
    """Whether a replica got the request, as far as it counts: see `Journey.got_on`."""
    return bool(
        context.error_responses or context.replica_losses or context.delivered.output_tokens
    )


def _upstream_failed_error(context: RequestContext, now: float) -> ApiError:
    model = context.pool.model
    tried = context.attempt_trace
    refused = tried is not None and tried.outcome == AttemptOutcome.BACKPRESSURE.value
    if refused and context.pool.is_available():
        return replicas_full_error(context.pool, context.pool.retry_after_s(now))
    if not _has_reached_replica(context):
        return no_replica_error(context.pool, now)
    message = f"No replica could answer for {model!r}. Try again shortly."
    return ApiError(502, "upstream_failed", message, retry_after_s=RETRY_AFTER_S)
