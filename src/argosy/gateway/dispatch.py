"""The queue in front of a pool: a request goes to a replica when one has room for it, and not before.

Late binding keeps the replicas' own queues short, so order is decided here, where all tenants are seen, and a request
never waits behind a replica that has become slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from argosy.gateway.ask import Ask
from argosy.gateway.caller import Caller
from argosy.gateway.replicas import Pool, Replica
from argosy.policy import DispatchQueue, Waiting
from argosy.protocol import ApiError


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait in front of a pool."""

    requests: int = 5000
    bytes: int = 1 << 30
    wait_s: float = 60.0


@dataclass(slots=True)
class _Ticket:
    ask: Ask
    caller: Caller
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

    async def place(self, ask: Ask, caller: Caller) -> Replica:
        """The replica for a new request, `sent` counted. Raises ApiError 429 or 503 when it must not wait on."""
        now = self._clock()
        if not self._pool.alive():
            raise unavailable(self._pool)
        if not self._queue:
            replica = self._pool.pick(ask, caller.domain, frozenset(), now)
            if replica is not None:
                replica.sent(ask.prompt_tokens)
                return replica
        size = len(ask.prompt)
        limits = self._limits
        if len(self._queue) >= limits.requests or self._queue.size + size > limits.bytes:
            raise self._contended("the queue is full")
        return await self._wait(
            Waiting(
                item=_Ticket(ask, caller, asyncio.get_running_loop().create_future()),
                tier=caller.tier,
                tenant=caller.project,
                weight=caller.weight,
                cost=float(ask.prompt_tokens),
                arrival=now,
                size=size,
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
            ticket = waiting.item
            replica = self._pool.pick(ticket.ask, ticket.caller.domain, frozenset(), now)
            if replica is None:
                ticket.replica.set_exception(unavailable(self._pool))
                continue
            replica.sent(ticket.ask.prompt_tokens)
            ticket.replica.set_result(replica)

    async def _wait(self, waiting: Waiting[_Ticket]) -> Replica:
        self._queue.push(waiting)
        placed = waiting.item.replica
        try:
            async with asyncio.timeout(self._limits.wait_s):
                return await asyncio.shield(placed)
        except BaseException as error:
            self._queue.remove(waiting)
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
