"""Share of a replica's concurrency slots that one of several gateways may use.

Gateways do not coordinate; each decides alone from the requests of other gateways that the replica reports. A gateway
takes the slots that the others do not use. If that is less than an even share among the gateways with requests of its
tier, it may exceed the total by one `OVERCOMMIT_DIVISOR`-th of the slots. Gateways above their even share then take no
new slots when their responses end. All slots stay in use this way, and each gateway gets its share within a few
responses.

Requests of higher tiers at other gateways have precedence, and their slots are not shared. Requests of lower tiers only
occupy slots, because gateways with lower tiers give way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    used = sum(sum(by_tier.values()) for by_tier in other_gateways)
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
