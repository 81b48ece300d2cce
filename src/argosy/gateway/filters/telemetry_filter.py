"""First filter of each request, which records its trace and its metrics."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from http import HTTPStatus
from operator import sub

import msgspec

from argosy.gateway.request_context import FastPathBudget, RequestContext
from argosy.gateway.request_trace import TraceStore
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
MAX_FINISH_REASON_LENGTH = 40
"""Maximum length of a recorded finish reason, since replicas may send any text."""


class TelemetryFilter:
    """Filter that records the trace of each request and reports its metrics.

    Args:
        traces: Store of recent traces.
        metrics: Metrics of the gateway.
        clock: Returns the time in seconds that traces use.
        series: Time series, which count the same events as the metrics. None if the gateway keeps none.
    """

    def __init__(
        self,
        traces: TraceStore,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        series: SeriesRecorder | None = None,
    ) -> None:
        self.traces = traces
        self.metrics = metrics
        self.clock = clock
        self.series = series

    async def on_request(self, context: RequestContext) -> TelemetryFilterState:
        """Start the trace and add the request id to the response headers."""
        trace = context.trace
        trace.response_id = context.response_id
        trace.request_id = context.exchange.request_id
        trace.model = context.pool.model
        trace.requested_model = context.fields.model
        trace.route_name = context.route_name
        trace.route_reason = context.route_reason
        trace.path = context.exchange.path
        trace.stream = context.fields.stream
        trace.principal = context.principal
        trace.started_at = context.started_at
        trace.routing_policy = context.pool.routing_policy
        context.response_headers.append((b"x-argosy-request", trace.response_id.encode()))
        self.traces.add(trace)
        return TelemetryFilterState(self, context)


class TelemetryFilterState(msgspec.Struct, eq=False):
    """Trace and token intervals of one request, a `FilterState`."""

    telemetry: TelemetryFilter
    context: RequestContext
    token_intervals_s: list[float] = []
    """Seconds between tokens, not yet recorded in the metrics."""
    flush_at: float = 0.0
    """Time from which the next token records them."""
    recorded_tokens: int = 0
    """Output tokens that the series have counted."""

    def fast_path_budget(self) -> FastPathBudget:
        """Return an unlimited budget, since chunk times arrive in batches."""
        return FastPathBudget()

    def on_tokens(self, chunk_times: Sequence[float]) -> None:
        trace, intervals_s = self.context.trace, self.token_intervals_s
        last_token_at, trace.last_token_at = trace.last_token_at, chunk_times[-1]
        if last_token_at is None:
            trace.first_token_at = chunk_times[0]
        if not trace.stream:
            return
        if last_token_at is not None:
            intervals_s.append(chunk_times[0] - last_token_at)
        if len(chunk_times) > 1:
            intervals_s += map(sub, chunk_times[1:], chunk_times)
        if len(intervals_s) >= MAX_BUFFERED_INTERVALS or chunk_times[-1] >= self.flush_at:
            self._flush_progress(chunk_times[-1])

    def on_complete(self) -> None:
        telemetry, context = self.telemetry, self.context
        trace, delivered = context.trace, context.delivered
        now = telemetry.clock()
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
        if self.token_intervals_s:
            self._flush_intervals()
        telemetry.traces.complete(trace, now)
        self._record_metrics(now)

    def _flush_progress(self, now: float) -> None:
        """Record the intervals, and in the series also the tokens, of a running stream."""
        self.flush_at = now + MAX_BUFFER_AGE_S
        if self.token_intervals_s:
            self._flush_intervals()
        series, context = self.telemetry.series, self.context
        if series is not None:
            tokens = context.delivered.output_tokens
            series.record_output(
                context.trace.model,
                context.principal.tenant,
                context.replica_name,
                tokens - self.recorded_tokens,
            )
            self.recorded_tokens = tokens

    def _flush_intervals(self) -> None:
        self.token_intervals_s.sort()  # which both recordings use
        telemetry, model = self.telemetry, self.context.trace.model
        telemetry.metrics.record_inter_token_gaps(model, self.token_intervals_s)
        if telemetry.series is not None:
            telemetry.series.record_intervals(model, self.token_intervals_s)
        self.token_intervals_s.clear()

    def _record_metrics(self, now: float) -> None:
        metrics, context, trace = self.telemetry.metrics, self.context, self.context.trace
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
        if trace.admitted_at is None:
            for limit in trace.limits:
                if not limit.fits:
                    metrics.record_limit_rejection(model, limit.unit)
        ttft_s = queue_s = None
        if trace.stream and trace.first_token_at is not None:
            ttft_s = trace.first_token_at - trace.arrived_at
            metrics.record_first_token(model, ttft_s)
        if trace.attempts or trace.queued_at is not None:
            queue_end = trace.attempts[0].chosen_at if trace.attempts else now
            queue_s = 0.0 if trace.queued_at is None else queue_end - trace.queued_at
            metrics.record_queue_wait(model, queue_s)
        if self.telemetry.series is not None:
            self._record_series(self.telemetry.series, now, ttft_s, queue_s)
        for _ in trace.pauses:
            metrics.record_pause(model)
        for previous, attempt in itertools.pairwise(trace.attempts):
            if previous.outcome != "paused":
                self._record_attempt(attempt)

    def _record_series(
        self, series: SeriesRecorder, now: float, ttft_s: float | None, queue_s: float | None
    ) -> None:
        context, trace = self.context, self.context.trace
        usage = trace.tokens
        series.record_request(
            RequestSample(
                model=trace.model,
                tenant=trace.principal.tenant,
                replica=context.replica_name,
                outcome=_series_outcome(context),
                duration_s=now - trace.arrived_at,
                ttft_s=ttft_s,
                queue_s=queue_s,
                input_tokens=usage.uncached_tokens,
                cached_tokens=usage.cached_tokens,
                output_tokens=usage.output_tokens - self.recorded_tokens,
                cost_nano_dollars=context.bill.nano_dollars,
            )
        )

    def _record_attempt(self, attempt: AttemptRecord) -> None:
        """Record an attempt after the first as a hedge, a failover or a retry."""
        metrics, model = self.telemetry.metrics, self.context.trace.model
        has_output = (
            attempt.first_token_at is not None or attempt.outcome == AttemptOutcome.SUCCESS.value
        )
        if attempt.is_hedge:
            metrics.record_hedge(model, won=attempt.first_token_at is not None)
        elif attempt.delivered_tokens and has_output:
            metrics.record_failover(model)
        elif attempt.sent_at is not None:  # an unsent attempt is no retry
            metrics.record_retry(model)


def _series_outcome(context: RequestContext) -> str:
    """Return the class in which the series count a request. A reached limit is apart from an invalid request."""
    is_limited = context.error is not None and context.error.status == HTTPStatus.TOO_MANY_REQUESTS
    return "limited" if context.status == "refused" and is_limited else context.status
