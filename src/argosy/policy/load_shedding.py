"""Whom to turn away before a queue collapses: the fuller it is, the higher the tier that may still join.

What waits longer than its client will is work for nobody. So lower tiers are refused first, at once and
with a time to come back, while the queue is still short enough for the others. And who has much waiting already is
refused before who has little, so that one tenant's flood leaves room for all others (dynamic thresholds:
Choudhury & Hahne 1998), and its old requests are nobody else's trouble.
"""

from __future__ import annotations

from argosy.policy.routing import ReplicaLoad

MAX_TIER_SATURATION = (1.0, 0.75, 0.5)
"""Premium, standard and free join a queue below this saturation."""
TENANT_QUEUE_ALPHA = 4.0
"""A tenant may have so many times as much waiting as is left: alone it fills four fifths."""
KV_PRESSURE_THRESHOLD = 0.9
"""A KV cache filled up to here is well used; from here on, requests are soon put back for lack of blocks."""


def saturation(oldest_wait_fraction: float, loads: list[ReplicaLoad]) -> float:
    """How near its requests are to waiting in vain: 0 is idle, 1 takes nobody.

    `oldest` is how long the tenant's next request has waited, as a part of the longest that one may. The replicas
    count by the least pressed of them: by what waits inside it, which several gateways see alike, and by the last
    tenth of its KV cache.
    """
    return max(oldest_wait_fraction, min((replica_pressure(load) for load in loads), default=0.0))


def replica_pressure(load: ReplicaLoad) -> float:
    """How much more is at a replica than it runs, 0 to 1, as it reported.

    Not what gateways sent beyond its seats: they stop that, and it would be lower tiers' that make others wait.
    """
    queue = max(0, load.waiting - load.oversubscribed) / load.max_seqs if load.max_seqs else 0.0
    memory = (
        (load.kv_usage_ratio - KV_PRESSURE_THRESHOLD) / (1.0 - KV_PRESSURE_THRESHOLD)
        if load.waiting
        else 0.0
    )
    return min(1.0, max(0.0, queue, memory))


def is_tier_admitted(tier: int, queue_saturation: float) -> bool:
    """Whether a request of this tier may join the queue."""
    return queue_saturation < MAX_TIER_SATURATION[tier]


def is_tenant_within_share(
    tier: int, tenant_queued: int, total_queued: int, max_queued: int
) -> bool:
    """Whether a tenant that has `own` of the `waiting` may add to them, where `most` may wait (in count or bytes)."""
    return tenant_queued < TENANT_QUEUE_ALPHA * (
        MAX_TIER_SATURATION[tier] * max_queued - total_queued
    )
