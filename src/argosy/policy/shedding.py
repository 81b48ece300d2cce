"""Whom to turn away before a queue collapses: the fuller it is, the higher the tier that may still join.

What waits longer than its client will is work for nobody. So lower tiers are refused first, at once and
with a time to come back, while the queue is still short enough for the others.
"""

from __future__ import annotations

from argosy.policy.routing import ReplicaLoad

CEILINGS = (1.0, 0.75, 0.5)
"""Premium, standard and free join a queue below this saturation."""
KV_FREE = 0.9
"""A KV cache filled up to here is well used; from here on, requests are soon put back for lack of blocks."""


def saturation(waiting: float, oldest: float, loads: list[ReplicaLoad]) -> float:
    """How near a queue is to collapse: 0 is idle, 1 takes nobody.

    `waiting` and `oldest` are parts of the most that may wait (in count or bytes) and of the longest
    that one may (0 to 1). The replicas count by the least pressed of them: by what waits inside it,
    which several gateways see alike, and by the last tenth of its KV cache.
    """
    pressed = min((pressure(load) for load in loads), default=0.0)
    return max(waiting, oldest, pressed)


def pressure(load: ReplicaLoad) -> float:
    """How much more is at a replica than it runs, 0 to 1, as it reported."""
    queue = load.waiting / load.capacity if load.capacity else 0.0
    memory = (load.kv_used - KV_FREE) / (1.0 - KV_FREE) if load.waiting else 0.0
    return min(1.0, max(0.0, queue, memory))


def admits(tier: int, saturated: float) -> bool:
    """Whether a request of this tier may join the queue."""
    return saturated < CEILINGS[tier]
