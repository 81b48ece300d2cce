"""The first stage in and the last one out: writes down what happens, for explanations and metrics."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import sub

import msgspec

from argosy.gateway.request_context import FastPathBudget, RequestContext
from argosy.gateway.request_trace import AttemptTrace, TraceStore
from argosy.policy import AttemptOutcome
from argosy.telemetry import GatewayMetrics

MAX_BUFFERED_INTERVALS = 64
"""Times between tokens that are kept of a stream before the metrics are told."""

MAX_RECORDED_CHOICES = 256
"""So many of a request's choices are told of,"""
MAX_FINISH_REASON_LENGTH = 40
"""with so many characters of why each ended: a replica may say anything."""


class TelemetryFilter:
    """A `Stage`."""

    def __init__(
        self, traces: TraceStore, metrics: GatewayMetrics, clock: Callable[[], float]
    ) -> None:
        self.traces = traces
        self.metrics = metrics
        self.clock = clock

    async def on_request(self, context: RequestContext) -> TelemetryFilterState:
        """See `Stage`."""
        trace = context.trace
        trace.response_id = context.response_id
        trace.request_id = context.exchange.request_id
        trace.model = context.pool.model
        trace.requested_model = context.fields.model
        trace.route_name = context.route_name
        trace.path = context.exchange.path
        trace.stream = context.fields.stream
        trace.principal = context.principal
        trace.started_at = context.started_at
        trace.routing_policy = context.pool.routing_policy
        context.response_headers.append((b"x-argosy-request", trace.response_id.encode()))
        self.traces.add(trace)
        return TelemetryFilterState(self, context)


class TelemetryFilterState(msgspec.Struct, eq=False):
    """A `Visit`."""

    telemetry: TelemetryFilter
    context: RequestContext
    token_intervals_s: list[float] = []
    """Seconds between tokens that the metrics have not been told yet."""

    def fast_path_budget(self) -> FastPathBudget:
        """As far as it likes."""
        return FastPathBudget()

    def on_tokens(self, chunk_times: Sequence[float]) -> None:
        """See `Visit`."""
        trace, gaps = self.context.trace, self.token_intervals_s
        last, trace.last_token_at = trace.last_token_at, chunk_times[-1]
        if last is None:
            trace.first_token_at = chunk_times[0]
        if not trace.stream:
            return
        if last is not None:
            gaps.append(chunk_times[0] - last)
        if len(chunk_times) > 1:
            gaps += map(sub, chunk_times[1:], chunk_times)
        if len(gaps) >= MAX_BUFFERED_INTERVALS:
            self._flush_intervals()

    def on_complete(self) -> None:
        """See `Visit`."""
        stage, context = self.telemetry, self.context
        trace, delivered = context.trace, context.delivered
        now = stage.clock()
        trace.ended_at = now
        trace.status = "replayed" if context.replayed_request_id else context.status
        if context.error is not None:
            trace.error_code = context.error.code
        trace.prompt_tokens = delivered.prompt_tokens
        trace.cached_tokens = delivered.cached_tokens
        trace.output_tokens = delivered.output_tokens
        for choice, reason in itertools.islice(
            delivered.finish_reasons.items(), MAX_RECORDED_CHOICES
        ):
            trace.finish_reasons[choice] = reason[:MAX_FINISH_REASON_LENGTH]
        if self.token_intervals_s:
            self._flush_intervals()
        stage.traces.complete(trace, now)
        self._record_metrics(now)

    def _flush_intervals(self) -> None:
        self.telemetry.metrics.record_inter_token_gaps(
            self.context.trace.model, self.token_intervals_s
        )
        self.token_intervals_s.clear()

    def _record_metrics(self, now: float) -> None:
        metrics, context, trace = self.telemetry.metrics, self.context, self.context.trace
        delivered, model = context.delivered, trace.model
        metrics.record_request_end(
            model,
            trace.principal.tenant,
            trace.status,
            now - trace.arrived_at,
            input_tokens=delivered.prompt_tokens - delivered.cached_tokens,
            cached_tokens=delivered.cached_tokens,
            output_tokens=delivered.output_tokens,
            nano_dollars=context.cost_nano_dollars,
        )
        if trace.error_code:
            metrics.record_error(model, trace.error_code)
        if trace.admitted_at is None:
            for limit in trace.limits:
                if not limit.fits:
                    metrics.record_limit_rejection(model, limit.unit)
        if trace.stream and trace.first_token_at is not None:
            metrics.record_first_token(model, trace.first_token_at - trace.arrived_at)
        if trace.attempts or trace.queued_at is not None:
            until = trace.attempts[0].chosen_at if trace.attempts else now
            metrics.record_queue_wait(
                model, 0.0 if trace.queued_at is None else until - trace.queued_at
            )
        for tried in trace.attempts[1:]:
            self._record_attempt(tried)

    def _record_attempt(self, attempt: AttemptTrace) -> None:
        """One of the attempts after the first."""
        metrics, model = self.telemetry.metrics, self.context.trace.model
        gave = attempt.first_token_at is not None or attempt.outcome == AttemptOutcome.SUCCESS.value
        if attempt.is_hedge:
            metrics.record_hedge(model, won=attempt.first_token_at is not None)
        elif attempt.delivered_tokens and gave:
            metrics.record_failover(model)
        elif attempt.sent_at is not None:  # else it could not go on there
            metrics.record_retry(model)
