"""What a request went through, step by step: written as it happens, told when somebody asks.

Times are those of the gateway's monotonic clock while they are written, and milliseconds since the
request came when they are told.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import nsmallest
from operator import attrgetter
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from argosy.gateway.principal import ANONYMOUS, TIERS, Principal
from argosy.policy import Rates, RoutingCost

MAX_CANDIDATES = 16
"""So many of the candidates are kept, the cheapest first."""
MAX_ATTEMPT_TRACES = 64
"""So many attempts are kept: the first one, and the latest."""


class ExplainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many requests can be explained afterwards, and for how long."""

    max_requests: Annotated[int, Meta(ge=0)] = 10_000
    retention_s: Annotated[float, Meta(ge=0)] = 3600.0


class AttemptTrace(msgspec.Struct, gc=False, array_like=True):
    """One attempt at one replica."""

    replica: str
    chosen_at: float
    """When the replica was chosen."""
    delivered_tokens: int = 0
    """Output tokens that the client had by then: where a stream was carried on."""
    candidate_costs: tuple[RoutingCost, ...] = ()
    """Of every replica that could have been chosen."""
    sent_at: float | None = None
    first_token_at: float | None = None
    """When the first of its tokens was passed on."""
    ended_at: float | None = None
    outcome: str = "running"
    reason: str = ""
    is_hedge: bool = False
    """The replica before was asked still, and silent."""


class LimitTrace(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The arithmetic of one limit."""

    owner: str
    unit: str
    window: str
    model: str | None
    limit: int
    used: int
    asked: int
    wait_s: float | None = 0.0
    """None: it never fits."""
    fits: bool = True


class UsageTrace(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a request used and cost."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    nano_dollars: int
    rates: Rates


class IdempotencyTrace(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a request's idempotency key did."""

    key: str
    first: str
    """The request that had it first."""
    kept: bool = False
    """Whether that one's answer is given to those that are the same; as far as it has ended."""


class RequestTrace(msgspec.Struct, gc=False, array_like=True):
    """One request. Every step writes its own part."""

    response_id: str = ""
    request_id: str = ""
    """The request id, which the client may have chosen."""
    model: str = ""
    """The one that answers."""
    requested_model: str = ""
    """What the client called it."""
    route_name: str = ""
    """The route that led there from what was asked for; empty: none."""
    path: str = ""
    stream: bool = False
    principal: Principal = ANONYMOUS
    started_at: float = 0.0
    """Seconds since the epoch."""
    arrived_at: float = 0.0
    parsed_at: float = 0.0
    """The body was complete and understood."""
    admitted_at: float | None = None
    """All stages let it in."""
    queued_at: float | None = None
    queued_ahead: int = 0
    """How many waited before it when it was queued."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    """The first and the latest of its tokens were passed on."""
    ended_at: float | None = None
    attempts: list[AttemptTrace] = msgspec.field(default_factory=list)
    routing_policy: str = ""
    """How the pool chooses."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: dict[int, str] = msgspec.field(default_factory=dict)
    """Choice -> finish reason."""
    status: str = "running"
    error_code: str = ""
    limits: list[LimitTrace] = []
    """Those that it was held to or, where it was refused, that stood in its way."""
    usage: UsageTrace | None = None
    idempotency: IdempotencyTrace | None = None

    def begin_attempt(
        self,
        replica: str,
        now: float,
        delivered_tokens: int,
        candidate_costs: tuple[RoutingCost, ...],
        *,
        is_hedge: bool = False,
    ) -> AttemptTrace:
        """A replica was chosen."""
        if len(candidate_costs) > MAX_CANDIDATES:
            candidate_costs = tuple(
                nsmallest(MAX_CANDIDATES, candidate_costs, key=attrgetter("total_s"))
            )
        if len(self.attempts) == MAX_ATTEMPT_TRACES:
            del self.attempts[1]
        tried = AttemptTrace(replica, now, delivered_tokens, candidate_costs, is_hedge=is_hedge)
        self.attempts.append(tried)
        return tried

    def to_dict(self) -> dict[str, Any]:
        """The explanation, in JSON's types."""
        told: dict[str, Any] = {
            "object": "request.explanation",
            "id": self.response_id,
            "request_id": self.request_id,
            "status": self.status,
            "error": self.error_code or None,
            "model": self.model,
            "asked": self.requested_model or self.model,
            "route": self.route_name or None,
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
            "attempts": [self._attempt_to_dict(tried) for tried in self.attempts],
            "tokens": {
                "prompt": self.prompt_tokens,
                "cached": self.cached_tokens,
                "output": self.output_tokens,
            },
            "finish_reasons": {
                str(choice): reason for choice, reason in self.finish_reasons.items()
            },
        }
        if self.idempotency is not None:
            told["idempotency"] = asdict(self.idempotency)
        if self.limits:
            told["limits"] = [asdict(line) for line in self.limits]
        if self.usage is not None:
            told["ledger"] = msgspec.to_builtins(asdict(self.usage))
        return told

    def _attempt_to_dict(self, tried: AttemptTrace) -> dict[str, Any]:
        cheapest = sorted(tried.candidate_costs, key=attrgetter("total_s"))
        return {
            "replica": tried.replica,
            "chosen_ms": self._elapsed_ms(tried.chosen_at),
            "sent_ms": self._elapsed_ms(tried.sent_at),
            "first_token_ms": self._elapsed_ms(tried.first_token_at),
            "ended_ms": self._elapsed_ms(tried.ended_at),
            "carried_on_at": tried.delivered_tokens,
            "hedge": tried.is_hedge,
            "outcome": tried.outcome,
            "reason": tried.reason or None,
            "candidates": [_candidate_to_dict(cost) for cost in cheapest],
        }

    def _elapsed_ms(self, at: float | None) -> float | None:
        return None if at is None else round((at - self.arrived_at) * 1000, 2)


def _candidate_to_dict(cost: RoutingCost) -> dict[str, Any]:
    terms = {name: round(getattr(cost, name), 6) for name in cost.__struct_fields__[1:]}
    return {"replica": cost.replica, **terms, "total_s": round(cost.total_s, 6)}


_encode_trace = msgspec.msgpack.Encoder().encode


class _StoredTrace(msgspec.Struct, frozen=True, gc=False):
    ended_at: float
    organisation: str
    request_id: str
    packed_trace: bytes
    """Packed: nothing of thousands of requests is left for the garbage collector to walk."""


def _lookup_keys(organisation: str, request: str) -> tuple[tuple[str | None, str], ...]:
    return (None, request), (organisation, request)


class TraceStore:
    """The requests that run, and the latest that have ended: bounded in number and age."""

    def __init__(self, config: ExplainConfig) -> None:
        self._config = config
        self._running: dict[str, RequestTrace] = {}
        self._ended: OrderedDict[str, _StoredTrace] = OrderedDict()
        self._by_request: dict[tuple[str | None, str], str] = {}
        """Organisation (None: any) and request id -> the id of the latest request that had it."""

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def add(self, trace: RequestTrace) -> None:
        """A request begins."""
        self._running[trace.response_id] = trace
        for name in _lookup_keys(trace.principal.organisation, trace.request_id):
            self._by_request[name] = trace.response_id

    def complete(self, trace: RequestTrace, now: float) -> None:
        """It has ended: from now on its trace does not change."""
        self._running.pop(trace.response_id, None)
        self._ended[trace.response_id] = _StoredTrace(
            now, trace.principal.organisation, trace.request_id, _encode_trace(trace)
        )
        self.evict_expired(now)

    def evict_expired(self, now: float) -> None:
        """Those that ended too long ago, or before too many others, can no longer be found."""
        oldest = now - self._config.retention_s
        while self._ended:
            name, kept = next(iter(self._ended.items()))
            if kept.ended_at >= oldest and len(self._ended) <= self._config.max_requests:
                return
            del self._ended[name]
            for known in _lookup_keys(kept.organisation, kept.request_id):
                if self._by_request.get(known) == name:
                    del self._by_request[known]

    def find(self, identifier: str, organisation: str | None = None) -> RequestTrace | None:
        """The trace of an answer's id, else the latest of a request id, of one organisation's if that is given.

        Clients choose request ids: they hide no answer, and not the requests of another organisation.
        """
        known = identifier in self._running or identifier in self._ended
        found = (
            identifier if known else self._by_request.get((organisation, identifier), identifier)
        )
        running = self._running.get(found)
        if running is not None:
            return running
        kept = self._ended.get(found)
        return (
            None if kept is None else msgspec.msgpack.decode(kept.packed_trace, type=RequestTrace)
        )
