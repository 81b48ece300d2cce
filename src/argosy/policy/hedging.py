"""Whether a request whose replica is silent is sent to a second one: rarely, and only into room nobody else wants.

A few percent of second attempts cut most of the tail (Dean & Barroso, "The Tail at Scale", 2013); without a
budget they would double the load of a pool that is slow because it is full.
"""

from __future__ import annotations

from argosy.policy.retry_budget import RetryBudget

HEDGE_RATIO = 0.05
"""Second attempts may be this part of the requests of the last while,"""
HEDGE_RESERVE = 2.0
"""and so many more, for quiet times."""
HALF_LIFE_S = 60.0
MIN_FREE_FRACTION = 0.25
"""So much of the seats has to be free."""


class Hedging:
    """One pool's."""

    __slots__ = ("_budget", "after_s")

    def __init__(self, after_s: float) -> None:
        """A request counts as stuck when nothing of its answer has come for `after_s`."""
        self.after_s = after_s
        self._budget = RetryBudget(HEDGE_RATIO, HEDGE_RESERVE, HALF_LIFE_S)

    def record_request(self, now: float) -> None:
        """A request came."""
        self._budget.record_request(now)

    def try_acquire(
        self, now: float, *, queued: int, free_slots: int, total_slots: int, saturation: float
    ) -> bool:
        """Whether a second attempt may go out now; it is counted when it may.

        `waiting` requests are in the queue, `free` of all `seats` are not taken, `saturated` is as
        `shedding.saturation` has it.
        """
        if queued or saturation > 0.0 or not 0 < free_slots >= MIN_FREE_FRACTION * total_slots:
            return False
        return self._budget.try_acquire(now)
