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
from argosy.gateway.pool import Pool, ReplicaEndpoint, RoutingDecision
from argosy.gateway.principal import TIERS
from argosy.gateway.request_context import RequestContext
from argosy.policy import (
    DispatchQueue,
    QueuedRequest,
    is_tenant_within_share,
    is_tier_admitted,
    lowest_admissible_tier,
    no_reservation_active,
    saturation,
    weighted_tokens,
)
from argosy.protocol import ApiError

RETRY_AFTER_S = 1.0
NO_REPLICA_RETRY_AFTER_S = 10.0
"""Where nothing is there, and nobody knows that anything will be."""


_PlacementKey = tuple[int, frozenset[str]]
"""A tier, and names of replicas that are not to be tried."""


@dataclass(slots=True, eq=False)
class _QueuedRequest:
    context: RequestContext
    assigned_replica: asyncio.Future[ReplicaEndpoint]
    sequence: int = 0
    """In the order in which replicas failed them."""


@dataclass(slots=True)
class _PrepaidTokens:
    """What a request that was placed was charged for, in weighted tokens, and has not got."""

    unspent: float
    prompt: float
    """Of that, for its prompt, until it is known how much of it had to be computed."""


class Dispatcher:
    """One pool's. Belongs to one event loop."""

    def __init__(self, pool: Pool, queue_config: QueueConfig, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._queue_config = queue_config
        self._clock = clock
        self._queue: DispatchQueue[_QueuedRequest] = DispatchQueue()
        self._running_by_tier = [0] * len(TIERS)
        self._last_request_at = [-math.inf] * len(TIERS)
        """When each tier asked last."""
        self._prepaid: dict[int, _PrepaidTokens] = {}
        """Of each request that was placed, by its identity as an object."""
        self._displaced: dict[_PlacementKey, OrderedDict[_QueuedRequest, None]] = {}
        """Requests that were placed, whose replica has failed, in the order in which that was."""
        self._sequence = itertools.count()
        pool.set_capacity_listener(self.dispatch_waiting)

    def __len__(self) -> int:
        return len(self._queue)

    async def acquire_replica(self, context: RequestContext) -> ReplicaEndpoint:
        """The replica for a new request, until `ended`. Raises ApiError 429 or 503 when it must not wait on."""
        now, principal, ask = self._clock(), context.principal, context.fields
        self._last_request_at[context.tier] = now
        if not self._queue and (
            no_reservation_active(context.tier, self._last_request_at, now)
            or context.tier <= self._lowest_admissible_tier(*self._pool.free_slots(now), now)
        ):
            picked = self._select_replica(context, frozenset(), now)
            if picked is not None:
                return self._commit(context, picked, 0.0, now)
        self._check_admission(context, now)
        return await self._wait_for_replica(
            QueuedRequest(
                item=_QueuedRequest(context, asyncio.get_running_loop().create_future()),
                tier=context.tier,
                tenant=principal.tenant,
                weight=principal.weight,
                cost_tokens=weighted_tokens(
                    ask.estimated_prompt_tokens, self._pool.expected_output_tokens(ask)
                ),
                arrived_at=now,
                deadline=context.deadline,
                size_bytes=ask.body_bytes,
            )
        )

    async def reacquire_replica(self, context: RequestContext, timeout_s: float) -> bool:
        """Whether a request that was placed got another replica within that time, none of those it has tried.

        It goes before all that wait.
        """
        future = asyncio.get_running_loop().create_future()
        ticket = _QueuedRequest(context, future, next(self._sequence))
        kind = context.tier, frozenset(context.failed_replicas | context.incompatible_replicas)
        self._displaced.setdefault(kind, OrderedDict())[ticket] = None
        self._dispatch_displaced()
        placed = ticket.assigned_replica
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(placed)
        except TimeoutError:
            return placed.done()
        except BaseException:
            if placed.done():
                self._release_unused(context)
            raise
        finally:
            self._remove_displaced(kind, ticket)
        return True

    def select_hedge(
        self, context: RequestContext, excluded_replicas: Collection[str]
    ) -> RoutingDecision | None:
        """One more replica for a request that was placed and is stuck. None: it has to wait for its own."""
        now, pool, tier = self._clock(), self._pool, context.tier
        free, seats = pool.free_slots(now)
        if (
            pool.hedging is None
            or tier > self._lowest_admissible_tier(free, seats, now)
            or all(
                replica.name in excluded_replicas
                for replica in pool.replicas_with_free_slots(tier, now)
            )
        ):
            return None
        saturated = saturation(0.0, pool.reachable_loads())
        waiting = len(self._queue)
        if pool.hedging.try_acquire(
            now, queued=waiting, free_slots=free[tier], total_slots=seats, saturation=saturated
        ):
            return self._select_replica(context, excluded_replicas, now)
        return None

    def charge_tenant(self, context: RequestContext, weighted_tokens: float) -> None:
        """Count what a request that was placed got since the last time, its prompt the first time (see `service`).

        Negative: it had got less than was thought.
        """
        account = self._prepaid[id(context)]
        paid = min(account.unspent, weighted_tokens)
        account.unspent -= paid
        account.prompt = 0.0
        self._add_charge(context, weighted_tokens - paid)

    def release(self, context: RequestContext) -> None:
        """It is over; nothing happens when it never was placed."""
        account = self._prepaid.pop(id(context), None)
        if account is not None:
            self._running_by_tier[context.tier] -= 1
            self._add_charge(context, account.prompt - account.unspent)

    def dispatch_waiting(self) -> None:
        """Hand out whatever room there is. To be called each second too: time alone gives room back."""
        self._dispatch_displaced()
        while self._queue:
            now = self._clock()
            free, seats = self._pool.free_slots(now)
            lowest, reach = self._lowest_admissible_tier(free, seats, now), sum(map(bool, free)) - 1
            waiting = self._queue.pop(now, lowest, reach)
            if waiting is None:
                if not self._pool.may_recover(now):
                    self._reject_waiting(now)
                return
            context, replica = waiting.item.context, waiting.item.assigned_replica
            picked = self._select_replica(context, frozenset(), now)
            assert picked is not None  # noqa: S101 - a seat is free for its tier
            paid = waiting.cost_tokens if waiting.is_charged else 0.0
            replica.set_result(self._commit(context, picked, paid, now))

    def _reject_waiting(self, now: float) -> None:
        """Tell all that wait that it makes no sense any more."""
        while (waiting := self._queue.pop(now)) is not None:
            if not waiting.item.assigned_replica.done():
                waiting.item.assigned_replica.set_exception(no_replica_error(self._pool, now))

    def _dispatch_displaced(self) -> None:
        """Place whoever can be. Thousands may wait: where one finds no room, nobody of its kind does."""
        now = self._clock()
        heads = [(next(iter(tickets)).sequence, kind) for kind, tickets in self._displaced.items()]
        heapq.heapify(heads)
        while heads and any(self._pool.free_slots(now)[0]):
            _, kind = heapq.heappop(heads)
            ticket = next(iter(self._displaced[kind]))
            picked = self._select_replica(ticket.context, kind[1], now)
            if picked is not None:
                self._remove_displaced(kind, ticket)
                ticket.assigned_replica.set_result(ticket.context.record_dispatch(picked, now))
                if kind in self._displaced:
                    heapq.heappush(heads, (next(iter(self._displaced[kind])).sequence, kind))

    def _remove_displaced(self, kind: _PlacementKey, ticket: _QueuedRequest) -> None:
        tickets = self._displaced.get(kind, OrderedDict())
        tickets.pop(ticket, None)
        if not tickets:
            self._displaced.pop(kind, None)

    def _lowest_admissible_tier(self, free: Sequence[int], seats: int, now: float) -> int:
        """The lowest tier that there is room for; -1: for none."""
        return lowest_admissible_tier(
            free, seats, self._running_by_tier, self._last_request_at, now
        )

    def _select_replica(
        self, context: RequestContext, tried: Collection[str], now: float
    ) -> RoutingDecision | None:
        return self._pool.select_replica(
            context.fields, context.principal.cache_domain, context.tier, tried, now
        )

    def _commit(
        self, context: RequestContext, picked: RoutingDecision, paid: float, now: float
    ) -> ReplicaEndpoint:
        self._pool.on_dispatched(now)
        prompt = min(paid, weighted_tokens(context.fields.estimated_prompt_tokens, 0))
        self._prepaid[id(context)] = _PrepaidTokens(paid, prompt)
        self._running_by_tier[context.tier] += 1
        return context.record_dispatch(picked, now)

    def _add_charge(self, context: RequestContext, cost: float) -> None:
        if cost:
            principal = context.principal
            self._queue.charge_tenant(context.tier, principal.tenant, principal.weight, cost)

    def _check_admission(self, context: RequestContext, now: float) -> None:
        """Raises ApiError 503 when nothing serves it, 429 when its size, tier or tenant keeps it out of the queue."""
        if not self._pool.may_recover(now):
            raise no_replica_error(self._pool, now)
        limits, queue, tier = self._queue_config, self._queue, context.tier
        full_s = self._pool.retry_after_s(now)
        if full_s > limits.timeout_s:
            raise replicas_full_error(self._pool, full_s)
        held = queue.tenant_backlog(tier, context.principal.tenant)
        if queue.size_bytes + context.fields.body_bytes > limits.max_bytes:
            raise self._overloaded_error("the queue is full")
        if not (
            is_tenant_within_share(tier, held.count, len(queue), limits.max_requests)
            and is_tenant_within_share(tier, held.size_bytes, queue.size_bytes, limits.max_bytes)
        ):
            raise self._overloaded_error("what is left of the queue is for others")
        waited = max(0.0, now - held.next_arrived_at)
        if not is_tier_admitted(
            tier, saturation(waited / limits.timeout_s, self._pool.reachable_loads())
        ):
            raise self._overloaded_error("what can be served soon is for higher tiers")

    async def _wait_for_replica(self, waiting: QueuedRequest[_QueuedRequest]) -> ReplicaEndpoint:
        queue, placed, trace = (
            self._queue,
            waiting.item.assigned_replica,
            waiting.item.context.trace,
        )
        queue.push(waiting)
        trace.queued_at, trace.queued_ahead = waiting.arrived_at, queue.count_ahead(waiting)
        self.dispatch_waiting()
        try:
            async with asyncio.timeout(self._queue_config.timeout_s):
                return await asyncio.shield(placed)
        except BaseException as error:
            queue.remove(waiting)
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                self._release_unused(waiting.item.context)
            if isinstance(error, TimeoutError):
                if not self._pool.is_available():
                    raise no_replica_error(self._pool, self._clock()) from error
                raise self._overloaded_error(
                    f"no room within {self._queue_config.timeout_s:g} s"
                ) from error
            raise

    def _release_unused(self, context: RequestContext) -> None:
        """Its replica has nothing of it, and never will."""
        picked, tried, now = context.decision, context.attempt_trace, self._clock()
        assert picked is not None  # noqa: S101 - it was placed
        assert tried is not None  # noqa: S101 - it was placed
        tried.ended_at, tried.outcome = now, "ended"
        picked.replica.on_prefill_done(picked.uncached_tokens, tried.chosen_at)
        picked.replica.on_request_ended(None, now)

    def _overloaded_error(self, why: str) -> ApiError:
        message = f"Too many requests wait for {self._pool.model!r} ({why}). Try again shortly."
        return ApiError(429, "overloaded", message, retry_after_s=RETRY_AFTER_S)


def replicas_full_error(pool: Pool, retry_after_s: float) -> ApiError:
    """All that serve the pool's model are full, for so long as they say."""
    message = f"The replicas for {pool.model!r} are full. Try again "
    message += f"in {math.ceil(retry_after_s)} s." if retry_after_s > RETRY_AFTER_S else "shortly."
    return ApiError(429, "overloaded", message, retry_after_s=max(RETRY_AFTER_S, retry_after_s))


def no_replica_error(pool: Pool, now: float) -> ApiError:
    """There is nothing to serve the pool's model with."""
    message = f"Nothing serves {pool.model!r} at the moment. Try again shortly."
    soon = pool.may_recover(now)
    return ApiError(
        503,
        "no_replica",
        message,
        retry_after_s=RETRY_AFTER_S if soon else NO_REPLICA_RETRY_AFTER_S,
    )
