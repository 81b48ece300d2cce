"""Limits of further attempts at a request: the budget of retries, hedges, and requests that make replicas crash."""

from __future__ import annotations

import math
from collections import OrderedDict

from argosy.policy.smoothing import decay_factor

COUNT_STEP_S = 0.1
"""Time within which requests are counted as if they arrived together, because each decay costs more than the rest."""
BASE_BACKOFF_S = 0.1
"""Longest wait before the first retry."""


class RetryBudget:
    """Budget of retries as a fraction of the recent requests, plus a reserve for times with little traffic.

    In the first `t` seconds there are at most `ratio` x requests + `reserve` x (1 + t x ln 2 / `half_life_s`) retries.

    Without a budget, retries multiply the load of a pool that is already failing. The count of requests decays with
    a half-life of `half_life_s` seconds, so no history is kept.
    """

    __slots__ = ("_decayed_at", "_half_life_s", "_ratio", "_requests", "_reserve", "_retries")

    def __init__(self, ratio: float = 0.1, reserve: float = 5.0, half_life_s: float = 10.0) -> None:
        self._ratio = ratio
        self._reserve = reserve
        self._half_life_s = half_life_s
        self._requests = 0.0
        self._retries = 0.0
        self._decayed_at = 0.0

    def record_request(self, now: float) -> None:
        """Count a first attempt."""
        if now - self._decayed_at >= COUNT_STEP_S:
            self._decay(now)
        self._requests += 1

    def try_acquire(self, now: float) -> bool:
        """Return whether a retry may be sent now, and charge it to the budget if so."""
        self._decay(now)
        if self._retries + 1 > self._reserve + self._ratio * self._requests:
            return False
        self._retries += 1
        return True

    def _decay(self, now: float) -> None:
        if now > self._decayed_at:
            decay = decay_factor((now - self._decayed_at) / self._half_life_s)
            self._requests *= decay
            self._retries *= decay
            self._decayed_at = now


def backoff_s(attempt: int, draw: float, *, max_s: float = 5.0) -> float:
    """Return the seconds to wait before retry number `attempt` (from 1); `draw` is uniform in [0, 1).

    With full jitter (Brooker, "Exponential Backoff and Jitter", 2015) the wait is uniform between 0 and the exponential
    backoff.
    """
    return draw * min(max_s, math.ldexp(BASE_BACKOFF_S, min(attempt - 1, 60)))


HEDGE_RATIO = 0.05
"""Largest fraction of recent requests that may be hedged."""
HEDGE_RESERVE = 2.0
"""Hedged requests permitted beyond that fraction, for times with little traffic."""
HALF_LIFE_S = 60.0
MIN_FREE_FRACTION = 0.25
"""Fraction of the concurrency slots that must be free."""


class Hedging:
    """Second attempts of requests whose replica is silent, within a budget and only into spare slots of one pool.

    Hedging a few percent of requests removes most of the latency tail (Dean & Barroso, "The Tail at Scale", 2013).
    Without a budget, hedged requests would double the load of a pool that is slow because it is full.
    """

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


REJECTION_S = 5.0
QUARANTINE_S = 60.0
MAX_QUARANTINED = 1000
"""Largest number of quarantined requests; the oldest are dropped first."""


class PoisonRequestTracker:
    """Quarantined requests of one pool, by a key that identifies the request.

    They made replicas crash, and each retry would cost as many replicas again. Such a request may only have been
    running when another one crashed the replica. Therefore it is rejected for `REJECTION_S` only. Afterwards it may be
    tried, but until `QUARANTINE_S` have passed the first crash ends it.
    """

    __slots__ = ("_quarantined_at",)

    def __init__(self) -> None:
        self._quarantined_at: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._quarantined_at)

    def quarantine(self, key: bytes, now: float) -> None:
        """Quarantine a request that crashed too many replicas."""
        self._quarantined_at[key] = now
        self._quarantined_at.move_to_end(key)
        if len(self._quarantined_at) > MAX_QUARANTINED:
            self._quarantined_at.popitem(last=False)

    def is_quarantined(self, key: bytes, now: float) -> bool:
        """Return whether the request was quarantined within the last `QUARANTINE_S`."""
        while (
            self._quarantined_at and next(iter(self._quarantined_at.values())) + QUARANTINE_S <= now
        ):
            self._quarantined_at.popitem(last=False)
        return key in self._quarantined_at

    def retry_after_s(self, key: bytes, now: float) -> float:
        """Return the seconds for which the request is still rejected; 0 if it may be tried."""
        return (
            max(0.0, self._quarantined_at[key] + REJECTION_S - now)
            if self.is_quarantined(key, now)
            else 0.0
        )

    def clear(self, key: bytes) -> None:
        """Release a request that was answered."""
        self._quarantined_at.pop(key, None)
