"""Which tiers may take the room that replicas have: some of it is kept for a higher tier that has asked lately.

A request of a high tier that finds every seat taken waits until an answer ends, whoever goes first then. So a part of
the seats stays free for it, until it has half of them itself: from there on it waits in the queue like all others,
and they take turns with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

KEPT = 8
"""One seat in so many is kept free for each higher tier."""
LATELY_S = 60.0
"""Nothing is kept for a tier that has not asked for so long."""


def nothing_kept(tier: int, asked: Sequence[float], now: float) -> bool:
    """Whether no higher tier has asked lately, so that any free seat is for this one."""
    return now - max(asked[:tier], default=-math.inf) >= LATELY_S


def lowest_tier(
    free: Sequence[int], seats: int, running: Sequence[int], asked: Sequence[float], now: float
) -> int:
    """The lowest tier that may have one of those of all `seats` that are `free` for it; -1: none.

    `running` are the requests that each tier has there, `asked` when it asked last. No tier has fewer free than a
    lower one.
    """
    kept = 0
    for tier, (runs, at) in enumerate(zip(running, asked, strict=True)):
        if free[tier] <= kept:
            return tier - 1
        if now - at < LATELY_S:
            kept += max(0, min(seats // KEPT, seats // 2 - runs))
    return len(running) - 1
