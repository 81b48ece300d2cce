"""The queue in front of a pool: a request goes to a replica when one has room for it, and not before.

Late binding keeps the replicas' own queues short, so order is decided here, where all tenants are seen, and a request
never waits behind a replica that has become slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from argosy.gateway.caller import Caller
from argosy.gateway.journey import Journey
from argosy.gateway.replicas import Pool, Replica
from argosy.policy import DispatchQueue, Waiting, admits, saturation
from argosy.protocol import ApiError


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait in front of a pool."""

    requests: int = 5000
    bytes: int = 1 << 30
    wait_s: float = 60.0


@dataclass(slots=True)
class _Ticket:
    journey: Journey
    replica: asyncio.Future[Replica]


class Dispatcher:
    """One pool's. Belongs to one event loop."""

    def __init__(self, pool: Pool, limits: QueueLimits, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._limits = limits
        self._clock = clock
        self._queue: DispatchQueue[_Ticket] = DispatchQueue()
        pool.on_change = self.pump

    def __len__(self) -> int:
        return len(self._queue)

    async def place(self, journey: Journey) -> Replica:
        """The replica for a new request. Raises ApiError 429 or 503 when it must not wait on."""
        now = self._clock()
        if not self._pool.alive():
            raise unavailable(self._pool)
        if not self._queue:
            picked = self._pool.pick(journey.ask, journey.caller.domain, frozenset(), now)
            if picked is not None:
                return journey.goes_to(picked, now)
        self._admit(journey, now)
        caller, prompt = journey.caller, journey.ask.prompt
        return await self._wait(
            Waiting(
                item=_Ticket(journey, asyncio.get_running_loop().create_future()),
                tier=caller.tier,
                tenant=caller.project,
                weight=caller.weight,
                cost=float(journey.ask.prompt_tokens),
                arrival=now,
                size=len(prompt),
            )
        )

    def charge(self, caller: Caller, tokens: int) -> None:
        """Count output tokens that came for a request of this caller."""
        self._queue.charge(caller.tier, caller.project, float(tokens))

    def pump(self) -> None:
        """Hand out whatever room there is."""
        while self._queue:
            now = self._clock()
            if not self._pool.room(now):
                return
            waiting = self._queue.pop(now)
            if waiting is None or waiting.item.replica.done():
                continue
            journey, replica = waiting.item.journey, waiting.item.replica
            picked = self._pool.pick(journey.ask, journey.caller.domain, frozenset(), now)
            if picked is None:
                replica.set_exception(unavailable(self._pool))
                continue
            replica.set_result(journey.goes_to(picked, now))

    def _admit(self, journey: Journey, now: float) -> None:
        """Raises ApiError 429 when a request of its size and tier is not to join the queue."""
        limits, queue = self._limits, self._queue
        size = len(journey.ask.prompt)
        if len(queue) >= limits.requests or queue.size + size > limits.bytes:
            raise self._contended("the queue is full")
        saturated = saturation(
            max(len(queue) / limits.requests, queue.size / limits.bytes),
            queue.age(now) / limits.wait_s,
            self._pool.loads(),
        )
        if not admits(journey.caller.tier, saturated):
            raise self._contended("what is left of the queue is for higher tiers")

    async def _wait(self, waiting: Waiting[_Ticket]) -> Replica:
        queue, placed, trace = self._queue, waiting.item.replica, waiting.item.journey.trace
        queue.push(waiting)
        trace.queued, trace.ahead = waiting.arrival, queue.ahead(waiting)
        try:
            async with asyncio.timeout(self._limits.wait_s):
                return await asyncio.shield(placed)
        except BaseException as error:
            queue.remove(waiting)
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                placed.result().ended(None, self._clock())  # it came too late
            if isinstance(error, TimeoutError):
                raise self._contended(f"no room within {self._limits.wait_s:g} s") from error
            raise

    def _contended(self, why: str) -> ApiError:
        message = f"Too many requests wait for {self._pool.model!r} ({why}). Try again shortly."
        return ApiError(429, "overloaded", message, retry_after_s=RETRY_AFTER_S)


RETRY_AFTER_S = 1.0


def unavailable(pool: Pool) -> ApiError:
    """There is nothing to serve the pool's model with."""
    message = f"Nothing serves {pool.model!r} at the moment. Try again shortly."
    return ApiError(503, "no_replica", message, retry_after_s=RETRY_AFTER_S)
