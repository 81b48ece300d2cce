"""Selection of a second replica for a request whose replica is silent."""

from __future__ import annotations

from argosy.policy.load_shedding import saturation
from argosy.policy.placement.pool import RandomSource, Selection
from argosy.policy.placement.pool_queue import PoolQueue
from argosy.policy.placement.replica import PlacementReplica
from argosy.policy.placement.request import PlacementRequest


def select_hedge(
    queue: PoolQueue,
    request: PlacementRequest,
    silent: PlacementReplica,
    now: float,
    random_source: RandomSource,
) -> Selection | None:
    """Select a second replica that streams and has not failed the request, if capacity can be spared.

    Its arithmetic must be that of the silent one, so that the output does not depend on which of them is faster.

    Returns:
        The selection, or None if hedging is off or no capacity can be spared.
    """
    pool, tier = queue.pool, request.tier
    hedging = pool.hedging
    if hedging is None:
        return None
    excluded = {silent.name} | request.failed
    excluded |= {
        replica.name
        for replica in pool.replicas.values()
        if replica.arithmetic_id != silent.arithmetic_id or not request.uses_stream(replica)
    }
    free_slots, total_slots = pool.free_slots(now)
    if tier > queue.lowest_admissible_tier(free_slots, total_slots, now) or all(
        replica.name in excluded for replica in pool.replicas_with_free_slots(tier, now)
    ):
        return None
    is_affordable = hedging.try_acquire(
        now,
        queued=len(queue),
        free_slots=free_slots[tier],
        total_slots=total_slots,
        saturation=saturation(0.0, pool.reachable_loads()),
    )
    return pool.select_replica(request, excluded, now, random_source) if is_affordable else None
