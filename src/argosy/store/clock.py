"""Clocks that never go back when the system clock is set back. Limits and waits use them."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Function that returns seconds since the epoch."""


class SteadyClock:
    """Monotonic seconds since the epoch. After the system clock is set back, time continues from the last reading."""

    def __init__(self, clock: Clock | None = None) -> None:
        """Wrap `clock`, by default the system clock."""
        self._clock = clock or time.time
        self._offset_s = 0.0
        self._last_s = 0.0

    def __call__(self) -> float:
        """Return the current time in seconds since the epoch."""
        now = self._clock() + self._offset_s
        if now < self._last_s:
            self._offset_s += self._last_s - now
            now = self._last_s
        self._last_s = now
        return now


steady_clock = SteadyClock()
"""Process-wide clock of the limits. The quota backend and the local meters share it."""
