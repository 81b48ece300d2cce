"""Chat and completions through the gateway: read, let in, tried until a replica answers, passed on."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial

from argosy.gateway.backends import BackendKind, StreamContinuation, count_resume_tokens
from argosy.gateway.config import GatewayConfig
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.pool import Pool
from argosy.gateway.principal import TIERS, Principal
from argosy.gateway.proxy.dispatcher import RETRY_AFTER_S, Dispatcher
from argosy.gateway.proxy.failover import FailoverProxy, ProxyConfig
from argosy.gateway.proxy.fast_path import FastPath
from argosy.gateway.proxy.fast_path_switch import FastPathSwitch
from argosy.gateway.proxy.response_relay import ResponseRelay, StreamTimeouts
from argosy.gateway.proxy.response_writers import AggregatingWriter, ResponseWriter, StreamingWriter
from argosy.gateway.request_context import (
    CHAT,
    COMPLETION,
    UNANSWERED_STATUSES,
    ApiShape,
    FilterState,
    RequestContext,
    RequestFilter,
    complete_filters,
    run_filters,
)
from argosy.gateway.request_fields import RequestFields, parse_request_fields
from argosy.gateway.request_trace import RequestTrace
from argosy.gateway.upstream import UpstreamResponse
from argosy.http_server import Deadlines, DisconnectedError, HttpExchange, SlowReaderError
from argosy.protocol import ApiError, format_event, invalid_request

RESUMABLE_KINDS = frozenset[BackendKind]({"argosy", "auto"})
"""Kinds of servers that may know `resume`: ours, and those that have not said yet what they are."""


class CompletionHandlers:
    """The handlers of the two generation APIs; every request passes `stages`."""

    def __init__(
        self,
        models: ModelRouter,
        config: GatewayConfig,
        filters: Sequence[RequestFilter],
        fast_path: FastPath | None,
    ) -> None:
        self._models = models
        self._config = config
        self._filters = filters
        self._fast_path = fast_path
        self._max_request_s = config.timeouts.request_timeout_s or math.inf
        self._clock = time.monotonic
        self._stream_timeouts = StreamTimeouts(
            config.timeouts.first_token_timeout_s,
            config.timeouts.stream_idle_timeout_s,
            config.sse_keepalive_interval_s,
            config.slow_reader_timeout_s,
        )
        self._dispatchers: dict[Pool, Dispatcher] = {}
        """Of each pool that was asked for something."""
        self._relays: set[ResponseRelay] = set()
        self._proxy_config = ProxyConfig(
            config.timeouts,
            config.max_failed_attempts,
            self._clock,
            stream_start_deadlines=Deadlines(config.timeouts.first_token_timeout_s, _abandon_late),
            buffered_deadlines=Deadlines(config.timeouts.non_streaming_timeout_s, _abandon_late),
        )

    @property
    def queued_requests(self) -> Mapping[str, int]:
        """Requests that wait for a replica, by model."""
        queued = {pool.model: 0 for pool in self._models.pools}
        for pool, dispatcher in self._dispatchers.items():
            if pool.model in queued:
                queued[pool.model] += len(dispatcher)
        return queued

    @property
    def fast_path_streams(self) -> int:
        """Streams that native code passes on just now."""
        return 0 if self._fast_path is None else len(self._fast_path)

    async def chat_completions(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/chat/completions`."""
        await self._handle(exchange, principal, CHAT)

    async def completions(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/completions`."""
        await self._handle(exchange, principal, COMPLETION)

    async def monitor_streams(self) -> None:
        """Look after running streams and all that wait, for as long as the gateway runs."""
        while True:
            await asyncio.sleep(1.0)
            self._check_streams()  # a function, as its names would keep the last stream until there is another

    def _check_streams(self) -> None:
        for pool, dispatcher in tuple(self._dispatchers.items()):
            dispatcher.dispatch_waiting()
            if not (pool.active_requests or pool in self._models.pools):
                del self._dispatchers[pool]
        now = self._clock()
        for stream in tuple(self._relays):
            stream.check_timeouts(now, self._stream_timeouts)

    # --- one request ---------------------------------------------------------------------------

    async def _handle(self, exchange: HttpExchange, principal: Principal, api: ApiShape) -> None:
        session = exchange.get_header(b"x-session-affinity")
        ask = parse_request_fields(
            await exchange.read_body(), api.prompt_field, principal.cache_domain, session
        )
        exchange.set_request_id(ask.request_id)
        context = self._build_context(exchange, ask, api, principal)
        visits: list[FilterState] = []
        out: ResponseWriter = (
            StreamingWriter(exchange) if ask.stream else AggregatingWriter(context)
        )
        try:
            await self._execute(context, visits, out)
        except (DisconnectedError, SlowReaderError):
            context.status = "cancelled"
            raise
        except ApiError as error:
            context.record_error(error)
            if exchange.status is not None and not exchange.response_complete:
                exchange.write_nowait(format_event(error.encode_body(exchange.request_id)))
                await exchange.end_stream()
            raise
        except Exception:
            context.trace.error_code = "internal_error"  # as it will be answered
            raise
        finally:
            delivered = context.delivered
            unsent = context.status in UNANSWERED_STATUSES and out.discard()
            if unsent or exchange.status is None:
                delivered.reset()  # nothing reached the client, so nothing is billed
            elif context.status != "completed" and not delivered.output_tokens:
                delivered.prompt_tokens = delivered.cached_tokens = 0  # nor is a prompt alone
            complete_filters(visits, context)
            context.error = None  # which has this frame, and so all that was answered

    def _build_context(
        self, exchange: HttpExchange, ask: RequestFields, api: ApiShape, principal: Principal
    ) -> RequestContext:
        """Raises ApiError when nothing here serves the model, to this caller, or ever could."""
        pool, route = self._models.resolve_target(ask.model, principal, exchange.headers)
        most = pool.max_model_len
        if most is not None and ask.exceeds_token_limit(most):
            # OpenAI's status and words: clients know by them that it is the prompt.
            message = (
                f"This model's maximum context length is {most} tokens, and the prompt is longer. "
                "Send less, or have it cut (truncate_prompt_tokens)."
            )
            raise invalid_request(message, api.prompt_field, "context_length_exceeded")
        if count_resume_tokens(ask) and not _can_resume(pool):
            message = (
                "Only replicas of Argosy go on after tokens ('resume'), and none has this model. "
                "Send what is there as text."
            )
            raise invalid_request(message, "resume")
        now = self._clock()
        return RequestContext(
            exchange,
            ask,
            api,
            pool,
            f"{api.id_prefix}-{random.getrandbits(128):032x}",
            principal,
            tier=min(principal.tier + ask.priority, len(TIERS) - 1),  # it may ask for a lower one
            route_name=route,
            deadline=exchange.arrived_at + min(ask.timeout_s, self._max_request_s),
            response_headers=exchange.extra_headers,
            trace=RequestTrace(arrived_at=exchange.arrived_at, parsed_at=now),
            started_at=time.time() - (now - exchange.arrived_at),
        )

    async def _execute(
        self, context: RequestContext, visits: list[FilterState], out: ResponseWriter
    ) -> None:
        """Let the request in and answer it, unless the client or the gateway goes away, or its deadline passes."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a coroutine
        pool = context.pool
        dispatcher = self._get_dispatcher(pool)
        carrier = StreamContinuation(context.fields, context.api.path, context.delivered)
        stream = ResponseRelay(
            context,
            out,
            carrier,
            filter_states=visits,
            charge=partial(dispatcher.charge_tenant, context),
            cancel=task.cancel,
            fast_path_switch=self._build_fast_path_switch(context.fields, out, visits),
        )
        alarm = None
        if context.deadline < math.inf:
            left_s = max(0.0, context.deadline - self._clock())
            alarm = asyncio.get_running_loop().call_later(left_s, stream.on_deadline)
        context.exchange.set_listener(stream)
        self._relays.add(stream)
        pool.active_requests += 1
        try:
            if await run_filters(self._filters, visits, context):
                context.trace.admitted_at = self._clock()
                await FailoverProxy(
                    self._proxy_config, dispatcher, context, carrier, stream, out
                ).run()
        except asyncio.CancelledError:
            task.uncancel()
            if stream.client_disconnected:
                raise (
                    SlowReaderError if stream.disconnected_as_slow else DisconnectedError
                ) from None
            if not stream.aborted:
                message = "The gateway is going away. Send the request again."
                raise ApiError(503, "draining", message, retry_after_s=RETRY_AFTER_S) from None
            if stream.early_finish_reason is None:
                raise _deadline_exceeded_error(context) from None
        finally:
            if alarm is not None:
                alarm.cancel()
            self._relays.discard(stream)
            pool.active_requests -= 1
            stream.charge_delivered()
            dispatcher.release(context)
            context.exchange.set_listener(None)
        if context.exchange.response_complete:
            return  # passed on as it came, or answered by a stage
        await out.finish()
        context.status = (
            "stopped" if stream.early_finish_reason is not None else context.final_status
        )

    def _get_dispatcher(self, pool: Pool) -> Dispatcher:
        """The queue in front of a pool."""
        dispatcher = self._dispatchers.get(pool)
        if dispatcher is None:
            dispatcher = self._dispatchers[pool] = Dispatcher(pool, self._config.queue, self._clock)
        return dispatcher

    def _build_fast_path_switch(
        self, ask: RequestFields, out: ResponseWriter, visits: Sequence[FilterState]
    ) -> FastPathSwitch | None:
        """The way by the fast path, for a stream that may go there: it knows one choice."""
        if self._fast_path is None or ask.choice_count > 1 or not isinstance(out, StreamingWriter):
            return None
        return FastPathSwitch(self._fast_path, out, visits)


def _can_resume(pool: Pool) -> bool:
    """Whether some server knows `resume`, or may come that does."""
    kinds = {replica.kind for replica in pool.replicas.values()}
    return not kinds or not kinds.isdisjoint(RESUMABLE_KINDS)


def _deadline_exceeded_error(context: RequestContext) -> ApiError:
    """The deadline of a request has ended it before anything came."""
    context.status = "stopped"
    context.response_headers.append(
        (b"x-should-retry", b"false")
    )  # or SDKs would, with as little time
    allowed_s = context.deadline - context.exchange.arrived_at
    message = (
        f"No answer had begun in the {allowed_s:g} s that its timeout_s, or the server, allows."
    )
    return ApiError(504, "deadline_exceeded", f"{message} Allow more, or try again later.")


def _abandon_late(attempt: UpstreamResponse) -> None:
    attempt.abort("too late")
