"""Clocks that never go back, whatever happens to the system's: limits are kept by one, and whatever has to wait."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since the epoch."""


class SteadyClock:
    """Seconds since the epoch that never go back: when the system is set back, they go on from where they are."""

    def __init__(self, clock: Clock | None = None) -> None:
        """`clock` is the system's."""
        self._clock = clock or time.time
        self._ahead = 0.0
        self._last = 0.0

    def __call__(self) -> float:
        """Now."""
        now = self._clock() + self._ahead
        if now < self._last:
            self._ahead += self._last - now
            now = self._last
        self._last = now
        return now


steady = SteadyClock()
"""The one by which limits are kept, here and at whoever shares them."""
