"""Which tiers may take the room that replicas have: some of it is kept for a higher tier that has asked lately.

A request of a high tier that finds every seat taken waits until an answer ends, whoever goes first then. So a part of
the seats stays free for it, until it has half of them itself: from there on it waits in the queue like all others,
and they take turns with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RESERVED_SLOT_DIVISOR = 8
"""One seat in so many is kept free for each higher tier."""
RECENT_WINDOW_S = 60.0
"""Nothing is kept for a tier that has not asked for so long."""


def no_reservation_active(tier: int, last_request_at: Sequence[float], now: float) -> bool:
    """Whether no higher tier has asked lately, so that any free seat is for this one."""
    return now - max(last_request_at[:tier], default=-math.inf) >= RECENT_WINDOW_S


def lowest_admissible_tier(
    free_slots: Sequence[int],
    total_slots: int,
    running: Sequence[int],
    last_request_at: Sequence[float],
    now: float,
) -> int:
    """The lowest tier that may have one of those of all `seats` that are `free` for it; -1: none.

    `running` are the requests that each tier has there, `asked` when it asked last. No tier has fewer free than a
    lower one.
    """
    kept = 0
    for tier, (runs, at) in enumerate(zip(running, last_request_at, strict=True)):
        if free_slots[tier] <= kept:
            return tier - 1
        if now - at < RECENT_WINDOW_S:
            kept += max(0, min(total_slots // RESERVED_SLOT_DIVISOR, total_slots // 2 - runs))
    return len(running) - 1
