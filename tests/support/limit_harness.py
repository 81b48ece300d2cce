"""Callers, their limits, and requests of theirs: what tests of the limits stage share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, cast

from argosy.gateway.filters.limit_filter import LimitFilter
from argosy.gateway.filters.limit_filter_state import LimitFilterState
from argosy.gateway.pool.pool import Pool
from argosy.gateway.principal import Principal
from argosy.gateway.request_context import CHAT, FilterState, RequestContext, RequestStatus
from argosy.gateway.request_fields import parse_request_fields
from argosy.http_server import HttpExchange
from argosy.protocol import ApiError
from argosy.store import (
    AccountSnapshot,
    Clock,
    Limit,
    LimitUnit,
    LimitWindow,
    OwnerKind,
    Price,
    Project,
    QuotaBackend,
    QuotaFailureMode,
    steady_clock,
)

CALLER = Principal(organisation="org", project="shop", key="k1", user="ann")
OTHER = Principal(organisation="org", project="shop", key="k2", user="bob")
OWNERS: dict[OwnerKind, str] = {
    "organisation": "org",
    "project": "shop",
    "user": "ann",
    "key": "k1",
}


class Gate(LimitFilter):
    """The stage, and the visits of those that it has let in."""

    visits: dict[int, FilterState | None]
    """By the journey's identity as an object."""

    def __init__(self, state: QuotaBackend, clock: Clock = steady_clock) -> None:
        super().__init__(state, clock)
        self.visits = {}

    async def on_request(self, context: RequestContext) -> LimitFilterState | None:
        held = await super().on_request(context)
        self.visits[id(context)] = held
        return held


def limit(
    unit: LimitUnit,
    amount: int,
    window: LimitWindow | None = "minute",
    owner_kind: OwnerKind = "key",
    model: str | None = None,
) -> Limit:
    """A limit of `CALLER` or of who it belongs to."""
    return Limit(
        id=f"{owner_kind}-{unit}-{window}-{model}",
        owner_kind=owner_kind,
        owner=OWNERS[owner_kind],
        unit=unit,
        amount=amount,
        window=None if unit == "concurrency" else window,
        model=model,
    )


def directory(
    *limits: Limit, unsure: QuotaFailureMode = "open", prices: Iterable[Price] = ()
) -> AccountSnapshot:
    """With one project."""
    project = Project(
        id="shop", organisation="org", name="shop", quota_failure_mode=unsure, created_at=0.0
    )
    return AccountSnapshot(projects=(project,), limits=limits, prices=tuple(prices))


def request(
    principal: Principal = CALLER, *, prompt: int = 10, most: int | None = 5
) -> RequestContext:
    """A request with about so many tokens in its prompt."""
    content = "x" * (4 * prompt - 31)
    body: dict[str, Any] = {"model": "big", "messages": [{"role": "user", "content": content}]}
    body |= {} if most is None else {"max_tokens": most}
    ask = parse_request_fields(json.dumps(body).encode(), "messages")
    pool = Pool("big", [], "round-robin")
    return RequestContext(
        cast("HttpExchange", None), ask, CHAT, pool, "id", principal, principal.tier
    )


def deliver(limits: Gate, context: RequestContext, output: int, prompt: int = 10) -> str | None:
    """Tell that so many tokens more were delivered."""
    context.delivered.prompt_tokens = prompt
    context.delivered.output_tokens += output
    visit = limits.visits[id(context)]
    return None if visit is None else visit.on_tokens((0.0,))


def leave(
    limits: Gate,
    context: RequestContext,
    status: RequestStatus = "completed",
    replica: str = "replica",
) -> None:
    """It has ended, after it was sent there."""
    context.status, context.replica_name = status, replica
    visit = limits.visits.pop(id(context))
    if visit is not None:
        visit.on_complete()


async def refusal(limits: Gate, context: RequestContext) -> ApiError | None:
    """How the request is refused; None: it is let in."""
    try:
        await limits.on_request(context)
    except ApiError as error:
        return error
    return None
