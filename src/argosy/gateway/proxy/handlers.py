"""Handlers of the APIs of models: parse a request, run the filters, and proxy it to a replica."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from urllib.parse import quote

import msgspec
import structlog
from msgspec import Raw

from argosy.deployment import (
    CacheRule,
    ContentRule,
    GatewayConfig,
    PromptRule,
    RequestConditions,
    RouteConfig,
    TruncationRule,
)
from argosy.gateway.backends import StreamContinuation
from argosy.gateway.content_session import ContentSession
from argosy.gateway.filters import begin_usage_row
from argosy.gateway.http_route import find_deployment
from argosy.gateway.model_registry import CACHE_MISS, ModelRouter, RouteTarget
from argosy.gateway.model_routes import RequestRule
from argosy.gateway.pool import Pool
from argosy.gateway.principal import NO_SPECULATION_FLAG, TIERS, Principal
from argosy.gateway.prompt_rendering import render_prompt
from argosy.gateway.proxy.adapter_loading import find_replicas_without_adapters
from argosy.gateway.proxy.answer_sampler import AnswerSampler
from argosy.gateway.proxy.caching_writer import CachingWriter
from argosy.gateway.proxy.cascade_writer import CascadeWriter, EscalationError
from argosy.gateway.proxy.constraint_check import (
    NativeRequestChecker,
    check_prompt,
    check_task,
    find_unsupporting_replicas,
)
from argosy.gateway.proxy.content_writer import ContentFilterWriter
from argosy.gateway.proxy.demand_meter import DemandReport
from argosy.gateway.proxy.fast_path import FastPath
from argosy.gateway.proxy.model_call import ModelCaller
from argosy.gateway.proxy.moderation import ModerationWriter, Moderator
from argosy.gateway.proxy.placement_driver import PlacementDriver
from argosy.gateway.proxy.refusal_errors import RETRY_AFTER_S
from argosy.gateway.proxy.request_proxy import ProxyConfig, RequestProxy
from argosy.gateway.proxy.response_cache import ResponseCache
from argosy.gateway.proxy.response_relay import ResponseRelay
from argosy.gateway.proxy.response_writers import (
    AggregatingWriter,
    ResponseWriter,
    StreamingWriter,
    WrappingWriter,
)
from argosy.gateway.proxy.routing_preview import RoutingPreviewer
from argosy.gateway.proxy.semantic_cache import SemanticCache
from argosy.gateway.proxy.shadow_traffic import ShadowTraffic
from argosy.gateway.proxy.start_wait import find_start_wait_s
from argosy.gateway.proxy.stream_pacing import pace_stream
from argosy.gateway.proxy.traffic_sampler import TrafficSampler
from argosy.gateway.proxy.upstream_headers import build_native_headers
from argosy.gateway.request_context import (
    CHAT,
    COMPLETION,
    QUALITY_ROUTE,
    ApiShape,
    EndReason,
    RequestContext,
    RequestFilter,
    complete_filters,
    run_filters,
)
from argosy.gateway.request_fields import (
    PROMPT_ID,
    RequestFields,
    measure_prompt,
    parse_pooled_fields,
    parse_request_fields,
)
from argosy.gateway.request_trace import RequestTrace
from argosy.gateway.upstream import UpstreamResponse
from argosy.gateway.version_comparison import AdapterMeter, OutcomeMeter
from argosy.http_server import (
    LARGE_BODY_BYTES,
    Deadlines,
    DisconnectedError,
    HttpExchange,
    SlowReaderError,
    internal_error,
)
from argosy.policy import Bill, PoolLoad, RequestEnd, TenantMemory, compute_bill
from argosy.policy.placement import PlacementLimits, QueueLimits
from argosy.protocol import ApiError, format_event

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

MAX_PENDING_BYTES = 1 << 30
"""Limit on what `CompletionHandlers.memory` counts, for all tenants together."""
MAX_TENANT_PENDING_BYTES = MAX_PENDING_BYTES // 4
"""Limit of one tenant."""
STREAM_CHECK_INTERVAL_S = 1.0
"""Interval between checks of the timeouts of streams."""
DEGRADED_HEADER = b"x-argosy-degraded"
"""Response header with the name of the last route that applies because of load or a budget."""
DRAFT_SUFFIX = "-draft"
"""Ends the id of the ledger row of a smaller model's answer that a larger model has replaced."""
MODERATION_ROUTE = "moderation"
"""Route name in the ledger of requests to moderation models."""
JUDGE_ROUTE = "judge"
"""Route name in the ledger of requests to the judges of cascades."""
SUMMARY_ROUTE = "summary"
"""Route name in the ledger of requests for summaries of truncated conversations."""
MODEL_HEADER = b"x-argosy-model"
"""Response header with the model that answers, if a route, a weight or a fallback selected it."""


class CompletionHandlers:
    """Handlers of chat and text completions, and of the other APIs of models."""

    def __init__(
        self,
        models: ModelRouter,
        config: GatewayConfig,
        filters: Sequence[RequestFilter],
        fast_path: FastPath | None,
        *,
        outcomes: OutcomeMeter | None = None,
        cache: ResponseCache | None = None,
        adapter_meter: AdapterMeter | None = None,
    ) -> None:
        """Create the handlers.

        Args:
            models: Models and their pools.
            config: Settings of the gateway.
            filters: Filters that each request passes, in this order.
            fast_path: Native code that forwards streams; None for none.
            outcomes: Measures the versions of pools with rollouts; None outside of fleets.
            cache: Keeps answers by cache rules; None for none.
            adapter_meter: Measures the versions of adapters; None without a store.
        """
        self._models = models
        self._config = config
        self._filters = filters
        self._fast_path = fast_path
        self._outcomes = outcomes
        self.cache = cache
        self._adapter_meter = adapter_meter
        self.semantic_cache: SemanticCache | None = None
        if cache is not None:
            self.semantic_cache = SemanticCache(
                models, ModelCaller(self.handle), cache, config.response_cache.max_bytes
            )
        self._moderator = Moderator(
            models, ModelCaller(partial(self._handle_internal, MODERATION_ROUTE))
        )
        self._judge_caller = ModelCaller(partial(self._handle_internal, JUDGE_ROUTE))
        self.call_for_summary = ModelCaller(partial(self._handle_internal, SUMMARY_ROUTE)).call
        """Sends a request for the summary of a part of a conversation."""
        self.call_for_quality = ModelCaller(
            partial(self._handle_internal, QUALITY_ROUTE)
        ).call_alone
        """Sends a request for the quality of models, which counts for no objective and no series."""
        self.answer_sampler: AnswerSampler | None = None
        """Samples answers. None without a store."""
        self.traffic_sampler: TrafficSampler | None = None
        """Samples requests for the detection of changes. None without series."""
        self._shadow_traffic: ShadowTraffic | None = None
        if outcomes is not None or adapter_meter is not None:
            self._shadow_traffic = ShadowTraffic(
                outcomes, adapter_meter, self._execute_copy, time.monotonic
            )
        self._max_request_s = config.timeouts.request_timeout_s or math.inf
        self._clock = time.monotonic
        queue = config.queue
        self._driver = PlacementDriver(
            PlacementLimits(
                QueueLimits(queue.max_requests, queue.max_bytes, queue.timeout_s),
                config.timeouts.failover_timeout_s,
                config.max_failed_attempts,
            ),
            self._clock,
            random.Random(),  # noqa: S311 - spreads load, has no security purpose
        )
        self.previewer = RoutingPreviewer(models, self._driver, config.cold_start, self._clock)
        self._request_checker = NativeRequestChecker()
        self.memory = TenantMemory(MAX_PENDING_BYTES, MAX_TENANT_PENDING_BYTES)
        """Memory of what waits for its end or its reader: responses, and histories of WebSockets."""
        self._relays: set[ResponseRelay] = set()
        self._early_starts: Deadlines[ResponseRelay] = Deadlines(
            config.early_stream_start_s, self._start_early
        )
        """Streams that start early if their replicas have not answered by then."""
        self._proxy_config = ProxyConfig(
            config.timeouts,
            queue.timeout_s,
            self._clock,
            stream_start_deadlines=Deadlines(config.timeouts.first_token_timeout_s, _abort_late),
            buffered_deadlines=Deadlines(config.timeouts.non_streaming_timeout_s, _abort_late),
            native_headers=build_native_headers(
                refuse_unknown_fields=config.unknown_fields == "refuse",
                log_content=config.log_content,
            ),
        )

    @property
    def queued_requests(self) -> Mapping[str, int]:
        """Number of queued requests by model."""
        depths = self._driver.queue_depths
        return {
            pool.model: sum(depths.get(version, 0) for version in pool.all_versions)
            for pool in self._models.pools
        }

    def count_by_tenant(self) -> dict[str, list[int]]:
        """Return the number of running and of queued requests of each tenant."""
        return self._driver.count_by_tenant()

    def read_pool_load(self, pool: Pool) -> PoolLoad:
        """Return the requests and slots of a pool, for the lines of batches."""
        return self._driver.read_pool_load(pool)

    def read_demand(self) -> DemandReport:
        """Return the demand for all models."""
        return self._driver.read_demand(self._models.pools)

    @property
    def fast_path_streams(self) -> int:
        """Number of streams on the fast path."""
        return 0 if self._fast_path is None else len(self._fast_path)

    async def chat_completions(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/chat/completions`."""
        await self.handle(exchange, principal, CHAT)

    async def completions(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/completions`."""
        await self.handle(exchange, principal, COMPLETION)

    async def monitor_streams(self) -> None:
        """Check the timeouts of streams often. Runs until it is cancelled, which cancels all copies."""
        try:
            while True:
                await asyncio.sleep(STREAM_CHECK_INTERVAL_S)
                # In a separate function, so that the loop variable does not keep the last stream alive.
                self._check_streams()
        finally:
            if self._shadow_traffic is not None:
                self._shadow_traffic.close()
            await self._moderator.close()

    def _check_streams(self) -> None:
        self._driver.remove_pools(set(self._models.all_pools))
        now = self._clock()
        for relay in tuple(self._relays):
            relay.check_timeouts(now)
        if self._shadow_traffic is not None:
            self._shadow_traffic.cancel_outdated()

    def _start_early(self, relay: ResponseRelay) -> None:
        relay.start_early(self._clock())

    # --- one request ---------------------------------------------------------------------------

    async def handle(
        self,
        exchange: HttpExchange,
        principal: Principal,
        api: ApiShape,
        body: bytes | None = None,
    ) -> None:
        """Handle a request to a model: admit it, and proxy it to a replica.

        Args:
            exchange: The client's request.
            principal: Its sender.
            api: Its API.
            body: Its body, if it has been read.

        Raises:
            ApiError: The request was refused, or failed.
        """
        if body is None:
            body = await exchange.read_body()
        options = api, principal.cache_domain, exchange.get_header(b"x-session-affinity")
        if len(body) < LARGE_BODY_BYTES:
            fields = _parse_fields(body, *options)
        else:
            fields = await _parse_large_fields(exchange, body, *options)
        if fields.request_id:
            exchange.set_request_id(fields.request_id)
        is_internal = bool(exchange.internal_route)
        if not is_internal and (PROMPT_ID in fields.raw or self._models.rules[PromptRule]):
            fields = await self._render_prompt(exchange, fields, principal, *options)
        context = self._build_context(exchange, fields, api, principal)
        writer: ResponseWriter = (
            StreamingWriter(exchange) if fields.stream else AggregatingWriter(context, self.memory)
        )
        may_wrap = context.content or context.cascade or self._models.rules[CacheRule]
        if may_wrap or principal.flags or principal.quality != "off" or context.is_sampled:
            writer = self._wrap_writer(writer, context)
        try:
            await self._execute(context, self._filters, writer)
        except (DisconnectedError, SlowReaderError):
            context.status = "cancelled"
            raise
        except ApiError as error:
            context.record_error(error)
            await _end_stream_with_error(exchange, writer, error)
            raise
        except Exception:
            unexpected = internal_error()
            context.trace.error_code = unexpected.code
            await _end_stream_with_error(exchange, writer, unexpected)
            raise
        finally:
            self._on_request_ended(context)
            is_started = exchange.status is not None
            context.close_bill(is_response_started=is_started, is_output_sent=writer.has_output)
            if writer.needs_close:
                writer.close()
            complete_filters(context)
            # Break a cycle, since the error's traceback refers to this frame and the whole response.
            context.error = None

    async def _render_prompt(
        self,
        exchange: HttpExchange,
        fields: RequestFields,
        principal: Principal,
        api: ApiShape,
        cache_domain: str,
        session_id: str,
    ) -> RequestFields:
        """Return the fields with the prompt that the request names, or that a rule binds. Raises as `render_prompt`."""
        if not api.generates:
            return fields
        rendered = await render_prompt(self._models, fields, principal, exchange)
        if rendered is None:
            return fields
        fields = await _parse_large_fields(exchange, rendered.body, api, cache_domain, session_id)
        return msgspec.structs.replace(fields, prompt_version=rendered.version)

    async def _handle_internal(
        self, route: str, exchange: HttpExchange, principal: Principal, api: ApiShape, body: bytes
    ) -> None:
        """Handle a request of the gateway itself, to which of all rules only routes apply. Raises as `handle`."""
        exchange.internal_route = route
        await self.handle(exchange, principal, api, body)

    def _wrap_writer(self, writer: ResponseWriter, context: RequestContext) -> ResponseWriter:
        """Return a writer that filters, keeps, paces or judges the response, as rules and flags of its sender say."""
        if isinstance(writer, StreamingWriter):
            writer = pace_stream(writer, context.principal.flags) or writer
        if self.traffic_sampler is not None and context.is_sampled:
            writer = self.traffic_sampler.watch(writer, context)
        if self.answer_sampler is not None and context.principal.quality != "off":
            writer = self.answer_sampler.watch(writer, context)
        if context.content is not None and context.content.moderates("output"):
            writer = ModerationWriter(writer, context, self._moderator)
        if context.content is not None and context.content.filters_output:
            writer = ContentFilterWriter(writer, context, context.content)
        # Answers in Redis may reach a disk, and they are kept as they are before they are filtered.
        is_stored = self._config.limits.redis is not None
        may_keep = context.content is None or not (is_stored and context.content.filters_storage)
        cache, semantic = self.cache, self.semantic_cache
        is_internal = bool(context.exchange.internal_route)
        has_rules = may_keep and not is_internal and self._models.rules[CacheRule]
        if cache is not None and semantic is not None and has_rules:
            rule = self._find_rule(
                CacheRule, context.principal, context.exchange, context.fields, context.pool
            )
            if rule is not None and isinstance(rule.config, CacheRule):
                writer = CachingWriter(cache, writer, context, rule.config, rule.name, semantic)
        if context.cascade is not None:
            can_escalate = partial(self._can_escalate, context)
            writer = CascadeWriter(
                writer, context, context.cascade, can_escalate, self._judge_caller
            )
        return writer

    def _find_rule(
        self,
        kind: type[RequestConditions],
        principal: Principal,
        exchange: HttpExchange,
        fields: RequestFields,
        pool: Pool,
    ) -> RequestRule | None:
        """Return the first rule of a kind that matches a request."""
        return self._models.find_rule(
            kind, principal, exchange.headers, fields, exchange.request_id, pool
        )

    def _build_context(
        self, exchange: HttpExchange, fields: RequestFields, api: ApiShape, principal: Principal
    ) -> RequestContext:
        """Resolve the model and build the request's context. Raises ApiError if the model cannot serve it."""
        if not fields.model:
            deployment = find_deployment(exchange.requested_path)
            name = deployment or self._models.find_only_model(principal, api.tasks)
            fields = msgspec.structs.replace(fields, model=name)
        target = self._models.resolve_target(
            fields.model, principal, exchange.headers, fields, exchange.request_id
        )
        if NO_SPECULATION_FLAG in principal.flags and api.generates:
            fields.raw["speculation"] = Raw(b"false")
        pool = target.pool
        if target.route_name and not (target.refusal or target.max_cached_age_s):
            exchange.extra_headers.append((MODEL_HEADER, pool.model.encode()))
        truncation = None
        if self._models.rules[TruncationRule] or "truncation" in fields.raw:
            truncation = self._find_truncation(exchange, fields, api, pool, principal)
        unsupporting = _check_pool(pool, fields, api)
        if target.adapter is not None:
            unsupporting |= find_replicas_without_adapters(pool)
        content = None
        if self._models.rules[ContentRule]:
            content = self._find_content(exchange, fields, pool, principal)
        now, arrived_at = self._clock(), exchange.arrived_at
        context = RequestContext(
            exchange,
            fields,
            api,
            pool,
            f"{api.id_prefix}-{exchange.unique_id}",
            principal,
            is_measured=exchange.internal_route != QUALITY_ROUTE,
            tier=min(principal.tier + fields.priority, len(TIERS) - 1),  # the client may lower it
            route_name=exchange.internal_route or target.route_name,
            route_reason=target.reason,
            has_fallbacks=target.has_fallbacks,
            assigned_version=target.version,
            adapter=target.adapter,
            deadline=arrived_at + min(fields.timeout_s, self._max_request_s),
            start_wait_s=find_start_wait_s(
                exchange.headers, self._config.cold_start, is_stream=fields.stream
            ),
            response_headers=exchange.extra_headers,
            unsuitable_replicas=unsupporting,
            trace=RequestTrace(arrived_at=arrived_at, parsed_at=now, prompt=fields.prompt_version),
            started_at=time.time() - (now - arrived_at),
            content=content,
            truncation=truncation,
        )
        if exchange.batch_line is not None:
            context.become_line(exchange.batch_line)
        if target.decisions or self._models.flags.declared:
            self._explain_decisions(context, target)
        key = fields.model, principal.project
        if (sampler := self.traffic_sampler) and now >= sampler.due_at[key]:
            context.is_sampled = True
        return context

    def _find_truncation(
        self,
        exchange: HttpExchange,
        fields: RequestFields,
        api: ApiShape,
        pool: Pool,
        principal: Principal,
    ) -> TruncationRule | None:
        """Return how a chat becomes shorter that is too long; None to leave it to the replica.

        A rule that shortens marks the chat as one that may be too long.
        """
        if api is not CHAT or exchange.internal_route:
            return None
        asked = bytes(fields.raw.get("truncation", b""))
        if asked == b'"disabled"':
            return None
        matched = self._find_rule(TruncationRule, principal, exchange, fields, pool)
        if matched is not None and isinstance(matched.config, TruncationRule):
            rule = msgspec.structs.replace(matched.config, name=matched.name)
            if rule.policy == "refuse":
                fields.raw.pop("truncation", None)
                return None
            fields.raw["truncation"] = Raw(b'"auto"')
            return rule
        kinds = {replica.kind for replica in pool.replicas.values()}
        return TruncationRule() if asked == b'"auto"' and kinds - {"argosy"} else None

    def _explain_decisions(self, context: RequestContext, target: RouteTarget) -> None:
        """Record the decisions of classifiers, and the variants of the feature flags, for a request."""
        if target.decisions:
            self._apply_decisions(context, target)
        context.trace.flags = self._models.explain_flags(
            context.principal,
            context.exchange.headers,
            context.fields,
            context.exchange.request_id,
        )

    def _find_content(
        self, exchange: HttpExchange, fields: RequestFields, pool: Pool, principal: Principal
    ) -> ContentSession | None:
        """Return the content filters of a request; None if no rule matches."""
        rule = self._find_rule(ContentRule, principal, exchange, fields, pool)
        if rule is None or exchange.internal_route:
            return None
        session = ContentSession(rule)
        if session.filters_storage:
            exchange.filter_stored = session.filter_stored
        return session

    def _on_request_admitted(self, context: RequestContext) -> None:
        """Let a request count in the comparison of versions, and copy it if the route of its pool says so."""
        outcomes = self._outcomes if context.adapter is None else self._adapter_meter
        if outcomes is None or context.is_copy or not context.is_measured:
            return
        try:
            outcomes.on_request_admitted(context)
            if self._shadow_traffic is not None:
                self._shadow_traffic.copy(context)
        except Exception:
            log.exception("measurement_failed", model=context.pool.model)

    def _on_request_ended(self, context: RequestContext) -> None:
        """Measure a request for the comparison of versions, before its output is forgotten, and sample it."""
        if self.traffic_sampler is not None and context.is_sampled:
            self.traffic_sampler.add(context)
        outcomes = self._outcomes if context.adapter is None else self._adapter_meter
        if outcomes is None or not context.is_measured:
            return
        try:
            outcomes.on_request_ended(context)
            if self._shadow_traffic is not None:
                self._shadow_traffic.on_request_ended(context)
        except Exception:
            log.exception("measurement_failed", model=context.pool.model)

    async def _execute_copy(self, context: RequestContext) -> None:
        """Execute a copy, which passes no filter and whose response is discarded. Raises ApiError as `_execute`."""
        await self._execute(context, (), ResponseWriter())

    async def _execute(
        self,
        context: RequestContext,
        filters: Sequence[RequestFilter],
        writer: ResponseWriter,
    ) -> None:
        """Run the filters and the attempts, until the response ends, the client disconnects or the deadline passes.

        Raises:
            ApiError: The request failed before or during the response.
            DisconnectedError: The client disconnected.
            SlowReaderError: The client was disconnected because it did not read.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a coroutine
        continuation = StreamContinuation(context.fields, context.api.path, context.delivered)
        relay = ResponseRelay(
            context,
            writer,
            continuation,
            self._driver,
            task=task,
            settings=self._config,
            fast_path=self._fast_path,
        )
        deadline_timer = None
        if context.deadline < math.inf:
            remaining_s = max(0.0, context.deadline - self._clock())
            deadline_timer = asyncio.get_running_loop().call_later(remaining_s, relay.on_deadline)
        context.exchange.set_listener(relay)
        context.take_back_stream = relay.take_back_stream
        self._relays.add(relay)
        context.pool.active_requests += 1
        try:
            if await run_filters(filters, context):
                await self._admit(context, relay)
                if not (isinstance(writer, WrappingWriter) and await writer.replay()):
                    if context.follow_later_routes is not None:
                        await context.follow_later_routes(context, relay, writer)
                    if context.refusal:
                        raise ApiError(
                            503, "refused_by_route", context.refusal, retry_after_s=RETRY_AFTER_S
                        )
                    if isinstance(writer, CascadeWriter):
                        await self._answer_by_cascade(context, continuation, relay, writer)
                    else:
                        await self._answer(context, continuation, relay, writer)
        except asyncio.CancelledError:
            task.uncancel()
            if context.end_reason is not EndReason.STOPPED:
                raise _cancellation_error(context) from None
        finally:
            if deadline_timer is not None:
                deadline_timer.cancel()
            self._release(context, relay)
        if context.exchange.response_complete:
            return  # a buffered response, or the response of a filter
        await writer.finish()
        is_stopped = context.end_reason is EndReason.STOPPED
        context.status = "stopped" if is_stopped else context.final_status

    async def _answer(
        self,
        context: RequestContext,
        continuation: StreamContinuation,
        relay: ResponseRelay,
        writer: ResponseWriter,
    ) -> None:
        """Let a replica of the model answer, or else one of its fallbacks. Raises ApiError as `_execute`."""
        while True:
            proxy = RequestProxy(
                self._proxy_config, self._driver, context, continuation, relay, writer
            )
            if context.has_fallbacks and context.placement is not None:
                context.placement.can_fall_back = partial(self._can_fall_back, context, writer)
            try:
                await proxy.run()
            except ApiError as error:
                if not (context.has_fallbacks and proxy.permits_fallback):
                    raise
                target = await self._find_fallback(context)
                if target is None:
                    raise
                context.record_error(error)
                log.warning(
                    "request_fell_back",
                    requested_model=context.fields.model,
                    failed=context.pool.model,
                    model=target.pool.model,
                    reason=error.message,
                )
                await self._fall_back(context, relay, target)
                continuation.restart()
                writer.release()
            else:
                return

    async def _answer_by_cascade(
        self,
        context: RequestContext,
        continuation: StreamContinuation,
        relay: ResponseRelay,
        writer: CascadeWriter,
    ) -> None:
        """Let a smaller model answer, or else the requested one. Raises ApiError as `_execute`."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a coroutine
        writer.abandon = relay.abandon
        writer.request_logprobs()
        try:
            await self._answer(context, continuation, relay, writer)
            if context.end_reason is EndReason.ESCALATED:
                await asyncio.sleep(0)  # the task was cancelled when the stream had just ended
            elif context.end_reason is not None or not writer.is_holding or await writer.judge():
                return
        except EscalationError:
            pass
        except asyncio.CancelledError:
            if context.end_reason is not EndReason.ESCALATED:
                raise
            task.uncancel()
        finally:
            writer.abandon = None  # a reference cycle
        context.end_reason = None
        await self._escalate(context, relay, writer)
        continuation.restart()
        writer.release()
        await self._answer(context, continuation, relay, writer)

    def _apply_decisions(self, context: RequestContext, target: RouteTarget) -> None:
        """Record the decisions of routes, and how the last one continues."""
        exchange, fields, headers = context.exchange, context.fields, context.response_headers
        headers[:] = [header for header in headers if header[0] != DEGRADED_HEADER]
        context.trace.routing = [decision.to_dict() for _, decision in target.decisions]
        context.refusal, context.follow_later_routes = target.refusal, None
        context.max_cached_age_s = target.max_cached_age_s
        for route, decision in target.decisions[-1:]:
            if decision.is_taken and isinstance(route.config, RouteConfig):
                context.cascade, context.conversation = route.config.cascade, decision.conversation
                # A judge would have to be judged, and a line has one row in the ledger.
                if exchange.internal_route or exchange.batch_line is not None:
                    context.cascade = None
            if decision.is_degraded:
                headers.append((DEGRADED_HEADER, quote(decision.route).encode()))
        if target.max_cached_age_s:
            later = self._models.find_target(
                *(fields.model, context.principal, exchange.headers, fields, exchange.request_id),
                failed=(CACHE_MISS,),
            )
            context.follow_later_routes = partial(self._follow_later_routes, later)

    async def _follow_later_routes(
        self,
        target: RouteTarget,
        context: RequestContext,
        relay: ResponseRelay,
        writer: ResponseWriter,
    ) -> None:
        """Let the model of a later route answer, because the cache has no answer of the age that a route permits.

        Raises:
            ApiError: The model cannot serve the request, or its limits reject it.
        """
        rows = context.trace.routing
        self._apply_decisions(context, target)
        context.trace.routing = rows + context.trace.routing
        context.cascade = None  # its writer is not there
        if not target.refusal and target.pool is not context.pool:
            context.unsuitable_replicas = _check_pool(target.pool, context.fields, context.api)
            await self._fall_back(context, relay, target)
            writer.release()

    def _can_escalate(self, context: RequestContext) -> bool:
        """Return whether the requested model can answer now in place of the smaller one."""
        selected = self._select_fallback(context, [*context.failed_models, context.pool.model])
        if selected is None:
            return False
        return selected[0].pool.expected_wait_s(context.tier, self._clock()) is not None

    async def _escalate(
        self, context: RequestContext, relay: ResponseRelay, writer: CascadeWriter
    ) -> None:
        """Bill the smaller model's answer, and count the request for the requested model.

        Raises:
            ApiError: The limits reject it, or it can no longer answer.
        """
        target = await self._find_fallback(context)
        if target is None:
            message = "The model cannot answer any more. Try again shortly."
            raise ApiError(502, "upstream_failed", message)
        self._models.keep_conversation(context.conversation)
        relay.detach()
        usage, rates = context.delivered.usage, context.rates
        context.bill = compute_bill(
            RequestEnd(
                status="completed",
                generated=usage,
                is_response_started=True,
                is_output_sent=True,
                is_dispatched=True,
            ),
            rates,
        )
        row = msgspec.structs.replace(
            begin_usage_row(context),
            request=f"{context.response_id}{DRAFT_SUFFIX}",
            replica=context.replica_name,
            digest=context.model_digest,
        )
        context.draft = row, rates
        context.record_verdict(
            context.trace.routing[-1]["cascade"]
            | {
                "draft": {
                    "model": context.model,
                    "input_tokens": usage.prompt_tokens,
                    "output_tokens": usage.output_tokens,
                    "nano_dollars": context.bill.nano_dollars,
                }
            }
        )
        reason = f"route {context.route_name}: {writer.reason}"
        route_name = context.route_name
        await self._fall_back(context, relay, target._replace(route_name=route_name, reason=reason))
        context.bill, context.draft = Bill(), None

    def _can_fall_back(self, context: RequestContext, writer: ResponseWriter) -> bool:
        failed = [*context.failed_models, context.pool.model]
        return not writer.has_output and self._select_fallback(context, failed) is not None

    def _select_fallback(
        self, context: RequestContext, failed: list[str]
    ) -> tuple[RouteTarget, set[str]] | None:
        """Return the first model that is not in `failed` and can serve a request, with its unsuitable replicas.

        Adds the models to `failed` that cannot serve it. Returns None if none is left, or if the requested model is not
        in the settings any more.
        """
        exchange, fields, principal = context.exchange, context.fields, context.principal
        while True:
            try:
                target = self._models.find_target(
                    fields.model, principal, exchange.headers, fields, exchange.request_id, failed
                )
            except ApiError:
                return None
            if target.pool.model in failed:
                return None
            try:
                return target, _check_pool(target.pool, fields, context.api)
            except ApiError:
                failed.append(target.pool.model)

    async def _find_fallback(self, context: RequestContext) -> RouteTarget | None:
        """Return the first model that can answer in place of one that could not; None if there is none."""
        failed = [*context.failed_models, context.pool.model]
        while (selected := self._select_fallback(context, failed)) is not None:
            target, unsupporting = selected
            try:
                if context.api.generates:
                    await self._request_checker.check(target.pool, context.fields, context.api.path)
            except ApiError:
                failed.append(target.pool.model)
            else:
                context.unsuitable_replicas = unsupporting
                return target
        return None

    async def _fall_back(
        self, context: RequestContext, relay: ResponseRelay, target: RouteTarget
    ) -> None:
        """Count a request for the model that answers in place of its own. Raises ApiError if its limits reject it."""
        pool, headers = target.pool, context.response_headers
        if target.passed_over is not None:
            target.passed_over.record_unserved(self._clock())
        self._on_request_ended(context)
        if context.placement is not None:
            self._driver.end(context.placement)
        relay.restart()
        context.fall_back(pool, target.route_name, target.reason, target.version)
        headers[:] = [header for header in headers if header[0] != MODEL_HEADER]
        headers.append((MODEL_HEADER, pool.model.encode()))
        for each in context.filters:
            await each.on_fallback(context)
        self._on_request_admitted(context)

    async def _admit(self, context: RequestContext, relay: ResponseRelay) -> None:
        """Check what a native replica would refuse, and count the request as admitted by the filters.

        Raises:
            ApiError: The replica would refuse the request.
        """
        if context.api.generates:
            await self._request_checker.check(context.pool, context.fields, context.api.path)
        if context.content is not None and context.content.moderates("input"):
            await self._moderator.review_prompt(context)
        context.trace.admitted_at = self._clock()
        self._on_request_admitted(context)
        if context.fields.stream:
            self._early_starts.add(relay)

    def _release(self, context: RequestContext, relay: ResponseRelay) -> None:
        """Charge what was delivered, and free what a request holds."""
        self._relays.discard(relay)
        if context.fields.stream:
            self._early_starts.remove(relay)
        context.pool.active_requests -= 1  # it may be another one now
        relay.end()
        if context.placement is not None:
            self._driver.end(context.placement)
            context.placement.can_fall_back = None  # a reference cycle
        context.exchange.set_listener(None)
        context.take_back_stream = None  # a reference cycle


def _parse_fields(body: bytes, api: ApiShape, cache_domain: str, session_id: str) -> RequestFields:
    """Parse the body of a request. Raises as `parse_request_fields` does."""
    if api.generates:
        return parse_request_fields(body, api.prompt_fields[0], cache_domain, session_id)
    return parse_pooled_fields(
        body,
        api.prompt_fields,
        api.query_fields,
        cache_domain=cache_domain,
        session_id=session_id,
    )


async def _parse_large_fields(
    exchange: HttpExchange, body: bytes, api: ApiShape, cache_domain: str, session_id: str
) -> RequestFields:
    """Parse and measure a body that may be large. Raises as `parse_request_fields` does."""

    def parse(body: bytes) -> RequestFields:
        return measure_prompt(_parse_fields(body, api, cache_domain, session_id))

    return await exchange.parse_body(body, parse)


def _check_pool(pool: Pool, fields: RequestFields, api: ApiShape) -> set[str]:
    """Check that a model can serve a request, and return its replicas that do not enforce its constraint.

    Raises:
        ApiError: The model has another task, a shorter context, or no such replica.
    """
    check_task(pool, fields.model, api)
    check_prompt(pool, fields)
    return find_unsupporting_replicas(pool, fields, api.path) if api.generates else set()


async def _end_stream_with_error(
    exchange: HttpExchange, writer: ResponseWriter, error: ApiError
) -> None:
    """Send the error as the last event of a stream that has started. The caller sends other error responses."""
    if exchange.status is not None and not exchange.response_complete:
        writer.flush()
        exchange.write_nowait(format_event(error.encode_body(exchange.request_id)))
        await exchange.end_stream()


def _cancellation_error(context: RequestContext) -> Exception:
    """Return the exception for a request that was cancelled without final events for its client."""
    match context.end_reason:
        case EndReason.CLIENT_LEFT:
            return DisconnectedError()
        case EndReason.SLOW_CLIENT:
            return SlowReaderError()
        case EndReason.DEADLINE:
            return _deadline_exceeded_error(context)
    message = "The gateway is shutting down. Send the request again."
    return ApiError(503, "draining", message, retry_after_s=RETRY_AFTER_S)


def _deadline_exceeded_error(context: RequestContext) -> ApiError:
    """Record that the deadline ended the request before its first token, and build the 504 error."""
    context.status = "stopped"
    # Otherwise SDKs would retry with the same short timeout.
    context.response_headers.append((b"x-should-retry", b"false"))
    allowed_s = context.deadline - context.exchange.arrived_at
    message = f"The response had not started within {allowed_s:g} s, the limit of timeout_s or of the server."
    return ApiError(504, "deadline_exceeded", f"{message} Allow more, or try again later.")


def _abort_late(response: UpstreamResponse) -> None:
    response.abort("no response within the time limit")
