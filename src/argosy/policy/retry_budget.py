"""Budget that limits retries to a fraction of the requests, and backoff with full jitter."""

from __future__ import annotations

import math

from argosy.policy.decay import decay_factor

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
