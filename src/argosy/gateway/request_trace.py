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

from argosy.gateway.principal import ANYONE, TIERS, Caller
from argosy.policy import Cost, Rates

MOST_CANDIDATES = 16
"""So many of the candidates are kept, the cheapest first."""
MOST_TRIES = 64
"""So many attempts are kept: the first one, and the latest."""


class ExplainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many requests can be explained afterwards, and for how long."""

    requests: Annotated[int, Meta(ge=0)] = 10_000
    seconds: Annotated[float, Meta(ge=0)] = 3600.0


class Try(msgspec.Struct, gc=False, array_like=True):
    """One attempt at one replica."""

    replica: str
    at: float
    """When the replica was chosen."""
    told: int = 0
    """Output tokens that the client had by then: where a stream was carried on."""
    costs: tuple[Cost, ...] = ()
    """Of every replica that could have been chosen."""
    sent: float | None = None
    first: float | None = None
    """When the first of its tokens was passed on."""
    ended: float | None = None
    outcome: str = "running"
    reason: str = ""
    hedge: bool = False
    """The replica before was asked still, and silent."""


class LimitLine(msgspec.Struct, frozen=True, gc=False, array_like=True):
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


class LedgerLine(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a request used and cost."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    nano_dollars: int
    rates: Rates


class KeyLine(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a request's idempotency key did."""

    key: str
    first: str
    """The request that had it first."""
    kept: bool = False
    """Whether that one's answer is given to those that are the same; as far as it has ended."""


class Trace(msgspec.Struct, gc=False, array_like=True):
    """One request. Every step writes its own part."""

    id: str = ""
    request: str = ""
    """The request id, which the client may have chosen."""
    model: str = ""
    """The one that answers."""
    asked: str = ""
    """What the client called it."""
    route: str = ""
    """The route that led there from what was asked for; empty: none."""
    path: str = ""
    stream: bool = False
    caller: Caller = ANYONE
    started_at: float = 0.0
    """Seconds since the epoch."""
    arrived: float = 0.0
    read: float = 0.0
    """The body was complete and understood."""
    admitted: float | None = None
    """All stages let it in."""
    queued: float | None = None
    ahead: int = 0
    """How many waited before it when it was queued."""
    first: float | None = None
    last: float | None = None
    """The first and the latest of its tokens were passed on."""
    ended: float | None = None
    tries: list[Try] = msgspec.field(default_factory=list)
    rule: str = ""
    """How the pool chooses."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finished: dict[int, str] = msgspec.field(default_factory=dict)
    """Choice -> finish reason."""
    status: str = "running"
    error: str = ""
    limits: list[LimitLine] = []
    """Those that it was held to or, where it was refused, that stood in its way."""
    ledger: LedgerLine | None = None
    idempotency: KeyLine | None = None

    def begin_try(
        self, replica: str, now: float, told: int, costs: tuple[Cost, ...], *, hedge: bool = False
    ) -> Try:
        """A replica was chosen."""
        if len(costs) > MOST_CANDIDATES:
            costs = tuple(nsmallest(MOST_CANDIDATES, costs, key=attrgetter("total_s")))
        if len(self.tries) == MOST_TRIES:
            del self.tries[1]
        tried = Try(replica, now, told, costs, hedge=hedge)
        self.tries.append(tried)
        return tried

    def tell(self) -> dict[str, Any]:
        """The explanation, in JSON's types."""
        told: dict[str, Any] = {
            "object": "request.explanation",
            "id": self.id,
            "request_id": self.request,
            "status": self.status,
            "error": self.error or None,
            "model": self.model,
            "asked": self.asked or self.model,
            "route": self.route or None,
            "path": self.path,
            "stream": self.stream,
            "caller": {
                "organisation": self.caller.organisation,
                "project": self.caller.project,
                "key": self.caller.key,
                "user": self.caller.user,
                "tier": TIERS[self.caller.tier],
            },
            "started_at": self.started_at,
            "ms": {
                "read": self._ms(self.read),
                "admitted": self._ms(self.admitted),
                "queued": self._ms(self.queued),
                "first_token": self._ms(self.first),
                "last_token": self._ms(self.last),
                "ended": self._ms(self.ended),
            },
            "queue": None if self.queued is None else {"ahead": self.ahead},
            "rule": self.rule,
            "attempts": [self._attempt(tried) for tried in self.tries],
            "tokens": {
                "prompt": self.prompt_tokens,
                "cached": self.cached_tokens,
                "output": self.output_tokens,
            },
            "finish_reasons": {str(choice): reason for choice, reason in self.finished.items()},
        }
        if self.idempotency is not None:
            told["idempotency"] = asdict(self.idempotency)
        if self.limits:
            told["limits"] = [asdict(line) for line in self.limits]
        if self.ledger is not None:
            told["ledger"] = msgspec.to_builtins(asdict(self.ledger))
        return told

    def _attempt(self, tried: Try) -> dict[str, Any]:
        cheapest = sorted(tried.costs, key=attrgetter("total_s"))
        return {
            "replica": tried.replica,
            "chosen_ms": self._ms(tried.at),
            "sent_ms": self._ms(tried.sent),
            "first_token_ms": self._ms(tried.first),
            "ended_ms": self._ms(tried.ended),
            "carried_on_at": tried.told,
            "hedge": tried.hedge,
            "outcome": tried.outcome,
            "reason": tried.reason or None,
            "candidates": [_candidate(cost) for cost in cheapest],
        }

    def _ms(self, at: float | None) -> float | None:
        return None if at is None else round((at - self.arrived) * 1000, 2)


def _candidate(cost: Cost) -> dict[str, Any]:
    terms = {name: round(getattr(cost, name), 6) for name in cost.__struct_fields__[1:]}
    return {"replica": cost.replica, **terms, "total_s": round(cost.total_s, 6)}


_pack = msgspec.msgpack.Encoder().encode


class _Kept(msgspec.Struct, frozen=True, gc=False):
    ended: float
    organisation: str
    request: str
    trace: bytes
    """Packed: nothing of thousands of requests is left for the garbage collector to walk."""


def _names(organisation: str, request: str) -> tuple[tuple[str | None, str], ...]:
    return (None, request), (organisation, request)


class Traces:
    """The requests that run, and the latest that have ended: bounded in number and age."""

    def __init__(self, config: ExplainConfig) -> None:
        self._config = config
        self._running: dict[str, Trace] = {}
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._by_request: dict[tuple[str | None, str], str] = {}
        """Organisation (None: any) and request id -> the id of the latest request that had it."""

    def __len__(self) -> int:
        return len(self._running) + len(self._kept)

    def begin(self, trace: Trace) -> None:
        """A request begins."""
        self._running[trace.id] = trace
        for name in _names(trace.caller.organisation, trace.request):
            self._by_request[name] = trace.id

    def end(self, trace: Trace, now: float) -> None:
        """It has ended: from now on its trace does not change."""
        self._running.pop(trace.id, None)
        self._kept[trace.id] = _Kept(now, trace.caller.organisation, trace.request, _pack(trace))
        self.forget(now)

    def forget(self, now: float) -> None:
        """Those that ended too long ago, or before too many others, can no longer be found."""
        oldest = now - self._config.seconds
        while self._kept:
            name, kept = next(iter(self._kept.items()))
            if kept.ended >= oldest and len(self._kept) <= self._config.requests:
                return
            del self._kept[name]
            for known in _names(kept.organisation, kept.request):
                if self._by_request.get(known) == name:
                    del self._by_request[known]

    def find(self, name: str, organisation: str | None = None) -> Trace | None:
        """The trace of an answer's id, else the latest of a request id, of one organisation's if that is given.

        Clients choose request ids: they hide no answer, and not the requests of another organisation.
        """
        known = name in self._running or name in self._kept
        found = name if known else self._by_request.get((organisation, name), name)
        running = self._running.get(found)
        if running is not None:
            return running
        kept = self._kept.get(found)
        return None if kept is None else msgspec.msgpack.decode(kept.trace, type=Trace)
