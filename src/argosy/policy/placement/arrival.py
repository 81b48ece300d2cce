"""Arrival: whether a request that arrives at a pool gets a replica at once, waits, moves, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from argosy.policy.placement.messages import RefusalReason
from argosy.policy.placement.pool import PlacementPool
from argosy.policy.placement.pool_queue import PoolQueue
from argosy.policy.placement.request import PlacementRequest

S = TypeVar("S")


class Arrival(NamedTuple, Generic[S]):
    """Decision about a request that arrives. Without a replica and a refusal it waits."""

    selected: S | None = None
    """Decision about its replica."""
    refusal: tuple[RefusalReason, float | None] | None = None
    """Why it may not wait, with the time until it may."""
    takes_over: PlacementPool[Any] | None = None
    """Pool that serves it instead of refusing it."""


def decide_arrival(
    request: PlacementRequest, queue: PoolQueue, now: float, select: Callable[[], S | None]
) -> Arrival[S]:
    """Decide about a request that arrives at the pool of a queue, and that no takeover concerns.

    Args:
        request: The request.
        queue: Queue of the pool.
        now: Monotonic time.
        select: Selects a replica of the pool; returns None if none has a free slot.
    """
    pool = queue.pool
    if len(pool.poison_requests):
        wait_s = pool.poison_requests.retry_after_s(request.compute_digest(), now)
        if wait_s > 0:
            return Arrival(refusal=(RefusalReason.QUARANTINED, wait_s))
    if queue.may_skip_queue(request, now):
        selected = select()
        if selected is not None:
            return Arrival(selected)
    refusal = queue.find_refusal(request, now)
    return Arrival(refusal=refusal, takes_over=None if refusal is None else pool.takeover)
