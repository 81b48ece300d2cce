"""How long requests wait for a replica that is away: while it may be back soon, and not longer.

What is started again is back within seconds or, with a large model, minutes, so requests that come meanwhile wait for
it as they would were it full. Nobody waits for what never was there, or has been away for longer. One that cannot be
reached gets a request now and then, which finds out: more would fail too, and be retries then, out of their order.
"""

from __future__ import annotations

import math

LOADING_S = 300.0
"""For one that says that it loads its model or restarts its engine; counted from when it was there, as ever."""
AGAIN_S = 0.5
"""After how long one more request may find out whether a replica that was lost is back."""


class Absence:
    """One replica's, which is there until something else is known. Pure: the time is an argument."""

    __slots__ = ("_again", "_allowed_s", "_patience_s", "_since", "away", "met")

    def __init__(self, patience_s: float = 30.0) -> None:
        self.away = False
        self.met = False
        """Something was heard of it, ever."""
        self._patience_s = patience_s
        self._allowed_s = patience_s
        self._since = -math.inf
        """When it was last there, or first said that it would be."""
        self._again = -math.inf

    @property
    def until(self) -> float:
        """When waiting for it ceases to make sense; infinity: it is there."""
        return self._since + self._allowed_s if self.away else math.inf

    def more(self, now: float) -> int:
        """Requests that it gets beside those that it has, while it is away."""
        return int(now >= self._again)

    def asked(self, now: float) -> None:
        """It gets one."""
        self._again = now + AGAIN_S

    def there(self) -> None:
        """It takes requests."""
        self.away, self.met = False, True

    def lost(self, now: float) -> None:
        """It is not heard of, or says that it goes away."""
        if self.met and not self.away:
            self._since = now
        self.away = True
        self._allowed_s = self._patience_s

    def coming(self, now: float) -> None:
        """It says that it will take requests."""
        if not self.away or self._since == -math.inf:
            self._since = now
        self.away = self.met = True
        self._allowed_s = max(LOADING_S, self._patience_s)
