"""Clocks for limits and waits: durations by the monotonic clock, days and months by the wall clock as it is now."""

from __future__ import annotations

import time
from collections.abc import Callable

from argosy.policy import ClockOffset

Clock = Callable[[], float]
"""Function that returns seconds since the epoch."""

MAX_DRIFT_S = 1.0
"""Difference from the wall clock that is ignored, since both clocks are adjusted a little all the time."""


class SteadyClock(ClockOffset):
    """Seconds since the epoch, as of the start of the process, that no change of the system clock alters.

    `offset_s` follows the system clock at each reading.
    """

    def __init__(self) -> None:
        super().__init__()
        self._monotonic_offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        """Return the current time in seconds since the epoch."""
        now = time.monotonic() + self._monotonic_offset_s
        offset_s = now - time.time()
        if abs(offset_s - self.offset_s) > MAX_DRIFT_S:
            self.offset_s = offset_s if abs(offset_s) > MAX_DRIFT_S else 0.0
        return now


steady_clock = SteadyClock()
"""Process-wide clock of the limits. The quota backend and the local meters share it."""
