"""Driver of the placement core in a running gateway: its clock, its timer, and the way from effects to requests."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol, cast

from argosy.gateway.pool import Pool
from argosy.gateway.proxy.demand_meter import DemandMeter, DemandReport, ModelDemand
from argosy.policy import BATCH_TIER, LOWEST_TIER, PoolLoad, WakeAt
from argosy.policy.placement import (
    Arrived,
    Attempt,
    Cancel,
    CapacityChanged,
    Event,
    Move,
    Pause,
    PlacementCore,
    PlacementLimits,
    PlacementPreview,
    PlacementRequest,
    PoolRemoved,
    RandomSource,
    Refuse,
    RequestEnded,
    Send,
    Tick,
)

MIN_TIMER_DELAY_S = 0.001
"""Shortest timer delay. libuv's timers fire up to 1 ms early, so a shorter one would only fire again and again."""


class PlacedRequest(Protocol):
    """The side of a request that performs the effects of the core. The calls must not send events."""

    def on_send(self, attempt: Attempt) -> None:
        """Send the request to the replica of the attempt."""

    def on_cancel(self, attempt: Attempt) -> None:
        """Cancel an attempt, because another one provides the response."""

    def on_move(self, move: Move) -> None:
        """Count the request for another pool."""

    def on_pause(self, pause: Pause) -> None:
        """Stop the stream at its last delivered token."""

    def on_refuse(self, refusal: Refuse) -> None:
        """End the request with an error."""


class PlacementDriver:
    """Feeds events to the core and performs its effects. Not thread-safe: use it from one event loop."""

    def __init__(
        self, limits: PlacementLimits, clock: Callable[[], float], random_source: RandomSource
    ) -> None:
        self._core = PlacementCore(limits, random_source)
        self._clock = clock
        self._demand = DemandMeter(clock)
        self._requests: dict[PlacementRequest, PlacedRequest] = {}
        self._pools: set[Pool] = set()
        """The pools that have received requests."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def queue_depths(self) -> Mapping[Pool, int]:
        """Number of queued requests of each pool that has received requests."""
        queues = self._core.queues
        return {pool: len(queues[pool]) for pool in self._pools if pool in queues}

    def count_by_tenant(self) -> dict[str, list[int]]:
        """Return the number of running and of queued requests of each tenant."""
        counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        for queue in self._core.queues.values():
            for tenant, running in queue.count_running_by_tenant().items():
                counts[tenant][0] += running
            for tenant, queued in queue.queue.count_by_tenant().items():
                counts[tenant][1] += queued
        return counts

    def read_demand(self, pools: Iterable[Pool]) -> DemandReport:
        """Return the demand for the models whose stable versions have these pools."""
        models = [self._read_model_demand(pool) for pool in pools]
        return DemandReport(second=self._demand.last_second, models=models)

    def _read_model_demand(self, pool: Pool) -> ModelDemand:
        """Return the demand for all versions of the model of which this is the stable version's pool."""
        now, versions = self._clock(), pool.all_versions
        arrived, served = zip(
            *(self._demand.read(version, version.unserved_at) for version in versions), strict=True
        )
        known = self._core.queues
        pool_queues = [known[version] for version in versions if version in known]
        queues = [each.queue for each in pool_queues]
        oldest = [at for queue in queues if (at := queue.oldest_arrival()) is not None]
        return ModelDemand(
            model=pool.model,
            arrived=[sum(tokens) for tokens in zip(*arrived, strict=True)],
            served=[sum(tokens) for tokens in zip(*served, strict=True)],
            active_requests=sum(version.active_requests for version in versions),
            queued_requests=sum(queue.count_up_to(LOWEST_TIER) for queue in queues),
            queued_tokens=sum(
                queue.cost_tokens for queue in queues if queue.highest_tier is not None
            ),
            queue_age_s=max(0.0, now - min(oldest)) if oldest else 0.0,
            queued_tenants=sum(queue.tenant_count for queue in queues),
            queued_tier=_min_tier(queue.highest_tier for queue in queues),
            served_tier=_min_tier(each.served_tier(now) for each in pool_queues),
        )

    def read_pool_load(self, pool: Pool) -> PoolLoad:
        """Return the requests and slots of a pool, for the lines of batches.

        A server that cannot pause streams has a quarter of its slots for lines, since they do not yield.
        """
        queue = self._core.queues.get(pool)
        free_slots, total = pool.free_slots(self._clock())
        running = [0] * len(free_slots) if queue is None else queue.running_by_tier
        lines, free = running[BATCH_TIER], free_slots[BATCH_TIER]
        if not any(replica.resumes_exactly for replica in pool.replicas.values()):
            free = min(free, max(0, max(1, total // 4) - lines))
        return PoolLoad(
            total_slots=total,
            free_slots=free,
            running_lines=lines,
            online_running=sum(running[:BATCH_TIER]),
            online_waiting=0 if queue is None else queue.queue.count_up_to(LOWEST_TIER),
            kv_usage=min((load.kv_usage_ratio for load in pool.reachable_loads()), default=0.0),
        )

    def preview(self, request: PlacementRequest, pool: Pool) -> PlacementPreview:
        """Return what would happen to a request that arrived now, and change nothing."""
        return self._core.preview(request, pool, self._clock())

    def handle(self, event: Event) -> None:
        """Feed an event to the core, and perform the effects."""
        now = self._clock()
        for effect in self._core.handle(event, now):
            if isinstance(effect, Send):
                self._requests[effect.request].on_send(effect.attempt)
            elif isinstance(effect, WakeAt):
                self._set_timer(effect.at - now)
            elif isinstance(effect, Refuse):
                self._requests[effect.request].on_refuse(effect)
            elif isinstance(effect, Cancel):
                self._requests[effect.request].on_cancel(effect.attempt)
            elif isinstance(effect, Move):
                self._observe(cast("Pool", effect.pool))
                self._requests[effect.request].on_move(effect)
            else:
                self._requests[effect.request].on_pause(effect)

    def arrive(self, request: PlacementRequest, placed: PlacedRequest, pool: Pool) -> None:
        """Let a request arrive at a pool. Its effects are performed with `placed` from now on."""
        self._requests[request] = placed
        self._observe(pool)
        self._demand.on_arrived(request, pool)
        self.handle(Arrived(request, pool))

    def record_sent(
        self, request: PlacementRequest, attempt: Attempt, *, is_restarted: bool = False
    ) -> None:
        """Record that an attempt's request is sent now."""
        request.record_sent(attempt, self._clock(), is_restarted=is_restarted)

    def record_progress(
        self, request: PlacementRequest, output_tokens: int, service: float
    ) -> None:
        """Record that tokens were delivered (see `PlacementCore.record_progress`)."""
        self._demand.on_progress(request, self._core.requests[request].pool, output_tokens)
        self._core.record_progress(request, output_tokens, service)

    def _observe(self, pool: Pool) -> None:
        """Feed changes of the pool's capacity to the core from now on."""
        if pool not in self._pools:
            self._pools.add(pool)
            pool.set_capacity_listener(partial(self.handle, CapacityChanged(pool)))

    def end(self, request: PlacementRequest) -> None:
        """End a request, whatever its state, if it has arrived."""
        if request in self._requests:
            self.handle(RequestEnded(request))
            self._demand.on_ended(request)
            del self._requests[request]

    def remove_pools(self, kept: set[Pool]) -> None:
        """Forget the pools that serve no request and are not among `kept`."""
        for pool in tuple(self._pools):
            if not (pool.active_requests or pool in kept):
                self._pools.remove(pool)
                self._demand.remove_pool(pool)
                self.handle(PoolRemoved(pool))

    def _set_timer(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(delay_s, MIN_TIMER_DELAY_S), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.handle(Tick())


def _min_tier(tiers: Iterable[int | None]) -> int | None:
    """Return the rank of the highest of these tiers; None if there is none."""
    return min((tier for tier in tiers if tier is not None), default=None)
