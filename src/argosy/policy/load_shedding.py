"""Admission of requests to a queue by tier and tenant, before the queue collapses.

A request that waits longer than its client does is wasted work. Therefore the fuller a queue is, the higher the tier
that may still join. Lower tiers are rejected at once with a `Retry-After`, while the queue is still short enough for
the higher ones. Tenants with many queued requests are rejected before tenants with few, so that the flood of one tenant
leaves room for all others (dynamic thresholds: Choudhury & Hahne 1998). The age of one tenant's requests does not count
against other tenants, and neither does the pressure on a replica that it causes. Of the sequences and tokens that
another tenant has at a replica, no more count than the tenant itself would have there with one sequence more.
"""

from __future__ import annotations

from argosy.policy.routing import ReplicaLoad

MAX_TIER_SATURATION = (1.0, 0.75, 0.5, 0.25)
"""Saturation below which the tiers premium, standard, free and batch may join a queue."""
TENANT_QUEUE_ALPHA = 4.0
"""Largest ratio of a tenant's queue share to the free rest; a tenant alone may fill four fifths of the queue."""
KV_PRESSURE_THRESHOLD = 0.9
"""KV cache usage up to which the cache is well used; beyond it, sequences are soon preempted for lack of blocks."""


def saturation(
    oldest_wait_fraction: float, loads: list[ReplicaLoad], tenant: str | None = None
) -> float:
    """Return how near queued requests are to their timeout, from 0 (idle) to 1 (reject all).

    Replicas contribute the pressure of the least loaded one, which several gateways see alike.

    Args:
        oldest_wait_fraction: Wait of the tenant's next request as a fraction of the longest permitted wait.
        loads: Loads of the pool's replicas.
        tenant: Tenant that sends a request; None for the pressure that all tenants cause together.
    """
    pressure = min((replica_pressure(load, tenant) for load in loads), default=0.0)
    return max(oldest_wait_fraction, pressure)


def replica_pressure(load: ReplicaLoad, tenant: str | None = None) -> float:
    """Return the pressure on a replica, 0 to 1, from its reported queue and the last tenth of its KV cache.

    Requests that gateways sent beyond the concurrency slots do not count. Gateways stop sending those by themselves,
    and otherwise requests of lower tiers would cause rejections. For a tenant, what other tenants have there beyond it
    does not count either.
    """
    if not load.waiting:
        return 0.0
    waiting, kv_usage_ratio = max(0, load.waiting - load.oversubscribed), load.kv_usage_ratio
    if tenant is not None:
        sequences, kv_fraction = _count_demand_for(load, tenant)
        waiting = min(waiting, max(0, sequences - max(1, load.running)))
        kv_usage_ratio *= kv_fraction
    queue = waiting / load.max_seqs if load.max_seqs else 0.0
    memory = (kv_usage_ratio - KV_PRESSURE_THRESHOLD) / (1.0 - KV_PRESSURE_THRESHOLD)
    return min(1.0, max(0.0, queue, memory))


def _count_demand_for(load: ReplicaLoad, tenant: str) -> tuple[int, float]:
    """Return the sequences that count for a tenant, and which fraction of the tokens in the KV cache does.

    Sequences that other gateways or direct clients sent count as those of one more tenant.
    """
    demands = load.demand_by_tenant
    own_sequences, own_tokens = demands.get(tenant, (0, 0))
    known = sum(sequences for sequences, _ in demands.values())
    tokens = sum(kv_tokens for _, kv_tokens in demands.values())
    mean_tokens = max(1, tokens // known if known else 1)
    others = [demand for name, demand in demands.items() if name != tenant]
    unknown = load.running + load.waiting - known
    if unknown > 0:
        others.append((unknown, unknown * mean_tokens))
        tokens += unknown * mean_tokens
    counted = own_sequences + sum(min(each, own_sequences + 1) for each, _ in others)
    counted_tokens = own_tokens + sum(min(each, own_tokens + mean_tokens) for _, each in others)
    return counted, counted_tokens / tokens if tokens else 1.0


def is_tier_admitted(tier: int, queue_saturation: float) -> bool:
    """Return whether a request of this tier may join the queue."""
    return queue_saturation < MAX_TIER_SATURATION[tier]


def is_tenant_within_share(
    tier: int, tenant_queued: int, total_queued: int, max_queued: int
) -> bool:
    """Return whether a tenant may queue another request; all amounts are either requests or bytes."""
    return tenant_queued < TENANT_QUEUE_ALPHA * (
        MAX_TIER_SATURATION[tier] * max_queued - total_queued
    )
