"""What a replica gets that has said that it is full (429, 503): no more than it has, and slowly more from then on.

How many requests a server takes it seldom says, and others may send it some too. So that number is found as TCP finds
a rate, by going a little too far now and then; and the refusal tells it. Without one it grows by 2 in a second, by 30
in five and by 240 in fifteen. What was refused waits for room like all that is new: it costs the replica nothing until
there is some, so it needs no budget.
"""

from __future__ import annotations

import math

COOL_S = 0.5
"""How long it is left alone where nothing of ours runs there whose end makes room; each time in a row twice that,"""
COOL_FULL_S = 4.0
"""and at most so long, unless it says more itself (Retry-After)."""
COOL_MOST_S = 60.0
"""How long at most, whatever it says: it is asked again, were it full for a day."""
DAY_S = 86_400.0


class Backpressure:
    """One replica's. Pure: the time is an argument."""

    __slots__ = ("_cooled", "_from", "_most", "_until")

    def __init__(self) -> None:
        self._cooled = 0
        """Times in a row that it was left alone, without an answer between."""
        self._most = math.inf
        """Requests that it gets at a time,"""
        self._from = -math.inf
        """from then on, slowly more; none before."""
        self._until = -math.inf
        """Until then it is full, as it says."""

    def cooling(self, now: float) -> bool:
        """Whether it is left alone."""
        return now < self._from

    def full_s(self, now: float) -> float:
        """For how long it is full, as it says; 0 where it has not said so, or will be asked again in any case."""
        return max(0.0, self._until - now) if self.cooling(now) else 0.0

    def most(self, now: float) -> float:
        """Requests that it gets at a time, as far as it has refused any; none while it is left alone."""
        since_s = now - self._from
        return self._most + since_s * (1.0 + since_s) if since_s >= 0 else 0.0

    def refused(self, running: int, now: float, retry_after_s: float | None = None) -> None:
        """It did not take a request beside `running` others of ours; it may have said when to come back."""
        wait = 0.0
        if retry_after_s is not None or not running:
            if not self.cooling(now):  # else it was asked before it said so
                self._cooled += 1
            wait = min(COOL_S * 2 ** min(self._cooled - 1, 30), COOL_FULL_S)
            wait = min(max(wait, retry_after_s or 0.0), COOL_MOST_S)
        if not self.cooling(now) or retry_after_s is not None:
            self._until = now + min(retry_after_s or 0.0, DAY_S)
        self._most = max(1.0, running)
        self._from = max(self._from, now + wait)

    def answered(self) -> None:
        """It took one."""
        self._cooled = 0
