"""Limits concurrent calls of the admin API, so that neither one caller nor all of them together delay others.

The console's calls are among them. Reads give way to requests for models. Changes have slots of their own, so that an
operator can drain a replica, revoke a key or set a limit while reads wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from argosy.gateway.event_loop import LoopMonitor
from argosy.gateway.principal import Principal
from argosy.protocol import ApiError

MAX_WAIT_S = 10.0
"""Longest wait of a read for its slot."""
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Maximum numbers of calls: of all callers, of one organisation and of one caller."""

    total: int
    organisation: int
    caller: int


RUNNING_READS = Bounds(6, 4, 3)
RUNNING_CHANGES = Bounds(3, 2, 2)
"""A store has 15 connections, of which the gateway needs some itself."""
WAITING = Bounds(1000, 200, 100)

_ALL = "all"


@dataclass(eq=False, slots=True)
class _WaitingCall:
    groups: tuple[str, str, str]
    admitted: asyncio.Future[None]


@dataclass(slots=True)
class _Lane:
    """Running and waiting calls of one kind."""

    bounds: Bounds
    running: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    queue: list[_WaitingCall] = field(default_factory=list)
    """Waiting calls, by arrival."""


class AdminCallLimiter:
    """Limits concurrent calls. Not thread-safe: use it from one event loop.

    Args:
        loop_monitor: While it reports an overload, one read runs at a time.
    """

    def __init__(self, loop_monitor: LoopMonitor | None = None) -> None:
        self._loop_monitor = loop_monitor or LoopMonitor()
        self._loop_monitor.on_recovered = self._admit_reads
        self._reads, self._changes = _Lane(RUNNING_READS), _Lane(RUNNING_CHANGES)

    @contextlib.asynccontextmanager
    async def slot(
        self,
        principal: Principal,
        *,
        is_change: bool = False,
        max_wait_s: float | None = MAX_WAIT_S,
    ) -> AsyncIterator[None]:
        """Hold a slot within the context, after waiting for it.

        Args:
            principal: The caller.
            is_change: Whether the call changes something. Changes wait for other changes only.
            max_wait_s: Longest wait of a read. None for any.

        Raises:
            ApiError: 429 `overloaded` if too many calls of the caller or its organisation wait. 503 `overloaded` if too
                many wait in all, or this one waited too long.
        """
        lane = self._changes if is_change else self._reads
        caller = principal.key or principal.user
        organisation = f"organisation {principal.organisation}"
        groups = (_ALL, organisation, f"caller {caller}" if caller else f"caller of {organisation}")
        if lane.queue or not self._fits(lane, groups):
            await self._wait(lane, groups, None if is_change else max_wait_s)
        else:
            lane.running.update(groups)
        try:
            yield
        finally:
            _remove(lane.running, groups)
            self._admit_waiting(lane)

    async def _wait(
        self, lane: _Lane, groups: tuple[str, str, str], max_wait_s: float | None
    ) -> None:
        _check_waiting(lane.waiting, groups)
        call = _WaitingCall(groups, asyncio.get_running_loop().create_future())
        lane.waiting.update(groups)
        lane.queue.append(call)
        self._admit_waiting(lane)
        try:
            async with asyncio.timeout(max_wait_s):
                await call.admitted
        except TimeoutError:
            self._withdraw(lane, call)
            raise _busy_error() from None
        except asyncio.CancelledError:
            self._withdraw(lane, call)
            raise

    def _withdraw(self, lane: _Lane, call: _WaitingCall) -> None:
        """Remove a call that no longer waits, or give back the slot that it was given meanwhile."""
        if call in lane.queue:
            lane.queue.remove(call)
            _remove(lane.waiting, call.groups)
        else:
            _remove(lane.running, call.groups)
        self._admit_waiting(lane)

    def _fits(self, lane: _Lane, groups: tuple[str, str, str]) -> bool:
        bounds = lane.bounds
        total = 1 if lane is self._reads and self._loop_monitor.is_overloaded else bounds.total
        limits = (total, bounds.organisation, bounds.caller)
        return all(lane.running[group] < limit for group, limit in zip(groups, limits, strict=True))

    def _admit_waiting(self, lane: _Lane) -> None:
        """Give free slots to the waiting calls, by arrival. A call whose caller has used up its slots is overtaken."""
        for call in [*lane.queue] if lane.running[_ALL] < lane.bounds.total else ():
            if not call.admitted.done() and self._fits(lane, call.groups):
                lane.queue.remove(call)
                _remove(lane.waiting, call.groups)
                lane.running.update(call.groups)
                call.admitted.set_result(None)

    def _admit_reads(self) -> None:
        self._admit_waiting(self._reads)


def _check_waiting(waiting: Counter[str], groups: tuple[str, str, str]) -> None:
    everyone, organisation, caller = groups
    if waiting[caller] >= WAITING.caller or waiting[organisation] >= WAITING.organisation:
        message = "Too many of your calls wait for the admin API. Send fewer at once."
        raise ApiError(429, "overloaded", message, retry_after_s=RETRY_AFTER_S)
    if waiting[everyone] >= WAITING.total:
        raise _busy_error()


def _remove(counts: Counter[str], groups: tuple[str, str, str]) -> None:
    counts.subtract(groups)
    for group in groups:
        if not counts[group]:
            del counts[group]


def _busy_error() -> ApiError:
    message = (
        "The gateway is busy with other requests, which come before reads of the admin API. Try again later, or send"
        " fewer at once."
    )
    return ApiError(503, "overloaded", message, retry_after_s=2 * RETRY_AFTER_S)
