"""First filter of each request, which records its trace and its metrics."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from http import HTTPStatus
from operator import sub

from argosy.gateway.objective_recorder import ObjectiveRecorder
from argosy.gateway.prefix_doctor import PrefixDoctor
from argosy.gateway.request_context import RequestContext
from argosy.gateway.request_trace import TraceStore
from argosy.gateway.trace_context import read_trace_context
from argosy.gateway.tracing import SpanExporter
from argosy.policy import AttemptOutcome
from argosy.policy.placement import AttemptRecord
from argosy.series import RequestSample, SeriesRecorder
from argosy.telemetry import GatewayMetrics

MAX_BUFFERED_INTERVALS = 64
"""Token intervals that are buffered per stream before they are recorded in the metrics."""

MAX_BUFFER_AGE_S = 1.0
"""Time after which the intervals and tokens of a running stream are recorded, so that charts follow it."""

MAX_RECORDED_CHOICES = 256
"""Maximum number of choices per request whose finish reasons are recorded."""
ESCALATED = "escalated"
"""Outcome of an attempt whose answer a larger model has replaced, and status of its usage in the metrics."""
MAX_FINISH_REASON_LENGTH = 40
"""Maximum length of a recorded finish reason, since replicas may send any text."""


class TelemetryFilter:
    """Filter that records the trace of each request and reports its metrics."""

    def __init__(
        self,
        traces: TraceStore,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        series: SeriesRecorder | None = None,
        exporter: SpanExporter | None = None,
        prefix_doctor: PrefixDoctor | None = None,
        *,
        objectives: ObjectiveRecorder | None = None,
    ) -> None:
        self._traces = traces
        self._metrics = metrics
        self._clock = clock
        self._series = series
        self._exporter = exporter
        self._prefix_doctor = prefix_doctor
        self._objectives = objectives

    async def on_request(self, context: RequestContext) -> bool:
        """Start the trace and add the request id to the response headers."""
        trace = context.trace
        trace.response_id = context.response_id
        trace.request_id = context.exchange.request_id
        trace.requested_model = context.fields.model
        _record_route(context)
        trace.path = context.exchange.path
        trace.stream = context.fields.stream
        trace.principal = context.principal
        trace.started_at = context.started_at
        if self._exporter is not None:
            trace.trace_context = read_trace_context(context.exchange.headers, context.response_id)
        context.response_headers.append((b"x-argosy-request", trace.response_id.encode()))
        self._traces.add(trace)
        for decision in trace.routing:
            self._metrics.route_decisions.add(
                (
                    decision["route"],
                    decision["decision"],
                    "true" if decision["dry_run"] else "false",
                )
            )
        return True

    def on_tokens(self, context: RequestContext, chunk_times: Sequence[float]) -> None:
        """Record the times of chunks with tokens."""
        trace, intervals_s = context.trace, context.token_intervals_s
        last_token_at, trace.last_token_at = trace.last_token_at, chunk_times[-1]
        if last_token_at is None:
            trace.first_token_at = chunk_times[0]
        if not trace.stream:
            return
        if last_token_at is not None:
            intervals_s.append(chunk_times[0] - last_token_at)
        if len(chunk_times) > 1:
            intervals_s += map(sub, chunk_times[1:], chunk_times)
        age_s = chunk_times[-1] - context.intervals_recorded_at
        if age_s >= MAX_BUFFER_AGE_S or len(intervals_s) >= MAX_BUFFERED_INTERVALS:
            self._record_progress(context, chunk_times[-1])

    async def on_fallback(self, context: RequestContext) -> None:
        """Record the model that answers now, and the usage of a cascade's smaller model."""
        if context.draft is not None:
            bill, trace = context.bill, context.trace
            self._metrics.record_request_end(
                trace.model,
                trace.principal.tenant,
                ESCALATED,
                self._clock() - trace.arrived_at,
                bill.usage,
                bill.nano_dollars,
            )
            self._metrics.route_decisions.add((trace.route_name, ESCALATED, "false"))
            for attempt in trace.earlier_attempts[-1:]:
                attempt.outcome = ESCALATED
            trace.first_token_at = trace.last_token_at = None
            context.token_intervals_s.clear()
        _record_route(context)

    def on_complete(self, context: RequestContext) -> None:
        """Complete the trace and record the metrics of an ended request."""
        trace, delivered = context.trace, context.delivered
        now = self._clock()
        trace.ended_at = now
        trace.status = "replayed" if context.replayed_request_id else context.status
        if context.error is not None:
            trace.error_code = context.error.code
        trace.tokens = context.bill.usage
        trace.report = delivered.report
        for choice, reason in itertools.islice(
            delivered.finish_reasons.items(), MAX_RECORDED_CHOICES
        ):
            trace.finish_reasons[choice] = reason[:MAX_FINISH_REASON_LENGTH]
            if choice in delivered.early_stops:
                trace.stop_reasons[choice] = delivered.early_stops[choice]
        if context.token_intervals_s:
            self._record_intervals(context)
        if self._exporter is not None:
            self._exporter.add(context)
        is_measured = context.is_measured
        if self._prefix_doctor is not None and is_measured:
            self._prefix_doctor.add(context)
        self._traces.complete(trace, now)
        if context.batch_line is not None:  # its times mean nothing without a waiting client
            self._metrics.record_request_end(
                *(trace.model, trace.principal.tenant, trace.status, None),
                *(trace.tokens, context.bill.nano_dollars),
            )
            return
        self._record_metrics(context, now)
        if self._objectives is not None and self._objectives.objectives and is_measured:
            self._objectives.record_request(context, now)

    def _record_progress(self, context: RequestContext, now: float) -> None:
        """Record the intervals, and in the series also the tokens, of a running stream."""
        context.intervals_recorded_at = now
        if context.token_intervals_s:
            self._record_intervals(context)
        if self._series is not None:
            tokens = context.delivered.output_tokens
            self._series.record_output(
                context.trace.model,
                context.principal.tenant,
                context.replica_name,
                tokens - context.series_tokens,
            )
            context.series_tokens = tokens

    def _record_intervals(self, context: RequestContext) -> None:
        intervals_s, model = context.token_intervals_s, context.trace.model
        intervals_s.sort()  # which both recordings use
        self._metrics.itl.observe_many((model,), intervals_s)
        if self._series is not None:
            self._series.record_intervals(model, intervals_s)
        if self._objectives is not None and self._objectives.objectives:
            self._objectives.record_intervals(context, intervals_s)
        intervals_s.clear()

    def _record_metrics(self, context: RequestContext, now: float) -> None:
        metrics, trace = self._metrics, context.trace
        model = trace.model
        metrics.record_request_end(
            model,
            trace.principal.tenant,
            trace.status,
            now - trace.arrived_at,
            trace.tokens,
            context.bill.nano_dollars,
        )
        if trace.error_code:
            metrics.record_error(model, trace.error_code)
        if trace.version:
            metrics.record_version(model, trace.version)
        if trace.admitted_at is None:
            for limit in trace.limits:
                if not limit.fits:
                    metrics.limit_rejections.add((model, limit.unit))
        ttft_s = queue_s = None
        if trace.stream and trace.first_token_at is not None:
            ttft_s = trace.first_token_at - trace.arrived_at
            metrics.ttft.observe((model,), ttft_s)
        if trace.attempts or trace.queued_at is not None:
            queue_end = trace.attempts[0].chosen_at if trace.attempts else now
            queue_s = 0.0 if trace.queued_at is None else queue_end - trace.queued_at
            metrics.queue.observe((model,), queue_s)
        if self._series is not None and context.is_measured:
            error, usage = context.error, trace.tokens
            # A reached limit is apart from an invalid request.
            is_limited = error is not None and error.status == HTTPStatus.TOO_MANY_REQUESTS
            sample = RequestSample(
                model=model,
                tenant=trace.principal.tenant,
                replica=context.replica_name,
                outcome="limited" if context.status == "refused" and is_limited else context.status,
                duration_s=now - trace.arrived_at,
                ttft_s=ttft_s,
                queue_s=queue_s,
                input_tokens=usage.uncached_tokens,
                cached_tokens=usage.cached_tokens,
                output_tokens=usage.output_tokens - context.series_tokens,
                cost_nano_dollars=context.bill.nano_dollars,
                total_output_tokens=usage.output_tokens,
                version=trace.version,
                finish_reason=trace.finish_reasons.get(0, ""),
            )
            self._series.record_request(sample)
        if trace.pauses:
            metrics.pauses.add((model,), len(trace.pauses))
        for previous, attempt in itertools.pairwise((*trace.earlier_attempts, *trace.attempts)):
            if previous.outcome not in {"paused", ESCALATED}:
                self._record_attempt(model, attempt)

    def _record_attempt(self, model: str, attempt: AttemptRecord) -> None:
        """Record an attempt after the first as a hedge, a failover or a retry."""
        metrics = self._metrics
        has_output = (
            attempt.first_token_at is not None or attempt.outcome == AttemptOutcome.SUCCESS.value
        )
        if attempt.is_hedge:
            won = attempt.first_token_at is not None
            metrics.hedges.add((model, "true" if won else "false"))
        elif attempt.delivered_tokens and has_output:
            metrics.failovers.add((model,))
        elif attempt.sent_at is not None:  # an unsent attempt is no retry
            metrics.retries.add((model,))


def _record_route(context: RequestContext) -> None:
    trace, adapter = context.trace, context.adapter
    trace.model = context.pool.model if adapter is None else adapter.name
    trace.adapter = "" if adapter is None else adapter.digest
    trace.routing_policy = context.pool.routing_policy
    trace.route_name, trace.route_reason = context.route_name, context.route_reason
    context.announce_version()
