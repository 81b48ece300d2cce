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
        self._offset_s = 0.0
        self._last_s = 0.0

    def __call__(self) -> float:
        """Now."""
        now = self._clock() + self._offset_s
        if now < self._last_s:
            self._offset_s += self._last_s - now
            now = self._last_s
        self._last_s = now
        return now


steady_clock = SteadyClock()
"""The one by which limits are kept, here and at whoever shares them."""
