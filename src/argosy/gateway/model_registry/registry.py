"""Registry of served models, which applies configuration reloads to models, pools and replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence

import structlog

from argosy.deployment import RequestSetting
from argosy.gateway.model_registry.model_entries import (
    ModelEntries,
    build_model_router,
    build_pool,
    build_pools_by_name,
    list_declared_adapters,
)
from argosy.gateway.model_registry.model_membership import ModelMembership
from argosy.gateway.model_registry.pool_membership import PoolMembership
from argosy.gateway.pool import ModelStartup, Pool, ReplicaEndpoint, Resolver
from argosy.policy.traffic import PoolRoute

FIRST_PROBE_TIMEOUT_S = 5.0
"""Time that the first probes may take before the gateway starts to listen."""
RETIREMENT_POLL_INTERVAL_S = 1.0
"""Interval between checks whether a removed model or version has finished its requests."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class ModelRegistry:
    """Served models with their pools and replicas. Not thread-safe: use it from one event loop."""

    def __init__(
        self,
        model_entries: Sequence[ModelEntries],
        rules: Sequence[RequestSetting],
        resolve: Resolver,
    ) -> None:
        self.router = build_model_router(model_entries, rules)
        self._resolve = resolve
        self._retirements: set[asyncio.Task[None]] = set()
        self._configured = model_entries, rules
        self._memberships = {
            pool.model: ModelMembership(pool, entries, resolve, self._retire)
            for pool, entries in zip(self.router.pools, model_entries, strict=True)
        }

    @property
    def replicas(self) -> list[ReplicaEndpoint]:
        """Replicas of all models."""
        return [replica for pool in self.router.all_pools for replica in pool.replicas.values()]

    @property
    def routes(self) -> Mapping[str, PoolRoute]:
        """The routes that are followed, by model."""
        memberships = self._memberships.items()
        return {model: each.route for model, each in memberships if each.route is not None}

    async def start(self) -> None:
        """Start the background tasks of all replicas and wait for their first probes, up to `FIRST_PROBE_TIMEOUT_S`."""
        for membership in self._memberships.values():
            membership.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PROBE_TIMEOUT_S):
                for membership in self._memberships.values():
                    await membership.wait_first_probes()

    def apply_config(
        self, model_entries: Sequence[ModelEntries], rules: Sequence[RequestSetting]
    ) -> None:
        """Replace the served models and the rules for requests in one step. Queued and running requests continue.

        Pools and replicas whose settings have not changed are kept.
        """
        previous, self._memberships = self._memberships, {}
        for entries in model_entries:
            name = entries.model.name
            membership = previous.pop(name, None)
            if membership is None:
                empty = entries._replace(versions=dict.fromkeys(entries.versions, ()))
                membership = ModelMembership(build_pool(empty), empty, self._resolve, self._retire)
                log.info("model_added", model=name)
            membership.apply_entries(entries)
            self._memberships[name] = membership
        self._configured = model_entries, rules
        self._replace_models()
        for membership in previous.values():
            log.info("model_removed", model=membership.pool.model)
            self._retire(membership)

    def follow_routes(self, routes: Collection[PoolRoute]) -> bool:
        """Follow those of the routes that are later than the known ones of their pools.

        Returns:
            Whether there is one. Resolve names again then, since a model may have another stable version.
        """
        has_changed = False
        for membership in self._memberships.values():
            if any(membership.follow_route(route) for route in routes):
                has_changed = True
                _log_route(membership.pool)
        if has_changed:
            self._replace_models()
        return has_changed

    def _replace_models(self) -> None:
        model_entries, rules = self._configured
        pools = [membership.pool for membership in self._memberships.values()]
        self.router.replace_models(
            build_pools_by_name(model_entries, pools),
            rules,
            list_declared_adapters(model_entries),
        )

    def _retire(self, membership: ModelMembership | PoolMembership) -> None:
        """Close the pools of a removed model or version after their last requests have ended."""
        task = asyncio.create_task(_close_when_idle(membership))
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)

    def apply_startups(self, startups: Mapping[str, ModelStartup]) -> None:
        """Replace the states of the models that the fleet scales to zero and that have no replica, by name."""
        for name, membership in self._memberships.items():
            membership.set_startup(startups.get(name))

    async def close(self) -> None:
        """Stop all background tasks and close all connections to replicas."""
        for task in self._retirements:
            task.cancel()
        await asyncio.gather(*self._retirements, return_exceptions=True)
        for membership in self._memberships.values():
            await membership.close()


def _log_route(pool: Pool) -> None:
    if pool.versions is None:
        return
    route = pool.versions.route
    log.info(
        "route_followed",
        model=pool.model,
        pool=route.pool,
        version=route.version,
        shares={digest: route.share_of(digest) for digest in pool.versions.pools},
        rolled_back=None if route.rollback is None else route.rollback.reason,
    )


async def _close_when_idle(membership: ModelMembership | PoolMembership) -> None:
    pools = tuple(membership.pool.all_versions)
    try:
        while any(pool.active_requests for pool in pools):  # noqa: ASYNC110 - pools have no event for the last request
            await asyncio.sleep(RETIREMENT_POLL_INTERVAL_S)
    finally:
        await membership.close()
