"""What is served: the models with the members of their pools, which may be others once the settings have changed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import structlog

from argosy.gateway.model_registry.model_entries import (
    ModelEntries,
    build_hedging,
    build_model_router,
    pools_by_name,
)
from argosy.gateway.model_registry.pool_membership import PoolMembership
from argosy.gateway.model_routes import RouteConfig
from argosy.gateway.pool import Pool, ReplicaEndpoint, Resolver

FIRST_PROBE_TIMEOUT_S = 5.0
"""How long the replicas may take to say how they are before the gateway listens."""
RETIREMENT_POLL_INTERVAL_S = 1.0
"""How often it is looked whether a model that went has nothing left to answer."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class ModelRegistry:
    """Belongs to one event loop."""

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
        """Those of all models."""
        return [replica for pool in self.router.pools for replica in pool.replicas.values()]

    async def start(self) -> None:
        """Look after all replicas; they have been asked how they are, or have taken too long."""
        for members in self._memberships.values():
            members.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PROBE_TIMEOUT_S):
                for members in self._memberships.values():
                    await members.wait_first_probes()

    def apply_config(
        self, model_entries: Sequence[ModelEntries], routes: Sequence[RouteConfig]
    ) -> None:
        """Serve these models from now on, and no others, by these routes; all at once. What waits and runs goes on.

        Pools and replicas whose settings have not changed stay what they are.
        """
        before, self._memberships = self._memberships, {}
        for model, entries in model_entries:
            members, hedging = before.pop(model.name, None), build_hedging(model)
            if members is None:
                members = PoolMembership(
                    Pool(model.name, [], model.routing, hedging), (), self._resolve
                )
                log.info("model_added", model=model.name)
            members.pool.set_routing_policy(model.routing, hedging)
            members.apply_entries(entries)
            self._memberships[model.name] = members
        pools = [members.pool for members in self._memberships.values()]
        self.router.replace_models(pools_by_name(model_entries, pools), routes)
        for members in before.values():
            log.info("model_removed", model=members.pool.model)
            task = asyncio.create_task(_retire_when_idle(members))
            self._retirements.add(task)
            task.add_done_callback(self._retirements.discard)

    async def close(self) -> None:
        """Look after nothing any more, and keep no connection."""
        for task in self._retirements:
            task.cancel()
        await asyncio.gather(*self._retirements, return_exceptions=True)
        for members in self._memberships.values():
            await members.close()


async def _retire_when_idle(membership: PoolMembership) -> None:
    """Keep a model that went for as long as it has something to answer."""
    try:
        while membership.pool.active_requests:  # noqa: ASYNC110 - it is not told
            await asyncio.sleep(RETIREMENT_POLL_INTERVAL_S)
    finally:
        await membership.close()
