"""Requests that were placed by hand, without a replica server behind them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from argosy.gateway.pool import Pool, build_placement_request
from argosy.gateway.principal import ANONYMOUS, Principal
from argosy.gateway.proxy.placement_driver import PlacementDriver
from argosy.gateway.proxy.upstream_call import UpstreamCall
from argosy.gateway.request_context import RequestContext
from argosy.gateway.request_fields import RequestFields
from argosy.policy import AttemptOutcome
from argosy.policy.placement import (
    Attempt,
    AttemptAnswered,
    AttemptEnded,
    AttemptEnding,
    Move,
    Pause,
    PlacementLimits,
    PlacementReplica,
    PlacementRequest,
    Refuse,
    Selection,
)


class PlacedByHand:
    """A `PlacedRequest` whose test performs the effects."""

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self.request = context.start_placement()
        self.refusal: Refuse | None = None
        self.attempt: Attempt | None = None
        """Latest attempt that was to be sent."""

    def on_send(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.context.replica_name = attempt.replica.name

    def on_cancel(self, attempt: Attempt) -> None: ...

    def on_move(self, move: Move) -> None:
        self.context.move_to_pool(cast("Pool", move.pool), move.reason)

    def on_pause(self, pause: Pause) -> None: ...

    def on_refuse(self, refusal: Refuse) -> None:
        self.refusal = refusal


def new_driver(
    clock: Callable[[], float], limits: PlacementLimits | None = None
) -> PlacementDriver:
    return PlacementDriver(limits or PlacementLimits(), clock, random.Random(0))


def arrive(driver: PlacementDriver, context: RequestContext) -> PlacedByHand:
    """Let a request arrive."""
    placed = PlacedByHand(context)
    driver.arrive(placed.request, placed, context.pool)
    return placed


def place(
    context: RequestContext, clock: Callable[[], float]
) -> tuple[PlacementDriver, UpstreamCall]:
    """Place a request in its pool. Returns the driver and the call, whose stream has begun."""
    driver = new_driver(clock)
    request = arrive(driver, context).request
    (attempt,) = request.attempts
    driver.record_sent(request, attempt)
    driver.handle(AttemptAnswered(request, attempt, is_stream=True))
    return driver, UpstreamCall(attempt, clock)


def end_attempt(
    driver: PlacementDriver,
    request: PlacementRequest,
    ending: AttemptEnding = AttemptEnding.COMPLETED,
    outcome: AttemptOutcome | None = AttemptOutcome.SUCCESS,
) -> None:
    """End the attempt of a request."""
    (attempt,) = request.attempts
    driver.handle(AttemptEnded(request, attempt, ending, outcome))


def placement_of(context: RequestContext) -> PlacementRequest:
    """Return the state in placement of a request that was admitted."""
    assert context.placement is not None
    return context.placement


@dataclass(frozen=True)
class RoutedRequest:
    """Where a request was sent, and what was known of its prompt there."""

    replica: PlacementReplica
    uncached_tokens: int
    block_keys: list[bytes]


def last_decision(context: RequestContext) -> RoutedRequest:
    """Return the decision about the replica of the request's last attempt."""
    request = placement_of(context)
    attempt = request.last_attempt
    assert attempt is not None
    return RoutedRequest(attempt.replica, attempt.chosen.uncached_tokens, request.block_keys)


def select_replica(
    pool: Pool,
    fields: RequestFields,
    *,
    principal: Principal = ANONYMOUS,
    now: float = 0.0,
) -> Selection | None:
    """Select the replica of a request with these fields, without placing it."""
    request = build_placement_request(
        "id",
        fields,
        principal,
        pool.model,
        tier=1,
        deadline=float("inf"),
        start_wait_s=0.0,
        unsuitable=set(),
    )
    return pool.select_replica(request, frozenset(), now, random)
