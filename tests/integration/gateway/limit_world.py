"""Callers, their limits, and requests of theirs: what tests of the limits stage share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, cast

from argosy.gateway.filters.limit_filter import Limits
from argosy.gateway.filters.limit_filter_state import Held
from argosy.gateway.pool.pool import Pool
from argosy.gateway.principal import Caller
from argosy.gateway.request_context import CHAT, Journey, Status, Visit
from argosy.gateway.request_fields import read
from argosy.http_server import Exchange
from argosy.protocol import ApiError
from argosy.store import (
    Clock,
    Directory,
    Limit,
    OwnerKind,
    Price,
    Project,
    SharedState,
    Unit,
    Unsure,
    Window,
    steady,
)

CALLER = Caller(organisation="org", project="shop", key="k1", user="ann")
OTHER = Caller(organisation="org", project="shop", key="k2", user="bob")
OWNERS: dict[OwnerKind, str] = {
    "organisation": "org",
    "project": "shop",
    "user": "ann",
    "key": "k1",
}


class Gate(Limits):
    """The stage, and the visits of those that it has let in."""

    visits: dict[int, Visit | None]
    """By the journey's identity as an object."""

    def __init__(self, state: SharedState, clock: Clock = steady) -> None:
        super().__init__(state, clock)
        self.visits = {}

    async def enter(self, journey: Journey) -> Held | None:
        held = await super().enter(journey)
        self.visits[id(journey)] = held
        return held


def limit(
    unit: Unit,
    amount: int,
    window: Window | None = "minute",
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


def directory(*limits: Limit, unsure: Unsure = "open", prices: Iterable[Price] = ()) -> Directory:
    """With one project."""
    project = Project(
        id="shop", organisation="org", name="shop", when_unsure=unsure, created_at=0.0
    )
    return Directory(projects=(project,), limits=limits, prices=tuple(prices))


def request(caller: Caller = CALLER, *, prompt: int = 10, most: int | None = 5) -> Journey:
    """A request with about so many tokens in its prompt."""
    content = "x" * (4 * prompt - 31)
    body: dict[str, Any] = {"model": "big", "messages": [{"role": "user", "content": content}]}
    body |= {} if most is None else {"max_tokens": most}
    ask = read(json.dumps(body).encode(), "messages")
    pool = Pool("big", [], "round-robin")
    return Journey(cast("Exchange", None), ask, CHAT, pool, "id", caller, caller.tier)


def deliver(limits: Gate, journey: Journey, output: int, prompt: int = 10) -> str | None:
    """Tell that so many tokens more were delivered."""
    journey.delivered.prompt_tokens = prompt
    journey.delivered.output_tokens += output
    visit = limits.visits[id(journey)]
    return None if visit is None else visit.counted((0.0,))


def leave(
    limits: Gate, journey: Journey, status: Status = "completed", replica: str = "replica"
) -> None:
    """It has ended, after it was sent there."""
    journey.status, journey.replica = status, replica
    visit = limits.visits.pop(id(journey))
    if visit is not None:
        visit.leave()


async def refusal(limits: Gate, journey: Journey) -> ApiError | None:
    """How the request is refused; None: it is let in."""
    try:
        await limits.enter(journey)
    except ApiError as error:
        return error
    return None
