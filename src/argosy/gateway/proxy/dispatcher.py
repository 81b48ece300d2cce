"""Dispatcher of a pool: queues requests and assigns each to a replica once one has a free concurrency slot.

This late binding keeps the queues in the replicas short. Scheduling is therefore decided here, where the requests of
all tenants are visible, and no request is stuck behind a replica that has become slow.
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
from argosy.gateway.proxy.constraint_check import check_queued_parameters
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
"""Retry-After when no replica is available and none is expected to recover."""


_PlacementKey = tuple[int, frozenset[str]]
"""Tier and names of the replicas to exclude. Displaced requests with equal keys can use the same replicas."""


@dataclass(slots=True, eq=False)
class _QueuedRequest:
    context: RequestContext
    assigned_replica: asyncio.Future[ReplicaEndpoint]
    sequence: int = 0
    """Order in which the replicas of displaced requests failed."""


@dataclass(slots=True)
class _PrepaidTokens:
    """Weighted tokens that a dispatched request was charged in the queue and has not yet consumed."""

    unspent: float
    prompt: float
    """Part of `unspent` for the prompt, until the number of uncached prompt tokens is known."""


class Dispatcher:
    """Queue and dispatcher of one pool. Not thread-safe: use it from one event loop."""

    def __init__(self, pool: Pool, queue_config: QueueConfig, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._queue_config = queue_config
        self._clock = clock
        self._queue: DispatchQueue[_QueuedRequest] = DispatchQueue(queue_config.timeout_s)
        self._running_by_tier = [0] * len(TIERS)
        self._last_request_at = [-math.inf] * len(TIERS)
        """Monotonic arrival time of each tier's latest request."""
        self._prepaid: dict[int, _PrepaidTokens] = {}
        """Prepaid tokens of each dispatched request, by the id of its context object."""
        self._displaced: dict[_PlacementKey, OrderedDict[_QueuedRequest, None]] = {}
        """Dispatched requests whose replica failed, in the order of the failures."""
        self._sequence = itertools.count()
        pool.set_capacity_listener(self.dispatch_waiting)

    def __len__(self) -> int:
        return len(self._queue)

    async def acquire_replica(self, context: RequestContext) -> ReplicaEndpoint:
        """Assign a replica to a new request, waiting in the queue if none has a free slot. Release it with `release`.

        Raises:
            ApiError: 429 or 503 if the request may not wait, or waited too long. 400 if its replica would refuse it.
        """
        now, principal, fields = self._clock(), context.principal, context.fields
        self._last_request_at[context.tier] = now
        if not self._queue and (
            no_reservation_active(context.tier, self._last_request_at, now)
            or context.tier <= self._lowest_admissible_tier(*self._pool.free_slots(now), now)
        ):
            decision = self._select_replica(context, frozenset(), now)
            if decision is not None:
                return self._commit(context, decision, 0.0, now)
        check_queued_parameters(self._pool, fields, context.api.path)
        self._check_admission(context, now)
        return await self._wait_for_replica(
            QueuedRequest(
                item=_QueuedRequest(context, asyncio.get_running_loop().create_future()),
                tier=context.tier,
                tenant=principal.tenant,
                weight=principal.weight,
                cost_tokens=weighted_tokens(
                    fields.estimated_prompt_tokens, self._pool.expected_output_tokens(fields)
                ),
                arrived_at=now,
                deadline=context.deadline,
                size_bytes=fields.body_bytes,
            )
        )

    async def reacquire_replica(self, context: RequestContext, timeout_s: float) -> bool:
        """Assign another replica to a request whose replica failed, before all queued requests.

        Replicas that failed the request or cannot resume it are excluded.

        Args:
            context: The request.
            timeout_s: How long to wait for a free slot.

        Returns:
            Whether a replica was assigned in time.
        """
        future = asyncio.get_running_loop().create_future()
        displaced = _QueuedRequest(context, future, next(self._sequence))
        key = context.tier, frozenset(context.failed_replicas | context.incompatible_replicas)
        self._displaced.setdefault(key, OrderedDict())[displaced] = None
        self._dispatch_displaced()
        assigned_replica = displaced.assigned_replica
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(assigned_replica)
        except TimeoutError:
            return assigned_replica.done()
        except BaseException:
            if assigned_replica.done():
                self._release_unused(context)
            raise
        finally:
            self._remove_displaced(key, displaced)
        return True

    def select_hedge(
        self, context: RequestContext, excluded_replicas: Collection[str]
    ) -> RoutingDecision | None:
        """Select a second replica for a request whose replica is silent.

        Returns:
            The decision, or None if hedging is off or no capacity can be spared.
        """
        now, pool, tier = self._clock(), self._pool, context.tier
        free_slots, total_slots = pool.free_slots(now)
        if (
            pool.hedging is None
            or tier > self._lowest_admissible_tier(free_slots, total_slots, now)
            or all(
                replica.name in excluded_replicas
                for replica in pool.replicas_with_free_slots(tier, now)
            )
        ):
            return None
        pool_saturation = saturation(0.0, pool.reachable_loads())
        queued_count = len(self._queue)
        if pool.hedging.try_acquire(
            now,
            queued=queued_count,
            free_slots=free_slots[tier],
            total_slots=total_slots,
            saturation=pool_saturation,
        ):
            return self._select_replica(context, excluded_replicas, now)
        return None

    def charge_tenant(self, context: RequestContext, weighted_tokens: float) -> None:
        """Charge the tenant for tokens of a dispatched request, its uncached prompt with the first call.

        Args:
            context: The request.
            weighted_tokens: Tokens since the last call, weighted (see `policy.weighted_tokens`). Negative to correct an
                estimate.
        """
        prepaid = self._prepaid[id(context)]
        spent = min(prepaid.unspent, weighted_tokens)
        prepaid.unspent -= spent
        prepaid.prompt = 0.0
        self._add_charge(context, weighted_tokens - spent)

    def release(self, context: RequestContext) -> None:
        """Release the request's slot and refund its unspent tokens. Does nothing if it was never dispatched."""
        prepaid = self._prepaid.pop(id(context), None)
        if prepaid is not None:
            self._running_by_tier[context.tier] -= 1
            self._add_charge(context, prepaid.prompt - prepaid.unspent)

    def dispatch_waiting(self) -> None:
        """Assign free slots to displaced and queued requests.

        Called when capacity changes, and every second, because some capacity returns with time alone (backoff, probes).
        """
        self._dispatch_displaced()
        while self._queue:
            now = self._clock()
            free_slots, total_slots = self._pool.free_slots(now)
            lowest_tier, max_tier = (
                self._lowest_admissible_tier(free_slots, total_slots, now),
                sum(map(bool, free_slots)) - 1,
            )
            queued = self._queue.pop(now, lowest_tier, max_tier)
            if queued is None:
                if not self._pool.may_recover(now):
                    self._reject_waiting(now)
                return
            context, assigned_replica = queued.item.context, queued.item.assigned_replica
            decision = self._select_replica(context, frozenset(), now)
            assert decision is not None  # noqa: S101 - a slot is free for its tier
            charged_tokens = queued.cost_tokens if queued.is_charged else 0.0
            assigned_replica.set_result(self._commit(context, decision, charged_tokens, now))

    def _reject_waiting(self, now: float) -> None:
        """Reject all queued requests with 503, because no replica is expected to recover."""
        while (queued := self._queue.pop(now)) is not None:
            if not queued.item.assigned_replica.done():
                queued.item.assigned_replica.set_exception(no_replica_error(self._pool, now))

    def _dispatch_displaced(self) -> None:
        """Assign free slots to displaced requests, oldest failure first.

        There may be thousands. If one request finds no replica, the others with its key are skipped.
        """
        now = self._clock()
        oldest_by_key = [
            (next(iter(requests)).sequence, key) for key, requests in self._displaced.items()
        ]
        heapq.heapify(oldest_by_key)
        while oldest_by_key and any(self._pool.free_slots(now)[0]):
            _, key = heapq.heappop(oldest_by_key)
            displaced = next(iter(self._displaced[key]))
            decision = self._select_replica(displaced.context, key[1], now)
            if decision is not None:
                self._remove_displaced(key, displaced)
                displaced.assigned_replica.set_result(
                    displaced.context.record_dispatch(decision, now)
                )
                if key in self._displaced:
                    heapq.heappush(oldest_by_key, (next(iter(self._displaced[key])).sequence, key))

    def _remove_displaced(self, key: _PlacementKey, displaced: _QueuedRequest) -> None:
        requests = self._displaced.get(key, OrderedDict())
        requests.pop(displaced, None)
        if not requests:
            self._displaced.pop(key, None)

    def _lowest_admissible_tier(
        self, free_slots: Sequence[int], total_slots: int, now: float
    ) -> int:
        """Return the rank of the lowest tier that may use a slot now, or -1 if none may."""
        return lowest_admissible_tier(
            free_slots, total_slots, self._running_by_tier, self._last_request_at, now
        )

    def _select_replica(
        self, context: RequestContext, excluded_replicas: Collection[str], now: float
    ) -> RoutingDecision | None:
        return self._pool.select_replica(
            context.fields, context.principal.cache_domain, context.tier, excluded_replicas, now
        )

    def _commit(
        self, context: RequestContext, decision: RoutingDecision, charged_tokens: float, now: float
    ) -> ReplicaEndpoint:
        self._pool.on_dispatched(now)
        prompt_tokens = min(
            charged_tokens, weighted_tokens(context.fields.estimated_prompt_tokens, 0)
        )
        self._prepaid[id(context)] = _PrepaidTokens(charged_tokens, prompt_tokens)
        self._running_by_tier[context.tier] += 1
        return context.record_dispatch(decision, now)

    def _add_charge(self, context: RequestContext, cost: float) -> None:
        if cost:
            principal = context.principal
            self._queue.charge_tenant(context.tier, principal.tenant, principal.weight, cost)

    def _check_admission(self, context: RequestContext, now: float) -> None:
        """Check whether a request may join the queue.

        Raises:
            ApiError: 503 if no replica is expected to recover. 429 if the queue has no room for its size, tenant or
                tier.
        """
        if not self._pool.may_recover(now):
            raise no_replica_error(self._pool, now)
        limits, queue, tier = self._queue_config, self._queue, context.tier
        retry_after_s = self._pool.retry_after_s(now)
        if retry_after_s > limits.timeout_s:
            raise replicas_full_error(self._pool, retry_after_s)
        backlog = queue.tenant_backlog(tier, context.principal.tenant)
        if queue.size_bytes + context.fields.body_bytes > limits.max_bytes:
            raise self._overloaded_error("the queue is full")
        if not (
            is_tenant_within_share(tier, backlog.count, len(queue), limits.max_requests)
            and is_tenant_within_share(tier, backlog.size_bytes, queue.size_bytes, limits.max_bytes)
        ):
            raise self._overloaded_error("the tenant's share of the queue is full")
        waited_s = max(0.0, now - backlog.next_arrived_at)
        if not is_tier_admitted(
            tier, saturation(waited_s / limits.timeout_s, self._pool.reachable_loads())
        ):
            raise self._overloaded_error("the remaining capacity is for higher tiers")

    async def _wait_for_replica(self, queued: QueuedRequest[_QueuedRequest]) -> ReplicaEndpoint:
        queue, assigned_replica, trace = (
            self._queue,
            queued.item.assigned_replica,
            queued.item.context.trace,
        )
        queue.push(queued)
        trace.queued_at, trace.queued_ahead = queued.arrived_at, queue.count_ahead(queued)
        self.dispatch_waiting()
        try:
            async with asyncio.timeout(self._queue_config.timeout_s):
                return await asyncio.shield(assigned_replica)
        except BaseException as error:
            queue.remove(queued)
            if (
                assigned_replica.done()
                and not assigned_replica.cancelled()
                and assigned_replica.exception() is None
            ):
                self._release_unused(queued.item.context)
            if isinstance(error, TimeoutError):
                if not self._pool.is_available():
                    raise no_replica_error(self._pool, self._clock()) from error
                raise self._overloaded_error(
                    f"no free slot within {self._queue_config.timeout_s:g} s"
                ) from error
            raise

    def _release_unused(self, context: RequestContext) -> None:
        """Return the slot of a request that was assigned a replica but was cancelled before anything was sent."""
        decision, trace, now = context.decision, context.attempt_trace, self._clock()
        assert decision is not None  # noqa: S101 - set by the dispatch
        assert trace is not None  # noqa: S101 - set by the dispatch
        trace.ended_at, trace.outcome = now, "ended"
        decision.replica.on_prefill_done(decision.uncached_tokens, trace.chosen_at)
        decision.replica.on_request_ended(None, now)

    def _overloaded_error(self, reason: str) -> ApiError:
        message = f"Too many requests for {self._pool.model!r} ({reason}). Try again shortly."
        return ApiError(429, "overloaded", message, retry_after_s=RETRY_AFTER_S)


def replicas_full_error(pool: Pool, retry_after_s: float) -> ApiError:
    """Build the 429 error for a pool whose replicas all reported that they are full."""
    message = f"The replicas for {pool.model!r} are full. Try again "
    message += f"in {math.ceil(retry_after_s)} s." if retry_after_s > RETRY_AFTER_S else "shortly."
    return ApiError(429, "overloaded", message, retry_after_s=max(RETRY_AFTER_S, retry_after_s))


def no_replica_error(pool: Pool, now: float) -> ApiError:
    """Build the 503 error for a pool without an available replica."""
    message = f"No replica is available for {pool.model!r}. Try again shortly."
    if pool.is_out_of_service:
        message = f"Operators took all replicas for {pool.model!r} out of service; see `argosy replicas list`."
    may_recover = pool.may_recover(now)
    return ApiError(
        503,
        "no_replica",
        message,
        retry_after_s=RETRY_AFTER_S if may_recover else NO_REPLICA_RETRY_AFTER_S,
    )
