"""The first stage in and the last one out: writes down what happens, for explanations and metrics."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import sub

import msgspec

from argosy.gateway.request_context import Alone, Journey
from argosy.gateway.request_trace import Traces, Try
from argosy.policy import Outcome
from argosy.telemetry import GatewayMetrics

GAPS = 64
"""Times between tokens that are kept of a stream before the metrics are told."""

MOST_CHOICES = 256
"""So many of a request's choices are told of,"""
LONGEST_REASON = 40
"""with so many characters of why each ended: a replica may say anything."""


class Recorder:
    """A `Stage`."""

    def __init__(self, traces: Traces, metrics: GatewayMetrics, clock: Callable[[], float]) -> None:
        self.traces = traces
        self.metrics = metrics
        self.clock = clock

    async def enter(self, journey: Journey) -> Recording:
        """See `Stage`."""
        trace = journey.trace
        trace.id = journey.id
        trace.request = journey.exchange.request_id
        trace.model = journey.pool.model
        trace.asked = journey.ask.model
        trace.route = journey.route
        trace.path = journey.exchange.path
        trace.stream = journey.ask.stream
        trace.caller = journey.caller
        trace.started_at = journey.started_at
        trace.rule = journey.pool.rule
        journey.headers.append((b"x-argosy-request", trace.id.encode()))
        self.traces.begin(trace)
        return Recording(self, journey)


class Recording(msgspec.Struct, eq=False):
    """A `Visit`."""

    stage: Recorder
    journey: Journey
    gaps: list[float] = []
    """Seconds between tokens that the metrics have not been told yet."""

    def alone(self) -> Alone:
        """As far as it likes."""
        return Alone()

    def counted(self, times: Sequence[float]) -> None:
        """See `Visit`."""
        trace, gaps = self.journey.trace, self.gaps
        last, trace.last = trace.last, times[-1]
        if last is None:
            trace.first = times[0]
        if not trace.stream:
            return
        if last is not None:
            gaps.append(times[0] - last)
        if len(times) > 1:
            gaps += map(sub, times[1:], times)
        if len(gaps) >= GAPS:
            self._tell_gaps()

    def leave(self) -> None:
        """See `Visit`."""
        stage, journey = self.stage, self.journey
        trace, delivered = journey.trace, journey.delivered
        now = stage.clock()
        trace.ended = now
        trace.status = "replayed" if journey.replays else journey.status
        if journey.error is not None:
            trace.error = journey.error.code
        trace.prompt_tokens = delivered.prompt_tokens
        trace.cached_tokens = delivered.cached_tokens
        trace.output_tokens = delivered.output_tokens
        for choice, reason in itertools.islice(delivered.finished.items(), MOST_CHOICES):
            trace.finished[choice] = reason[:LONGEST_REASON]
        if self.gaps:
            self._tell_gaps()
        stage.traces.end(trace, now)
        self._measure(now)

    def _tell_gaps(self) -> None:
        self.stage.metrics.next_tokens(self.journey.trace.model, self.gaps)
        self.gaps.clear()

    def _measure(self, now: float) -> None:
        metrics, journey, trace = self.stage.metrics, self.journey, self.journey.trace
        delivered, model = journey.delivered, trace.model
        metrics.ended(
            model,
            trace.caller.tenant,
            trace.status,
            now - trace.arrived,
            input_tokens=delivered.prompt_tokens - delivered.cached_tokens,
            cached_tokens=delivered.cached_tokens,
            output_tokens=delivered.output_tokens,
            nano_dollars=journey.nano_dollars,
        )
        if trace.error:
            metrics.refused(model, trace.error)
        if trace.admitted is None:
            for limit in trace.limits:
                if not limit.fits:
                    metrics.limited(model, limit.unit)
        if trace.stream and trace.first is not None:
            metrics.first_token(model, trace.first - trace.arrived)
        if trace.tries or trace.queued is not None:
            until = trace.tries[0].at if trace.tries else now
            metrics.waited(model, 0.0 if trace.queued is None else until - trace.queued)
        for tried in trace.tries[1:]:
            self._count_try(tried)

    def _count_try(self, tried: Try) -> None:
        """One of the attempts after the first."""
        metrics, model = self.stage.metrics, self.journey.trace.model
        gave = tried.first is not None or tried.outcome == Outcome.SUCCESS.value
        if tried.hedge:
            metrics.hedged(model, won=tried.first is not None)
        elif tried.told and gave:
            metrics.failed_over(model)
        elif tried.sent is not None:  # else it could not go on there
            metrics.retried(model)
