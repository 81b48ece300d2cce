"""The first stage in and the last one out: writes down what happens, for explanations and metrics."""

from __future__ import annotations

from collections.abc import Callable

from argosy.gateway.explain import Trace, Traces
from argosy.gateway.journey import Journey
from argosy.telemetry import GatewayMetrics

GAPS = 64
"""Times between tokens that are kept of a stream before the metrics are told."""


class Recorder:
    """A `Stage`."""

    def __init__(self, traces: Traces, metrics: GatewayMetrics, clock: Callable[[], float]) -> None:
        self._traces = traces
        self._metrics = metrics
        self._clock = clock

    async def enter(self, journey: Journey) -> None:
        """See `Stage`."""
        trace, caller = journey.trace, journey.caller
        trace.id = journey.id
        trace.request = journey.exchange.request_id
        trace.model = journey.pool.model
        trace.path = journey.exchange.path
        trace.stream = journey.ask.stream
        trace.organisation = caller.organisation
        trace.project = caller.project
        trace.key = caller.key
        trace.user = caller.user
        trace.tier = caller.tier
        trace.started_at = journey.started_at
        trace.rule = journey.pool.rule
        journey.headers.append((b"x-argosy-request", trace.id.encode()))
        self._traces.begin(trace)

    def counted(self, journey: Journey) -> str | None:
        """See `Stage`."""
        now, trace = self._clock(), journey.trace
        if trace.last is None:
            trace.first = now
        elif trace.stream:
            trace.gaps.append(now - trace.last)
            if len(trace.gaps) >= GAPS:
                self._tell_gaps(trace)
        trace.last = now
        tried = journey.current
        if tried is not None and tried.first is None:
            tried.first = now
        return None

    def leave(self, journey: Journey) -> None:
        """See `Stage`."""
        now, trace, delivered = self._clock(), journey.trace, journey.delivered
        trace.ended = now
        trace.status = journey.status
        if journey.error is not None:
            trace.error = journey.error.code
            if journey.error.status < 500:
                trace.status = "refused"
        trace.prompt_tokens = delivered.prompt_tokens
        trace.cached_tokens = delivered.cached_tokens
        trace.output_tokens = delivered.output_tokens
        trace.finished = delivered.finished
        self._tell_gaps(trace)
        self._traces.end(trace, now)
        self._measure(journey, now)

    def _tell_gaps(self, trace: Trace) -> None:
        self._metrics.next_tokens(trace.model, trace.gaps)
        trace.gaps.clear()

    def _measure(self, journey: Journey, now: float) -> None:
        metrics, trace, delivered = self._metrics, journey.trace, journey.delivered
        model, tenant = trace.model, journey.caller.project
        metrics.ended(model, tenant, trace.status, now - trace.arrived)
        if trace.error:
            metrics.refused(model, trace.error)
        if trace.admitted is None:
            for limit in trace.card.get("limits", ()):
                metrics.limited(model, limit["unit"])
        if trace.stream and trace.first is not None:
            metrics.first_token(model, trace.first - trace.arrived)
        if trace.tries:
            placed = trace.tries[0].at
            metrics.placed(model, 0.0 if trace.queued is None else placed - trace.queued)
        for tried in trace.tries[1:]:
            if tried.hedge:
                metrics.hedged(model, won=tried.first is not None)
            elif tried.told:
                metrics.failed_over(model)
            else:
                metrics.retried(model)
        metrics.used(
            model,
            tenant,
            input_tokens=delivered.prompt_tokens - delivered.cached_tokens,
            cached_tokens=delivered.cached_tokens,
            output_tokens=delivered.output_tokens,
            nano_dollars=journey.nano_dollars,
        )
