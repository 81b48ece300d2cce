"""The queue in front of a pool: a request goes to a replica when one has room for it, and not before.

Late binding keeps the replicas' own queues short, so order is decided here, where all tenants are seen, and a request
never waits behind a replica that has become slow.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from argosy.gateway.config import QueueConfig
from argosy.gateway.pool import Picked, Pool, Replica
from argosy.gateway.principal import TIERS
from argosy.gateway.request_context import Journey
from argosy.policy import (
    DispatchQueue,
    Waiting,
    admits,
    fits,
    lowest_tier,
    nothing_kept,
    saturation,
    service,
)
from argosy.protocol import ApiError

RETRY_AFTER_S = 1.0
GONE_RETRY_AFTER_S = 10.0
"""Where nothing is there, and nobody knows that anything will be."""


_Kind = tuple[int, frozenset[str]]
"""A tier, and names of replicas that are not to be tried."""


@dataclass(slots=True, eq=False)
class _Ticket:
    journey: Journey
    replica: asyncio.Future[Replica]
    number: int = 0
    """In the order in which replicas failed them."""


@dataclass(slots=True)
class _Account:
    """What a request that was placed was charged for, in weighted tokens, and has not got."""

    ahead: float
    prompt: float
    """Of that, for its prompt, until it is known how much of it had to be computed."""


class Dispatcher:
    """One pool's. Belongs to one event loop."""

    def __init__(self, pool: Pool, limits: QueueConfig, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._limits = limits
        self._clock = clock
        self._queue: DispatchQueue[_Ticket] = DispatchQueue()
        self._running = [0] * len(TIERS)
        self._asked = [-math.inf] * len(TIERS)
        """When each tier asked last."""
        self._accounts: dict[int, _Account] = {}
        """Of each request that was placed, by its identity as an object."""
        self._moving: dict[_Kind, OrderedDict[_Ticket, None]] = {}
        """Requests that were placed, whose replica has failed, in the order in which that was."""
        self._numbers = itertools.count()
        pool.watch(self.pump)

    def __len__(self) -> int:
        return len(self._queue)

    async def place(self, journey: Journey) -> Replica:
        """The replica for a new request, until `ended`. Raises ApiError 429 or 503 when it must not wait on."""
        now, caller, ask = self._clock(), journey.caller, journey.ask
        self._asked[journey.tier] = now
        if not self._queue and (
            nothing_kept(journey.tier, self._asked, now)
            or journey.tier <= self._lowest(*self._pool.seats(now), now)
        ):
            picked = self._pick(journey, frozenset(), now)
            if picked is not None:
                return self._goes(journey, picked, 0.0, now)
        self._admit(journey, now)
        return await self._wait(
            Waiting(
                item=_Ticket(journey, asyncio.get_running_loop().create_future()),
                tier=journey.tier,
                tenant=caller.tenant,
                weight=caller.weight,
                cost=service(ask.prompt_tokens, self._pool.expected(ask)),
                arrival=now,
                deadline=journey.deadline,
                size=ask.size,
            )
        )

    async def move(self, journey: Journey, within_s: float) -> bool:
        """Whether a request that was placed got another replica within that time, none of those it has tried.

        It goes before all that wait.
        """
        future = asyncio.get_running_loop().create_future()
        ticket = _Ticket(journey, future, next(self._numbers))
        kind = journey.tier, frozenset(journey.tried | journey.unfit)
        self._moving.setdefault(kind, OrderedDict())[ticket] = None
        self._place_moving()
        placed = ticket.replica
        try:
            async with asyncio.timeout(within_s):
                await asyncio.shield(placed)
        except TimeoutError:
            return placed.done()
        except BaseException:
            if placed.done():
                self._came_too_late(journey)
            raise
        finally:
            self._moves_no_more(kind, ticket)
        return True

    def hedge(self, journey: Journey, others_than: Collection[str]) -> Picked | None:
        """One more replica for a request that was placed and is stuck. None: it has to wait for its own."""
        now, pool, tier = self._clock(), self._pool, journey.tier
        free, seats = pool.seats(now)
        if (
            pool.hedging is None
            or tier > self._lowest(free, seats, now)
            or all(replica.name in others_than for replica in pool.room(tier, now))
        ):
            return None
        saturated = saturation(0.0, pool.loads())
        waiting = len(self._queue)
        if pool.hedging.take(
            now, waiting=waiting, free=free[tier], seats=seats, saturated=saturated
        ):
            return self._pick(journey, others_than, now)
        return None

    def charge(self, journey: Journey, cost: float) -> None:
        """Count what a request that was placed got since the last time, its prompt the first time (see `service`).

        Negative: it had got less than was thought.
        """
        account = self._accounts[id(journey)]
        paid = min(account.ahead, cost)
        account.ahead -= paid
        account.prompt = 0.0
        self._charge(journey, cost - paid)

    def ended(self, journey: Journey) -> None:
        """It is over; nothing happens when it never was placed."""
        account = self._accounts.pop(id(journey), None)
        if account is not None:
            self._running[journey.tier] -= 1
            self._charge(journey, account.prompt - account.ahead)

    def pump(self) -> None:
        """Hand out whatever room there is. To be called each second too: time alone gives room back."""
        self._place_moving()
        while self._queue:
            now = self._clock()
            free, seats = self._pool.seats(now)
            lowest, reach = self._lowest(free, seats, now), sum(map(bool, free)) - 1
            waiting = self._queue.pop(now, lowest, reach)
            if waiting is None:
                if not self._pool.worth_waiting(now):
                    self._send_away(now)
                return
            journey, replica = waiting.item.journey, waiting.item.replica
            picked = self._pick(journey, frozenset(), now)
            assert picked is not None  # noqa: S101 - a seat is free for its tier
            paid = waiting.cost if waiting.charged else 0.0
            replica.set_result(self._goes(journey, picked, paid, now))

    def _send_away(self, now: float) -> None:
        """Tell all that wait that it makes no sense any more."""
        while (waiting := self._queue.pop(now)) is not None:
            if not waiting.item.replica.done():
                waiting.item.replica.set_exception(unavailable(self._pool, now))

    def _place_moving(self) -> None:
        """Place whoever can be. Thousands may wait: where one finds no room, nobody of its kind does."""
        now = self._clock()
        heads = [(next(iter(tickets)).number, kind) for kind, tickets in self._moving.items()]
        heapq.heapify(heads)
        while heads and any(self._pool.seats(now)[0]):
            _, kind = heapq.heappop(heads)
            ticket = next(iter(self._moving[kind]))
            picked = self._pick(ticket.journey, kind[1], now)
            if picked is not None:
                self._moves_no_more(kind, ticket)
                ticket.replica.set_result(ticket.journey.goes_to(picked, now))
                if kind in self._moving:
                    heapq.heappush(heads, (next(iter(self._moving[kind])).number, kind))

    def _moves_no_more(self, kind: _Kind, ticket: _Ticket) -> None:
        tickets = self._moving.get(kind, OrderedDict())
        tickets.pop(ticket, None)
        if not tickets:
            self._moving.pop(kind, None)

    def _lowest(self, free: Sequence[int], seats: int, now: float) -> int:
        """The lowest tier that there is room for; -1: for none."""
        return lowest_tier(free, seats, self._running, self._asked, now)

    def _pick(self, journey: Journey, tried: Collection[str], now: float) -> Picked | None:
        return self._pool.pick(journey.ask, journey.caller.domain, journey.tier, tried, now)

    def _goes(self, journey: Journey, picked: Picked, paid: float, now: float) -> Replica:
        self._pool.went(now)
        prompt = min(paid, service(journey.ask.prompt_tokens, 0))
        self._accounts[id(journey)] = _Account(paid, prompt)
        self._running[journey.tier] += 1
        return journey.goes_to(picked, now)

    def _charge(self, journey: Journey, cost: float) -> None:
        if cost:
            caller = journey.caller
            self._queue.charge(journey.tier, caller.tenant, caller.weight, cost)

    def _admit(self, journey: Journey, now: float) -> None:
        """Raises ApiError 503 when nothing serves it, 429 when its size, tier or tenant keeps it out of the queue."""
        if not self._pool.worth_waiting(now):
            raise unavailable(self._pool, now)
        limits, queue, tier = self._limits, self._queue, journey.tier
        full_s = self._pool.full_s(now)
        if full_s > limits.wait_s:
            raise full(self._pool, full_s)
        held = queue.held(tier, journey.caller.tenant)
        if queue.size + journey.ask.size > limits.bytes:
            raise self._contended("the queue is full")
        if not (
            fits(tier, held.count, len(queue), limits.requests)
            and fits(tier, held.size, queue.size, limits.bytes)
        ):
            raise self._contended("what is left of the queue is for others")
        waited = max(0.0, now - held.since)
        if not admits(tier, saturation(waited / limits.wait_s, self._pool.loads())):
            raise self._contended("what can be served soon is for higher tiers")

    async def _wait(self, waiting: Waiting[_Ticket]) -> Replica:
        queue, placed, trace = self._queue, waiting.item.replica, waiting.item.journey.trace
        queue.push(waiting)
        trace.queued, trace.ahead = waiting.arrival, queue.ahead(waiting)
        self.pump()
        try:
            async with asyncio.timeout(self._limits.wait_s):
                return await asyncio.shield(placed)
        except BaseException as error:
            queue.remove(waiting)
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                self._came_too_late(waiting.item.journey)
            if isinstance(error, TimeoutError):
                if not self._pool.serves():
                    raise unavailable(self._pool, self._clock()) from error
                raise self._contended(f"no room within {self._limits.wait_s:g} s") from error
            raise

    def _came_too_late(self, journey: Journey) -> None:
        """Its replica has nothing of it, and never will."""
        picked, tried, now = journey.picked, journey.current, self._clock()
        assert picked is not None  # noqa: S101 - it was placed
        assert tried is not None  # noqa: S101 - it was placed
        tried.ended, tried.outcome = now, "ended"
        picked.replica.computed(picked.uncached, tried.at)
        picked.replica.ended(None, now)

    def _contended(self, why: str) -> ApiError:
        message = f"Too many requests wait for {self._pool.model!r} ({why}). Try again shortly."
        return ApiError(429, "overloaded", message, retry_after_s=RETRY_AFTER_S)


def full(pool: Pool, wait_s: float) -> ApiError:
    """All that serve the pool's model are full, for so long as they say."""
    message = f"The replicas for {pool.model!r} are full. Try again "
    message += f"in {math.ceil(wait_s)} s." if wait_s > RETRY_AFTER_S else "shortly."
    return ApiError(429, "overloaded", message, retry_after_s=max(RETRY_AFTER_S, wait_s))


def unavailable(pool: Pool, now: float) -> ApiError:
    """There is nothing to serve the pool's model with."""
    message = f"Nothing serves {pool.model!r} at the moment. Try again shortly."
    soon = pool.worth_waiting(now)
    return ApiError(
        503,
        "no_replica",
        message,
        retry_after_s=RETRY_AFTER_S if soon else GONE_RETRY_AFTER_S,
    )
