"""Spans of an ended request, in the terms of OpenTelemetry's GenAI conventions.

Exactly one span has `gen_ai.*` attributes, since receivers count tokens and cost of each that has them. All others have
attributes of `argosy.*`, as the conventions have none for gateways and engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Literal

import msgspec

from argosy.gateway.request_context import CHAT, RequestContext
from argosy.gateway.request_trace import RequestTrace
from argosy.gateway.trace_context import (
    GENERATION_SPAN,
    QUEUE_SPAN,
    SERVER_SPAN,
    TraceContext,
    compute_span_id,
)
from argosy.policy import AttemptOutcome
from argosy.policy.placement import AttemptRecord
from argosy.protocol import ApiError
from argosy.telemetry import AttributeValue, Span, SpanEvent, SpanKind

SemanticConventions = Literal["latest", "1.36"]
SCHEMA_URLS: dict[SemanticConventions, str] = {
    "latest": "https://opentelemetry.io/schemas/gen-ai/1.42.0",
    "1.36": "https://opentelemetry.io/schemas/1.36.0",
}
_OLD_NAMES = {"gen_ai.provider.name": "gen_ai.system"}
"""Names of `latest` that 1.36 has under another name. It has none for the next ones."""
_NEW_NAMES = frozenset(
    {
        "gen_ai.usage.cache_read.input_tokens",
        "gen_ai.usage.reasoning.output_tokens",
        "gen_ai.request.stream",
        "gen_ai.response.time_to_first_chunk",
    }
)
PROVIDER = "argosy"
_NANOSECONDS = 1_000_000_000
_PARAMETERS = {
    "temperature": float,
    "top_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "seed": int,
    "top_k": int,
}
"""Request fields of `gen_ai.request.*` by their type."""
_decode = msgspec.json.Decoder().decode
Attributes = dict[str, AttributeValue | None]


def build_spans(
    context: RequestContext,
    trace_context: TraceContext,
    reason: str,
    conventions: SemanticConventions,
) -> list[Span]:
    """Return the spans of an ended request.

    Args:
        context: The request.
        trace_context: Its trace.
        reason: Why the trace is kept.
        conventions: Version of the names.
    """
    trace = context.trace
    clock = _Clock(trace)
    server_id, generation_id = (
        compute_span_id(trace.response_id, name) for name in (SERVER_SPAN, GENERATION_SPAN)
    )
    start_ns, end_ns = clock.to_ns(trace.arrived_at), clock.to_ns(trace.ended_at)
    status_code = context.exchange.status  # None if the client left before the response
    if status_code is None and context.error is not None:
        status_code = context.error.status
    error = _describe_error(context.error, trace)
    server = Span(
        name=f"POST {trace.path}",
        kind=SpanKind.SERVER,
        span_id=server_id,
        parent_id=bytes.fromhex(trace_context.caller_id),
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=_without_none(
            {
                "http.request.method": "POST",
                "http.route": trace.path,
                "http.response.status_code": status_code,
                "argosy.request.id": trace.request_id,
                "argosy.response.id": trace.response_id,
                "argosy.status": trace.status,
                "argosy.sampling.reason": reason,
            }
        ),
        error=error if (status_code or 0) >= 500 or trace.status == "failed" else None,
    )
    generation = Span(
        name=f"{_operation(context)} {trace.requested_model or trace.model}",
        kind=SpanKind.CLIENT,
        span_id=generation_id,
        parent_id=server_id,
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=_rename(_without_none(_generation_attributes(context)), conventions),
        error=error,
    )
    return [
        server,
        generation,
        *_queue_spans(trace, clock, generation_id),
        *_attempt_spans(trace, clock, generation_id),
    ]


class _Clock:
    """Converts monotonic times of a trace to nanoseconds since the epoch."""

    def __init__(self, trace: RequestTrace) -> None:
        self._offset_s = trace.started_at - trace.arrived_at

    def to_ns(self, timestamp: float | None) -> int:
        return max(0, round(((timestamp or 0.0) + self._offset_s) * _NANOSECONDS))


def _operation(context: RequestContext) -> str:
    if not context.api.generates:
        return "embeddings" if "embed" in context.api.tasks else "rerank"
    return "chat" if context.api is CHAT else "text_completion"


def _generation_attributes(context: RequestContext) -> Attributes:
    trace, fields, tokens = context.trace, context.fields, context.trace.tokens
    first_s = None if trace.first_token_at is None else trace.first_token_at - trace.arrived_at
    reasons = [trace.finish_reasons.get(index, "error") for index in range(fields.choice_count)]
    cost = trace.cost
    attributes: Attributes = {
        "gen_ai.operation.name": _operation(context),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": trace.requested_model or trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.response.id": trace.response_id,
        "gen_ai.request.max_tokens": fields.max_output_tokens,
        "gen_ai.request.choice.count": fields.choice_count if fields.choice_count > 1 else None,
        "gen_ai.request.stream": fields.stream,
        "gen_ai.usage.input_tokens": tokens.prompt_tokens,
        "gen_ai.usage.output_tokens": tokens.output_tokens if context.api.generates else None,
        "gen_ai.usage.cache_read.input_tokens": tokens.cached_tokens or None,
        "gen_ai.usage.reasoning.output_tokens": tokens.reasoning_tokens,
        "gen_ai.response.finish_reasons": reasons if context.api.generates else None,
        "gen_ai.response.time_to_first_chunk": first_s if fields.stream else None,
        "gen_ai.usage.cost": None if cost is None else cost.nano_dollars / _NANOSECONDS,
        "error.type": trace.error_code or None,
        "argosy.organisation": trace.principal.organisation or None,
        "argosy.tenant": trace.principal.tenant or None,
        "user.id": trace.principal.user or None,
        "argosy.key": trace.principal.key or None,
        "argosy.route": trace.route_name or None,
        "argosy.version": trace.version or None,
        "argosy.adapter": trace.adapter or None,
        "argosy.cost.nano_dollars": None if cost is None else cost.nano_dollars,
    }
    for name, convert in _PARAMETERS.items():
        if name in fields.raw and not (name == "seed" and fields.has_generated_seed):
            value: Any = _decode(fields.raw[name])
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                attributes[f"gen_ai.request.{name}"] = convert(value)
    return attributes


def _queue_spans(trace: RequestTrace, clock: _Clock, parent_id: bytes) -> Iterator[Span]:
    """Yield a span for the wait before the first attempt, and one for each pause."""
    attempts = trace.earlier_attempts or trace.attempts
    chosen_at = attempts[0].chosen_at if attempts else None
    waits: list[tuple[float, float | None, Attributes]] = []
    if trace.queued_at is not None:
        waits.append((trace.queued_at, chosen_at, {"argosy.queue.ahead": trace.queued_ahead}))
    waits += [(start, end, {"argosy.queue.pause": True}) for start, end in trace.pauses]
    for number, (start, end, attributes) in enumerate(waits):
        yield Span(
            name="queue",
            kind=SpanKind.INTERNAL,
            span_id=compute_span_id(trace.response_id, f"{QUEUE_SPAN} {number}"),
            parent_id=parent_id,
            start_ns=clock.to_ns(start),
            end_ns=clock.to_ns(trace.ended_at if end is None else end),
            attributes=_without_none(attributes),
        )


def _attempt_spans(trace: RequestTrace, clock: _Clock, parent_id: bytes) -> Iterator[Span]:
    """Yield a span for each attempt, and those of the engine in the one that has completed the response."""
    attempts = [*trace.earlier_attempts, *trace.attempts]
    previous_id = b""
    for number, attempt in enumerate(attempts):
        span_id = compute_span_id(trace.response_id, f"attempt {number}")
        is_failed = attempt.outcome == AttemptOutcome.FAILURE.value
        mode = _attempt_mode(attempt, number)
        yield Span(
            name=f"attempt {attempt.replica}",
            kind=SpanKind.CLIENT,
            span_id=span_id,
            parent_id=parent_id,
            start_ns=clock.to_ns(attempt.chosen_at),
            end_ns=clock.to_ns(trace.ended_at if attempt.ended_at is None else attempt.ended_at),
            attributes=_without_none(
                {
                    "argosy.replica": attempt.replica,
                    "argosy.attempt.mode": mode,
                    "argosy.attempt.outcome": attempt.outcome,
                    "argosy.attempt.reason": attempt.reason or None,
                    "argosy.attempt.delivered_tokens": attempt.delivered_tokens or None,
                }
            ),
            events=_route_events(trace, attempt, clock),
            linked_id=previous_id if mode == "resume" else b"",
            error=attempt.reason or attempt.outcome if is_failed else None,
        )
        if trace.report is not None and number == len(attempts) - 1:
            yield from _engine_spans(trace, attempt, clock, span_id)
        previous_id = span_id


def _attempt_mode(attempt: AttemptRecord, number: int) -> str:
    if attempt.is_hedge:
        return "hedge"
    if number == 0:
        return "first"
    return "resume" if attempt.delivered_tokens else "retry"


def _route_events(trace: RequestTrace, attempt: AttemptRecord, clock: _Clock) -> list[SpanEvent]:
    """Return why the replica was selected: its cost, and the next best replica."""
    costs = {cost.replica: cost for cost in attempt.candidate_costs}
    chosen = costs.pop(attempt.replica, None)
    if chosen is None:
        return []
    attributes: Attributes = {
        "argosy.routing.policy": trace.routing_policy,
        "argosy.routing.cost_s": chosen.total_s,
    }
    if costs:
        second = min(costs.values(), key=attrgetter("total_s"))
        attributes |= {
            "argosy.routing.runner_up": second.replica,
            "argosy.routing.runner_up_cost_s": second.total_s,
        }
    return [SpanEvent("route", clock.to_ns(attempt.chosen_at), _without_none(attributes))]


def _engine_spans(
    trace: RequestTrace, attempt: AttemptRecord, clock: _Clock, parent_id: bytes
) -> Iterator[Span]:
    """Yield the phases of the engine by the durations that its replica reports, on the gateway's clock."""
    report, first_at = trace.report, attempt.first_token_at
    if report is None or attempt.sent_at is None or first_at is None:
        return
    end = trace.ended_at if attempt.ended_at is None else attempt.ended_at
    computed_at = min(attempt.sent_at + report.queue_ms / 1000, first_at)
    tokens = trace.tokens
    phases: tuple[tuple[str, float, float | None, Attributes], ...] = (
        ("engine queue", attempt.sent_at, computed_at, {}),
        (
            "engine prefill",
            computed_at,
            first_at,
            {
                "argosy.engine.computed_tokens": tokens.uncached_tokens,
                "argosy.engine.cached_tokens": tokens.cached_tokens,
            },
        ),
        (
            "engine decode",
            first_at,
            end,
            {
                "argosy.engine.steps": report.steps,
                "argosy.engine.accepted_draft_tokens": report.accepted_drafts,
            },
        ),
    )
    for name, start, stop, attributes in phases:
        yield Span(
            name=name,
            kind=SpanKind.INTERNAL,
            span_id=compute_span_id(trace.response_id, name),
            parent_id=parent_id,
            start_ns=clock.to_ns(start),
            end_ns=clock.to_ns(stop),
            attributes=_without_none(attributes),
        )


def _describe_error(error: ApiError | None, trace: RequestTrace) -> str | None:
    """Return the code of the error. Its message may have parts of the request."""
    if error is not None or trace.status == "failed":
        return trace.error_code or trace.status
    return None


def _without_none(attributes: Attributes) -> dict[str, AttributeValue]:
    return {name: value for name, value in attributes.items() if value is not None}


def _rename(
    attributes: dict[str, AttributeValue], conventions: SemanticConventions
) -> dict[str, AttributeValue]:
    if conventions == "latest":
        return attributes
    return {
        _OLD_NAMES.get(name, name): value
        for name, value in attributes.items()
        if name not in _NEW_NAMES
    }
