"""How several gateways share the seats of one replica, each for itself, from what the replica says of the others.

Nobody hands seats out. A gateway takes what the others leave. One that has less than an even part of what those of its
tier share may go over the seats by `OVER`, and whoever has more than its part then takes no more as its answers end:
so all seats stay in use, and each gets its part within a few answers' length. Higher tiers of others go before: what
they have is not shared. Lower ones only count in that they are there: it is they who make way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

OVERCOMMIT_DIVISOR = 4
"""A part of one in so many of the seats may be taken twice, so that who has none need not wait for an answer to end."""


def slot_share(slots: int, other_gateways: Sequence[Mapping[int, int]], tier: int) -> int:
    """How many of a replica's seats a gateway may have when its next request is of this tier (0 is the highest).

    `others` are the requests that each other gateway has there, by tier. No tier has fewer than a lower one.
    """
    there = sum(sum(other.values()) for other in other_gateways)
    above = sum(count for other in other_gateways for rank, count in other.items() if rank < tier)
    beside = [other[tier] for other in other_gateways if other.get(tier)]
    left, sharing = max(0, slots - above), 1 + len(beside)
    # What is odd keeps no higher tier out.
    even = left // sharing if above else -(-left // sharing)
    over = slots + max(1, slots // OVERCOMMIT_DIVISOR) - there
    return max(min(max(left - sum(beside), even), over), 0 if above else 1)
