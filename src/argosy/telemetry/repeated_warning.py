"""Warnings about problems that repeat, such as a store that is gone, at a bounded rate."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

INTERVAL_S = 60.0


class RepeatedWarning:
    """Logs a problem at once, and while it repeats once a minute. Each line has how many others were left out.

    Not thread-safe.

    Args:
        logger: Where to log.
        clock: Returns seconds of a clock without steps.
    """

    def __init__(
        self,
        logger: structlog.typing.FilteringBoundLogger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._logged_at = float("-inf")
        self._left_out = 0

    def report(self, event: str, reason: str) -> None:
        """Log an event of this problem, or count it as `left_out` of the next line."""
        now = self._clock()
        if now - self._logged_at < INTERVAL_S:
            self._left_out += 1
            return
        self._logger.warning(event, reason=reason, left_out=self._left_out)
        self._logged_at, self._left_out = now, 0
