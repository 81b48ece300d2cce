"""Registry of served models, which applies configuration reloads to models, pools and replicas."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

import structlog

from argosy.gateway.model_registry.model_entries import (
    ModelEntries,
    build_giving_way,
    build_hedging,
    build_model_router,
    build_pools_by_name,
    build_traffic,
)
from argosy.gateway.model_registry.pool_membership import PoolMembership
from argosy.gateway.model_routes import RouteConfig
from argosy.gateway.pool import ModelStartup, Pool, ReplicaEndpoint, Resolver

FIRST_PROBE_TIMEOUT_S = 5.0
"""Time that the first probes may take before the gateway starts to listen."""
RETIREMENT_POLL_INTERVAL_S = 1.0
"""Interval between checks whether a removed model has finished its requests."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class ModelRegistry:
    """Served models with their pools and replicas. Not thread-safe: use it from one event loop.

    Args:
        model_entries: Models and their replica entries.
        routes: Routes between the models.
        resolve: Resolves host names to addresses.
    """

    def __init__(
        self,
        model_entries: Sequence[ModelEntries],
        routes: Sequence[RouteConfig],
        resolve: Resolver,
    ) -> None:
        self.router = build_model_router(model_entries, routes)
        self._resolve = resolve
        self._memberships = {
            pool.model: PoolMembership(pool, entries, resolve)
            for pool, (_, entries) in zip(self.router.pools, model_entries, strict=True)
        }
        self._retirements: set[asyncio.Task[None]] = set()

    @property
    def replicas(self) -> list[ReplicaEndpoint]:
        """Replicas of all models."""
        return [replica for pool in self.router.pools for replica in pool.replicas.values()]

    async def start(self) -> None:
        """Start the background tasks of all replicas and wait for their first probes, up to `FIRST_PROBE_TIMEOUT_S`."""
        for membership in self._memberships.values():
            membership.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PROBE_TIMEOUT_S):
                for membership in self._memberships.values():
                    await membership.wait_first_probes()

    def apply_config(
        self, model_entries: Sequence[ModelEntries], routes: Sequence[RouteConfig]
    ) -> None:
        """Replace the served models and routes in one step. Queued and running requests continue.

        Pools and replicas whose settings have not changed are kept.
        """
        previous, self._memberships = self._memberships, {}
        for model, entries in model_entries:
            membership, hedging = previous.pop(model.name, None), build_hedging(model)
            if membership is None:
                membership = PoolMembership(
                    Pool(model.name, [], model.routing, hedging), (), self._resolve
                )
                log.info("model_added", model=model.name)
            membership.pool.set_routing_policy(model.routing, hedging)
            membership.pool.giving_way = build_giving_way(model.giving_way)
            membership.pool.traffic = build_traffic(model)
            membership.apply_entries(entries)
            self._memberships[model.name] = membership
        pools = [membership.pool for membership in self._memberships.values()]
        self.router.replace_models(build_pools_by_name(model_entries, pools), routes)
        for membership in previous.values():
            log.info("model_removed", model=membership.pool.model)
            task = asyncio.create_task(_retire_when_idle(membership))
            self._retirements.add(task)
            task.add_done_callback(self._retirements.discard)

    def apply_startups(self, startups: Mapping[str, ModelStartup]) -> None:
        """Replace the states of the models that the fleet scales to zero and that have no replica, by name."""
        for name, membership in self._memberships.items():
            membership.pool.set_startup(startups.get(name), time.monotonic())

    async def close(self) -> None:
        """Stop all background tasks and close all connections to replicas."""
        for task in self._retirements:
            task.cancel()
        await asyncio.gather(*self._retirements, return_exceptions=True)
        for membership in self._memberships.values():
            await membership.close()


async def _retire_when_idle(membership: PoolMembership) -> None:
    """Close a removed model's pool after its last request has ended."""
    try:
        while membership.pool.active_requests:  # noqa: ASYNC110 - the pool has no event for its last request
            await asyncio.sleep(RETIREMENT_POLL_INTERVAL_S)
    finally:
        await membership.close()
