"""Work that shares the gateway's event loop: background coroutines, slots and slices of work, a monitor of lag."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from weakref import WeakValueDictionary

import structlog

from argosy.http_server import DisconnectedError, HttpExchange

RETRY_INTERVAL_S = 5.0
"""Time after which a failed background coroutine is started again."""

MAX_SLICE_S = 0.001
PROBE_INTERVAL_S = 0.1
OVERLOAD_LAG_S = 0.1
"""Mean lag from which the loop is overloaded."""
RECOVERY_LAG_S = 0.05
"""Mean lag below which it is no longer overloaded."""
MAX_PROBE_LAG_S = 0.4
"""Largest lag of a probe that counts, so that one long callback or a suspended process is no overload."""
_WEIGHT_OF_LATEST = 0.2
"""Weight of the latest probe in the mean."""

CoroutineFactory = Callable[[], Coroutine[Any, Any, None]]
"""Function that starts a background coroutine. The coroutine returns when its work has ended for good."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


async def run_with_restarts(factory: CoroutineFactory) -> None:
    """Run a background coroutine until it returns.

    If it raises, log the exception and restart it after 5 seconds, because resource exhaustion (memory, threads) is
    usually temporary.
    """
    while True:
        try:
            return await factory()
        except Exception:
            log.exception("background_task_failed", task=repr(factory), retry_in_s=RETRY_INTERVAL_S)
        await asyncio.sleep(RETRY_INTERVAL_S)


class TenantSlots:
    """Concurrency slots of each tenant, for work whose inputs or results take much memory.

    Further requests of the tenant wait, with their bodies unread.
    """

    def __init__(self, slots_per_tenant: int) -> None:
        self._slots_per_tenant = slots_per_tenant
        self._slots = WeakValueDictionary[str, asyncio.Semaphore]()

    @contextlib.asynccontextmanager
    async def hold(self, exchange: HttpExchange, tenant: str) -> AsyncIterator[None]:
        """Wait for one of the tenant's slots, and hold it.

        Raises:
            DisconnectedError: The client disconnected meanwhile.
        """
        async with self._slots.setdefault(tenant, asyncio.Semaphore(self._slots_per_tenant)):
            if exchange.is_disconnected:
                raise DisconnectedError
            yield


class LoopSlices:
    """Gives the event loop to others after each `MAX_SLICE_S` of work."""

    def __init__(self) -> None:
        self._began_at = time.perf_counter()

    async def pause(self) -> None:
        """Give way if the slice is used up."""
        if time.perf_counter() - self._began_at > MAX_SLICE_S:
            await asyncio.sleep(0)
            self._began_at = time.perf_counter()


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
