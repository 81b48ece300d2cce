"""How long requests wait for a replica that is away: while it may be back soon, and not longer.

What is started again is back within seconds or, with a large model, minutes, so requests that come meanwhile wait for
it as they would were it full. Nobody waits for what never was there, or has been away for longer. One that cannot be
reached gets a request now and then, which finds out: more would fail too, and be retries then, out of their order.
"""

from __future__ import annotations

import math

STARTING_GRACE_S = 300.0
"""For one that says that it loads its model or restarts its engine; counted from when it was there, as ever."""
RETRY_INTERVAL_S = 0.5
"""After how long one more request may find out whether a replica that was lost is back."""


class OutageTracker:
    """One replica's, which is there until something else is known. Pure: the time is an argument."""

    __slots__ = (
        "_current_grace_s",
        "_down_since",
        "_grace_s",
        "_next_probe_at",
        "is_down",
        "was_ever_up",
    )

    def __init__(self, grace_s: float = 30.0) -> None:
        self.is_down = False
        self.was_ever_up = False
        """Something was heard of it, ever."""
        self._grace_s = grace_s
        self._current_grace_s = grace_s
        self._down_since = -math.inf
        """When it was last there, or first said that it would be."""
        self._next_probe_at = -math.inf

    @property
    def grace_ends_at(self) -> float:
        """When waiting for it ceases to make sense; infinity: it is there."""
        return self._down_since + self._current_grace_s if self.is_down else math.inf

    def probe_budget(self, now: float) -> int:
        """Requests that it gets beside those that it has, while it is away."""
        return int(now >= self._next_probe_at)

    def on_dispatched(self, now: float) -> None:
        """It gets one."""
        self._next_probe_at = now + RETRY_INTERVAL_S

    def mark_up(self) -> None:
        """It takes requests."""
        self.is_down, self.was_ever_up = False, True

    def mark_down(self, now: float) -> None:
        """It is not heard of, or says that it goes away."""
        if self.was_ever_up and not self.is_down:
            self._down_since = now
        self.is_down = True
        self._current_grace_s = self._grace_s

    def mark_starting(self, now: float) -> None:
        """It says that it will take requests."""
        if not self.is_down or self._down_since == -math.inf:
            self._down_since = now
        self.is_down = self.was_ever_up = True
        self._current_grace_s = max(STARTING_GRACE_S, self._grace_s)
