"""Preview: what placement would do with a request now, and why it would not use each of the other replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec

from argosy.policy.placement.messages import RefusalReason
from argosy.policy.placement.pool import PlacementPool, RandomSource, Selection
from argosy.policy.placement.pool_queue import Arrival, PoolQueue
from argosy.policy.placement.replica import PlacementReplica
from argosy.policy.placement.request import PlacementRequest
from argosy.policy.replica_status import ReplicaStatus

_Pool = PlacementPool[Any]


class PlacementPreview(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a request if it arrived now. Without a replica and a refusal it would wait."""

    pool: PlacementPool[Any]
    """Pool that would serve it."""
    takeover_reason: str = ""
    """Why this is not the pool of the version to which the request is assigned; empty if it is."""
    selection: Selection | None = None
    """Comparison of the replicas; None if none would be selected now."""
    refusal: tuple[RefusalReason, float | None] | None = None
    """Why it would be refused, with the time until it may be sent again."""
    queued_ahead: int = 0
    """Queued requests of the same and higher tiers."""


def preview_placement(
    request: PlacementRequest,
    pool: _Pool,
    find_queue: Callable[[_Pool], PoolQueue],
    now: float,
    random_source: RandomSource,
) -> PlacementPreview:
    """Return what would happen to a request, and change nothing but `random_source`.

    Args:
        request: The request, which placement does not know.
        pool: Pool of the version to which it is assigned.
        find_queue: Returns the queue of a pool.
        now: Monotonic time.
        random_source: Copy of the source of random numbers.
    """
    takeover_reason = pool.find_takeover_reason(now)
    if pool.takeover is None or not takeover_reason:
        queue = find_queue(pool)
        arrival = _preview_arrival(request, queue, now, random_source)
        if arrival.refusal is None or arrival.takes_over is None:
            return _to_preview(request, queue, arrival)
        takeover_reason = arrival.refusal[0].value
    assert pool.takeover is not None
    queue = find_queue(pool.takeover)
    arrival = _preview_arrival(request, queue, now, random_source)
    return _to_preview(request, queue, arrival, takeover_reason)


def _preview_arrival(
    request: PlacementRequest, queue: PoolQueue, now: float, random_source: RandomSource
) -> Arrival[Selection]:
    preview = partial(queue.pool.preview_selection, request, now=now, random_source=random_source)
    arrival = queue.decide_arrival(request, now, partial(preview, frozenset()))
    selected = arrival.selected
    if selected is not None and selected.chosen.load.name in request.unsuitable:
        # The replica would refuse the request at once, and another one would be selected.
        return Arrival(preview(request.unsuitable))
    return arrival


def _to_preview(
    request: PlacementRequest,
    queue: PoolQueue,
    arrival: Arrival[Selection],
    takeover_reason: str = "",
) -> PlacementPreview:
    return PlacementPreview(
        pool=queue.pool,
        takeover_reason=takeover_reason,
        selection=arrival.selected,
        refusal=arrival.refusal,
        queued_ahead=queue.queue.count_up_to(request.tier),
    )


def explain_exclusion(
    pool: _Pool,
    replica: PlacementReplica,
    request: PlacementRequest,
    compared: Collection[str],
    now: float,
) -> str:
    """Return why a replica would not be compared with others for a request; empty if it would.

    Args:
        pool: Pool of the replica.
        replica: The replica.
        request: The request.
        compared: Names of the replicas that would be compared.
        now: Monotonic time.
    """
    if replica.name in compared:
        return ""
    if replica.name in request.unsuitable:
        return "it does not enforce the constraint of the request"
    status = replica.health.status(now)
    if status is not ReplicaStatus.READY:
        return f"{status.value}: {replica.health.reason(now)}"
    if not replica.has_free_slot(request.tier, now):
        limit = replica.slot_share(request.tier, now)
        return f"all of its {limit} slots for this tier are taken"
    if compared:
        return f"not among the replicas that a request to a pool of {len(pool.replicas)} is compared with"
    return "its free slots are for queued requests, or reserved for higher tiers"
