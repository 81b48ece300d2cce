"""Monitor of the event loop's lag: work that can wait gives way while requests for models use up the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

PROBE_INTERVAL_S = 0.1
OVERLOAD_LAG_S = 0.1
"""Mean lag from which the loop is overloaded."""
RECOVERY_LAG_S = 0.05
"""Mean lag below which it is no longer overloaded."""
MAX_PROBE_LAG_S = 0.4
"""Largest lag of a probe that counts, so that one long callback or a suspended process is no overload."""
_WEIGHT_OF_LATEST = 0.2
"""Weight of the latest probe in the mean."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class LoopMonitor:
    """Mean lag of an event loop: how much later than planned its callbacks run."""

    def __init__(self) -> None:
        self.lag_s = 0.0
        """Moving mean over about a second."""
        self.is_overloaded = False
        """Whether requests have to wait for the loop."""
        self.on_recovered: Callable[[], None] | None = None
        """Called when the loop is no longer overloaded."""

    async def run(self) -> None:
        """Probe the lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            planned_at = loop.time() + PROBE_INTERVAL_S
            await asyncio.sleep(PROBE_INTERVAL_S)
            self.record_lag(loop.time() - planned_at)

    def record_lag(self, lag_s: float) -> None:
        """Record the lag of one probe."""
        self.lag_s += _WEIGHT_OF_LATEST * (min(max(0.0, lag_s), MAX_PROBE_LAG_S) - self.lag_s)
        if not self.is_overloaded and self.lag_s > OVERLOAD_LAG_S:
            self.is_overloaded = True
            log.warning("event_loop_overloaded", lag_s=round(self.lag_s, 3))
        elif self.is_overloaded and self.lag_s < RECOVERY_LAG_S:
            self.is_overloaded = False
            log.info("event_loop_recovered", lag_s=round(self.lag_s, 3))
            if self.on_recovered is not None:
                self.on_recovered()
