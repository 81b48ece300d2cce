"""What a replica gets that has said that it is full (429, 503): no more than it has, and slowly more from then on.

How many requests a server takes it seldom says, and others may send it some too. So that number is found as TCP finds
a rate, by going a little too far now and then; and the refusal tells it. Without one it grows by 2 in a second, by 30
in five and by 240 in fifteen. What was refused waits for room like all that is new: it costs the replica nothing until
there is some, so it needs no budget.
"""

from __future__ import annotations

import math

BASE_BACKOFF_S = 0.5
"""How long it is left alone where nothing of ours runs there whose end makes room; each time in a row twice that,"""
MAX_BACKOFF_S = 4.0
"""and at most so long, unless it says more itself (Retry-After)."""
MAX_RETRY_AFTER_S = 60.0
"""How long at most, whatever it says: it is asked again, were it full for a day."""
MAX_REPORTED_WAIT_S = 86_400.0


class Backpressure:
    """One replica's. Pure: the time is an argument."""

    __slots__ = ("_backoff_until", "_base_limit", "_consecutive_backoffs", "_reported_full_until")

    def __init__(self) -> None:
        self._consecutive_backoffs = 0
        """Times in a row that it was left alone, without an answer between."""
        self._base_limit = math.inf
        """Requests that it gets at a time,"""
        self._backoff_until = -math.inf
        """from then on, slowly more; none before."""
        self._reported_full_until = -math.inf
        """Until then it is full, as it says."""

    def is_backing_off(self, now: float) -> bool:
        """Whether it is left alone."""
        return now < self._backoff_until

    def retry_after_s(self, now: float) -> float:
        """For how long it is full, as it says; 0 where it has not said so, or will be asked again in any case."""
        return max(0.0, self._reported_full_until - now) if self.is_backing_off(now) else 0.0

    def concurrency_limit(self, now: float) -> float:
        """Requests that it gets at a time, as far as it has refused any; none while it is left alone."""
        since_s = now - self._backoff_until
        return self._base_limit + since_s * (1.0 + since_s) if since_s >= 0 else 0.0

    def on_rejected(
        self, other_running: int, now: float, retry_after_s: float | None = None
    ) -> None:
        """It did not take a request beside `running` others of ours; it may have said when to come back."""
        wait = 0.0
        if retry_after_s is not None or not other_running:
            if not self.is_backing_off(now):  # else it was asked before it said so
                self._consecutive_backoffs += 1
            wait = min(BASE_BACKOFF_S * 2 ** min(self._consecutive_backoffs - 1, 30), MAX_BACKOFF_S)
            wait = min(max(wait, retry_after_s or 0.0), MAX_RETRY_AFTER_S)
        if not self.is_backing_off(now) or retry_after_s is not None:
            self._reported_full_until = now + min(retry_after_s or 0.0, MAX_REPORTED_WAIT_S)
        self._base_limit = max(1.0, other_running)
        self._backoff_until = max(self._backoff_until, now + wait)

    def on_accepted(self) -> None:
        """It took one."""
        self._consecutive_backoffs = 0
