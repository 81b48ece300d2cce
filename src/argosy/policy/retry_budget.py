"""When to try again: a budget that retries draw on, and waits with full jitter."""

from __future__ import annotations

BASE_BACKOFF_S = 0.1
"""The longest wait before the first retry."""


class RetryBudget:
    """Retries may be this share of the requests of the last while, plus a few for quiet times.

    In its first `t` seconds they are at most `share` x requests + `reserve` x (1 + t x ln 2 / `half_life_s`).

    Without a budget retries multiply the load of a pool that is already failing. The count of requests
    fades with time (half of it each `half_life_s`), so no history is kept.
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
        """A first attempt went out."""
        self._decay(now)
        self._requests += 1

    def try_acquire(self, now: float) -> bool:
        """Whether one retry may go out now; it is counted when it may."""
        self._decay(now)
        if self._retries + 1 > self._reserve + self._ratio * self._requests:
            return False
        self._retries += 1
        return True

    def _decay(self, now: float) -> None:
        if now > self._decayed_at:
            left = 0.5 ** ((now - self._decayed_at) / self._half_life_s)
            self._requests *= left
            self._retries *= left
            self._decayed_at = now


def backoff_s(attempt: int, draw: float, *, max_s: float = 5.0) -> float:
    """Seconds before retry number `attempt` (from 1); `draw` is uniform in [0, 1).

    Full jitter (Brooker, "Exponential Backoff and Jitter", 2015): anything from nothing to the exponential.
    """
    return draw * min(max_s, BASE_BACKOFF_S * 2.0 ** min(attempt - 1, 60))
