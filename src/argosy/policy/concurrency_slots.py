"""Shares of a replica's free concurrency slots: one for each gateway, and reserves for higher tiers.

Gateways do not coordinate; each decides alone from the requests of other gateways that the replica reports. A gateway
takes the slots that the others do not use. If that is less than an even share among the gateways with requests of its
tier, it may exceed the total by one `OVERCOMMIT_DIVISOR`-th of the slots. Gateways above their even share then take no
new slots when their responses end. All slots stay in use this way, and each gateway gets its share within a few
responses.

Requests of higher tiers at other gateways have precedence, and their slots are not shared. Requests of lower tiers only
occupy slots, because gateways with lower tiers give way.

Within a gateway, slots are reserved for higher tiers that sent a request recently. Without a reservation, a request of
a high tier that finds every slot taken waits until a response ends, even though it is dispatched first then. Some slots
therefore stay free for each higher tier until it uses half of all slots. Beyond that the tier waits in the queue and
takes turns with the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from argosy.policy.fair_queue import BATCH_TIER

OVERCOMMIT_DIVISOR = 4
"""The slots divided by this number may be taken twice, so that a gateway need not wait for a response to end."""


def slot_share(slots: int, other_gateways: Sequence[Mapping[int, int]], tier: int) -> int:
    """Return how many slots a gateway may use if its next request is of `tier` (0 is the highest).

    No tier gets fewer slots than a lower tier.

    Args:
        slots: Concurrency slots of the replica.
        other_gateways: Requests of each other gateway on the replica, by tier.
        tier: Tier of the next request.
    """
    used = sum(
        count
        for by_tier in other_gateways
        for rank, count in by_tier.items()
        if rank < BATCH_TIER or tier == BATCH_TIER  # a replica lets lines of batches yield
    )
    used_above = sum(
        count for by_tier in other_gateways for rank, count in by_tier.items() if rank < tier
    )
    used_same_tier = [by_tier[tier] for by_tier in other_gateways if by_tier.get(tier)]
    shared_slots, sharing_gateways = max(0, slots - used_above), 1 + len(used_same_tier)
    # Round down below a higher tier, so that the remainder keeps no higher tier out.
    even_share = (
        shared_slots // sharing_gateways if used_above else -(-shared_slots // sharing_gateways)
    )
    overcommit = slots + max(1, slots // OVERCOMMIT_DIVISOR) - used
    return max(
        min(max(shared_slots - sum(used_same_tier), even_share), overcommit),
        0 if used_above else 1,
    )


RESERVED_SLOT_DIVISOR = 8
"""For each higher tier, the total slots divided by this number stay free."""
RECENT_WINDOW_S = 60.0
"""Seconds after its last request for which a tier has a reservation."""


def no_reservation_active(tier: int, last_request_at: Sequence[float], now: float) -> bool:
    """Return whether no higher tier has sent a request recently, so that `tier` may take any free slot."""
    for higher in range(tier):  # noqa: SIM110 - a generator costs more than the loop, and each request passes here
        if now - last_request_at[higher] < RECENT_WINDOW_S:
            return False
    return True


def reserved_slots(
    tier: int,
    total_slots: int,
    running: Sequence[int],
    last_request_at: Sequence[float],
    now: float,
) -> int:
    """Return how many free slots are kept for the tiers above `tier`. The sequences are indexed by tier.

    Args:
        tier: The tier; 0 is the highest.
        total_slots: All slots of the replicas.
        running: Number of running requests.
        last_request_at: Time of the last request.
        now: Current time.
    """
    return sum(
        max(0, min(total_slots // RESERVED_SLOT_DIVISOR, total_slots // 2 - running[higher]))
        for higher in range(tier)
        if now - last_request_at[higher] < RECENT_WINDOW_S
    )


def lowest_admissible_tier(
    free_slots: Sequence[int],
    total_slots: int,
    running: Sequence[int],
    last_request_at: Sequence[float],
    now: float,
) -> int:
    """Return the lowest tier that may take a free slot; -1 if no tier may.

    The sequences are indexed by tier. No tier has fewer `free_slots` than a lower tier.

    Args:
        free_slots: Slots that are free for each tier.
        total_slots: All slots of the replicas.
        running: Number of running requests.
        last_request_at: Time of the last request.
        now: Current time.
    """
    for tier, free in enumerate(free_slots):
        if free <= reserved_slots(tier, total_slots, running, last_request_at, now):
            return tier - 1
    return len(running) - 1
