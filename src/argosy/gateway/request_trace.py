"""Traces of requests for `argosy explain`: written while a request runs, formatted on demand.

A trace stores times of the gateway's monotonic clock. The formatted explanation has milliseconds since the arrival of
the request.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import asdict

from argosy.deployment import ExplainConfig
from argosy.gateway.principal import ANONYMOUS, TIERS, Principal
from argosy.gateway.trace_context import TraceContext
from argosy.policy import MemoryEntry, Rates, RoutingCost, TenantMemory
from argosy.policy.placement import AttemptRecord
from argosy.protocol import NO_TOKENS, RequestReport, TokenUsage

MAX_CONTENT_BYTES = 64 * 1024 * 1024
"""Maximum size of all prompts and outputs that are kept. The oldest of the largest tenant are dropped first."""
MAX_TRACE_BYTES = 64 * 1024 * 1024
"""Maximum size of the traces of ended requests."""


class LimitTrace(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Check of one limit."""

    owner: str
    unit: str
    window: str
    model: str | None
    limit: int
    used: int
    asked: int
    wait_s: float | None = 0.0
    """Seconds until the request would fit. None if it never fits."""
    fits: bool = True


class CostTrace(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Cost of a request."""

    nano_dollars: int
    rates: Rates


class IdempotencyTrace(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Effect of a request's idempotency key."""

    key: str
    first: str
    """Id of the first request with this key."""
    kept: bool = False
    """Whether the first request's response is replayed to identical requests. False until it has ended."""


class RequestTrace(msgspec.Struct, gc=False, array_like=True):
    """Trace of one request. Each part of the gateway writes its own fields."""

    response_id: str = ""
    request_id: str = ""
    """Request id, which the client may have chosen."""
    model: str = ""
    """Name of the model that answers."""
    requested_model: str = ""
    """Name of the model in the request."""
    route_name: str = ""
    """Name of the route from the requested model to the answering one. Empty if no route matched."""
    route_reason: str = ""
    """Why that model answers, such as its weight, or why others were passed over."""
    path: str = ""
    stream: bool = False
    principal: Principal = ANONYMOUS
    started_at: float = 0.0
    """Seconds since the epoch."""
    arrived_at: float = 0.0
    parsed_at: float = 0.0
    """When the body was complete and parsed."""
    admitted_at: float | None = None
    """When all filters had admitted the request."""
    queued_at: float | None = None
    queued_ahead: int = 0
    """Number of queued requests ahead of it when it was queued."""
    first_token_at: float | None = None
    """When the first token was forwarded to the client."""
    last_token_at: float | None = None
    """When the latest token was forwarded to the client."""
    ended_at: float | None = None
    attempts: list[AttemptRecord] = msgspec.field(default_factory=list)
    """Attempts at the model that answers."""
    earlier_attempts: list[AttemptRecord] = []
    """Attempts at models that could not answer, before a fallback."""
    routing_policy: str = ""
    """Routing policy of the pool."""
    tokens: TokenUsage = NO_TOKENS
    finish_reasons: dict[int, str] = msgspec.field(default_factory=dict)
    """Finish reason by choice index."""
    stop_reasons: dict[int, str] = msgspec.field(default_factory=dict)
    """Why choices were ended early, by choice index."""
    status: str = "running"
    error_code: str = ""
    limits: list[LimitTrace] = []
    """The limits that were checked. For a rejected request: the limits that it exceeds."""
    cost: CostTrace | None = None
    idempotency: IdempotencyTrace | None = None
    report: RequestReport | None = None
    """Report of the native replica that completed the response."""
    pauses: list[tuple[float, float | None]] = []
    """When the stream gave way to other requests, and when it was placed again."""
    version: str = ""
    """Version of the model that answers; empty without rollouts."""
    adapter: str = ""
    """Digest of the adapter that answers; empty if the model itself does."""
    flags: list[dict[str, Any]] = []
    """Variants of the feature flags for the request, as in explanations."""
    prompt: str = ""
    """Name and number of the version of the request's prompt; empty if it has none."""
    cache: list[dict[str, Any]] = []
    """Cache rule of the request and how the cache answered; empty if no rule matched."""
    routing: list[dict[str, Any]] = []
    """Decisions of routes about the prompt, load and budgets, as in explanations; empty without such routes."""
    truncation: dict[str, Any] = {}
    """Rule and dropped messages of a conversation that was too long, as in explanations; empty if none was dropped."""
    content: list[dict[str, Any]] = []
    """Content rule of the request with each finding, as in explanations; empty if no rule matched."""
    trace_context: TraceContext | None = None
    """Distributed trace of the request. None if no traces are exported."""

    def to_dict(self) -> dict[str, Any]:
        """Format the explanation as a JSON object."""
        tokens = self.tokens
        explanation: dict[str, Any] = {
            "object": "request.explanation",
            "id": self.response_id,
            "request_id": self.request_id,
            "status": self.status,
            "error": self.error_code or None,
            "model": self.model,
            "asked": self.requested_model or self.model,
            "route": self.route_name or None,
            "route_reason": self.route_reason or None,
            "path": self.path,
            "stream": self.stream,
            "caller": {
                "organisation": self.principal.organisation,
                "project": self.principal.project,
                "key": self.principal.key,
                "user": self.principal.user,
                "tier": TIERS[self.principal.tier],
            },
            "started_at": self.started_at,
            "ms": {
                "read": self._elapsed_ms(self.parsed_at),
                "admitted": self._elapsed_ms(self.admitted_at),
                "queued": self._elapsed_ms(self.queued_at),
                "first_token": self._elapsed_ms(self.first_token_at),
                "last_token": self._elapsed_ms(self.last_token_at),
                "ended": self._elapsed_ms(self.ended_at),
            },
            "queue": None if self.queued_at is None else {"ahead": self.queued_ahead},
            "rule": self.routing_policy,
            "attempts": [
                self._attempt_to_dict(attempt)
                for attempt in (*self.earlier_attempts, *self.attempts)
            ],
            "tokens": {
                "prompt": tokens.prompt_tokens,
                "cached": tokens.cached_tokens,
                "output": tokens.output_tokens,
            },
            "finish_reasons": {
                str(choice): reason for choice, reason in self.finish_reasons.items()
            },
        }
        if tokens.reasoning_tokens is not None:
            explanation["tokens"]["reasoning"] = tokens.reasoning_tokens
        return explanation | self._occasional_fields()

    def _occasional_fields(self) -> dict[str, Any]:
        """Return the fields that only some requests have."""
        plain = {
            "version": self.version,
            "adapter": self.adapter,
            "flags": self.flags,
            "prompt": self.prompt,
            "routing": self.routing,
            "cache": self.cache,
            "truncation": self.truncation,
            "content": self.content,
        }
        fields: dict[str, Any] = {name: value for name, value in plain.items() if value}
        if self.trace_context is not None:
            fields["trace_id"] = self.trace_context.trace_id
        if self.pauses:
            fields["pauses"] = [
                {"paused_ms": self._elapsed_ms(start), "resumed_ms": self._elapsed_ms(end)}
                for start, end in self.pauses
            ]
        if self.stop_reasons:
            fields["stop_reasons"] = {
                str(choice): reason for choice, reason in self.stop_reasons.items()
            }
        if self.report is not None:
            fields["replica_report"] = msgspec.to_builtins(self.report)
        if self.idempotency is not None:
            fields["idempotency"] = asdict(self.idempotency)
        if self.limits:
            fields["limits"] = [asdict(limit) for limit in self.limits]
        if self.cost is not None:
            fields["ledger"] = {
                "input_tokens": self.tokens.prompt_tokens,
                "cached_tokens": self.tokens.cached_tokens,
                "output_tokens": self.tokens.output_tokens,
                **msgspec.to_builtins(asdict(self.cost)),
            }
        return fields

    def _attempt_to_dict(self, attempt: AttemptRecord) -> dict[str, Any]:
        costs = sorted(attempt.candidate_costs, key=attrgetter("total_s"))
        return {
            "replica": attempt.replica,
            "chosen_ms": self._elapsed_ms(attempt.chosen_at),
            "sent_ms": self._elapsed_ms(attempt.sent_at),
            "first_token_ms": self._elapsed_ms(attempt.first_token_at),
            "ended_ms": self._elapsed_ms(attempt.ended_at),
            "carried_on_at": attempt.delivered_tokens,
            "hedge": attempt.is_hedge,
            "outcome": attempt.outcome,
            "reason": attempt.reason or None,
            "candidates": [_candidate_to_dict(cost) for cost in costs],
        }

    def _elapsed_ms(self, timestamp: float | None) -> float | None:
        return None if timestamp is None else round((timestamp - self.arrived_at) * 1000, 2)


def _candidate_to_dict(cost: RoutingCost) -> dict[str, Any]:
    terms = {name: round(getattr(cost, name), 6) for name in cost.__struct_fields__[1:]}
    return {"replica": cost.replica, **terms, "total_s": round(cost.total_s, 6)}


_encode = msgspec.msgpack.Encoder().encode


class _StoredTrace(MemoryEntry, gc=False, eq=False):
    ended_at: float
    lookup_keys: tuple[tuple[str | None, str], ...]
    packed_trace: bytes
    """Trace in MessagePack, so that thousands of traces add nothing to garbage collection."""


def _lookup_keys(trace: RequestTrace) -> tuple[tuple[str | None, str], ...]:
    """Return the owners by which a trace is found, each with its request id."""
    principal, request_id = trace.principal, trace.request_id
    return (
        (None, request_id),
        (principal.organisation, request_id),
        (principal.project, request_id),
    )


class _StoredReport(MemoryEntry, gc=False, eq=False):
    packed: bytes


class ContentStore:
    """Reports with prompts and outputs, bounded in their total size."""

    def __init__(self, max_bytes: int) -> None:
        self._memory = TenantMemory(max_bytes)
        self._reports: dict[str, _StoredReport] = {}
        """Reports by response id."""

    def add(self, response_id: str, content: RequestReport, tenant: str) -> None:
        """Add a report, and drop the oldest ones of the largest tenant beyond the limit."""
        self.discard(response_id)
        packed = _encode(content)
        report = _StoredReport(tenant, response_id, len(packed), self._reports.pop, packed)
        if self._memory.add_cached(report):
            self._reports[response_id] = report

    def discard(self, response_id: str) -> None:
        """Drop a report, if there is one."""
        if response_id in self._reports:
            self._memory.remove(self._reports.pop(response_id))

    def find(self, response_id: str) -> RequestReport | None:
        """Return a report; None if there is none or it was dropped."""
        stored = self._reports.get(response_id)
        return None if stored is None else msgspec.msgpack.decode(stored.packed, type=RequestReport)


class TraceStore:
    """Traces of running requests and of the latest ended requests, bounded in number, bytes and age.

    Beyond the number or the bytes, the oldest traces of the tenant with the most bytes are dropped.
    """

    def __init__(self, config: ExplainConfig) -> None:
        self._config = config
        self._running: dict[str, RequestTrace] = {}
        self._ended: OrderedDict[str, _StoredTrace] = OrderedDict()
        self._memory = TenantMemory(MAX_TRACE_BYTES)
        self._contents = ContentStore(MAX_CONTENT_BYTES)
        self._by_request: dict[tuple[str | None, str], str] = {}
        """Id of the latest response by organisation or project (None for any), and request id."""

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def add(self, trace: RequestTrace) -> None:
        """Add the trace of a new request."""
        self._running[trace.response_id] = trace
        for key in _lookup_keys(trace):
            self._by_request[key] = trace.response_id

    def complete(self, trace: RequestTrace, now: float) -> None:
        """Store the trace of an ended request, which no longer changes."""
        self._running.pop(trace.response_id, None)
        if trace.report is not None and trace.report.has_content:
            self._contents.add(trace.response_id, trace.report, trace.principal.tenant)
            trace.report = trace.report.without_content()
        response_id, packed, keys = trace.response_id, _encode(trace), _lookup_keys(trace)
        stored = _StoredTrace(
            trace.principal.tenant, response_id, len(packed), self._drop, now, keys, packed
        )
        if not self._memory.add_cached(stored):
            self._forget(response_id, keys)
            return
        self._ended[response_id] = stored
        self.evict_expired(now)

    def evict_expired(self, now: float) -> None:
        """Remove ended traces beyond the configured age and number."""
        min_ended_at = now - self._config.retention_s
        while self._ended and next(iter(self._ended.values())).ended_at < min_ended_at:
            oldest = next(iter(self._ended))
            self._memory.remove(self._ended[oldest])
            self._drop(oldest)
        while len(self._ended) > self._config.max_requests:
            largest = self._memory.find_largest()
            assert largest is not None  # noqa: S101 - each ended trace has an entry
            self._memory.evict_oldest(largest)

    def _drop(self, response_id: str) -> None:
        """Drop an ended trace whose memory is no longer counted."""
        self._forget(response_id, self._ended.pop(response_id).lookup_keys)

    def _forget(self, response_id: str, lookup_keys: tuple[tuple[str | None, str], ...]) -> None:
        self._contents.discard(response_id)
        for key in lookup_keys:
            if self._by_request.get(key) == response_id:
                del self._by_request[key]

    def find(self, identifier: str, owner: str | None = None) -> RequestTrace | None:
        """Find a trace by response id, or the latest trace by request id.

        Clients choose request ids. A request id therefore never hides a response id, nor a request of another
        organisation or project.

        Args:
            identifier: Response id or request id.
            owner: Organisation or project in which a request id is looked up. None searches all.
        """
        is_response_id = identifier in self._running or identifier in self._ended
        response_id = (
            identifier if is_response_id else self._by_request.get((owner, identifier), identifier)
        )
        running = self._running.get(response_id)
        if running is not None:
            return running
        stored = self._ended.get(response_id)
        if stored is None:
            return None
        trace = msgspec.msgpack.decode(stored.packed_trace, type=RequestTrace)
        trace.report = self._contents.find(response_id) or trace.report
        return trace
