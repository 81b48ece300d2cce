"""Reservation of concurrency slots for higher tiers that sent a request recently.

Without a reservation, a request of a high tier that finds every slot taken waits until a response ends, even though it
is dispatched first then. Some slots therefore stay free for each higher tier until it uses half of all slots. Beyond
that the tier waits in the queue and takes turns with the others.
"""

from __future__ import annotations

from collections.abc import Sequence

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
