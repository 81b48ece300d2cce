"""Decision to send a second attempt of a request whose replica is silent, within a budget and only into spare slots.

Hedging a few percent of requests removes most of the latency tail (Dean & Barroso, "The Tail at Scale", 2013). Without
a budget, hedged requests would double the load of a pool that is slow because it is full.
"""

from __future__ import annotations

from argosy.policy.retry_budget import RetryBudget

HEDGE_RATIO = 0.05
"""Largest fraction of recent requests that may be hedged."""
HEDGE_RESERVE = 2.0
"""Hedged requests permitted beyond that fraction, for times with little traffic."""
HALF_LIFE_S = 60.0
MIN_FREE_FRACTION = 0.25
"""Fraction of the concurrency slots that must be free."""


class Hedging:
    """Hedging policy and budget of one pool."""

    __slots__ = ("_budget", "after_s")

    def __init__(self, after_s: float) -> None:
        """Create a policy that considers a request stuck after `after_s` seconds without output."""
        self.after_s = after_s
        self._budget = RetryBudget(HEDGE_RATIO, HEDGE_RESERVE, HALF_LIFE_S)

    def record_request(self, now: float) -> None:
        """Count a request, which increases the budget."""
        self._budget.record_request(now)

    def try_acquire(
        self, now: float, *, queued: int, free_slots: int, total_slots: int, saturation: float
    ) -> bool:
        """Return whether a second attempt may be sent now, and charge it to the budget if so.

        Args:
            now: Seconds on a monotonic clock.
            queued: Requests in the queue.
            free_slots: Free concurrency slots.
            total_slots: All concurrency slots.
            saturation: Saturation of the queue from 0 to 1.
        """
        if queued or saturation > 0.0 or not 0 < free_slots >= MIN_FREE_FRACTION * total_slots:
            return False
        return self._budget.try_acquire(now)
