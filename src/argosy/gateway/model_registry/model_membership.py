"""Membership of all replicas of one model: a pool per version, of which a route makes one the stable one."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from argosy.deployment import ModelConfig
from argosy.gateway.model_registry.model_entries import (
    ModelEntries,
    build_giving_way,
    build_hedging,
    build_traffic,
    build_version_pool,
)
from argosy.gateway.model_registry.pool_membership import PoolMembership
from argosy.gateway.pool import ModelStartup, Pool, PoolVersions, Resolver
from argosy.policy.traffic import PoolRoute

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class ModelMembership:
    """Pools of the versions of one model. Not thread-safe: use it from one event loop.

    A version keeps its pool, with queue and breakers, when it becomes the stable one.
    """

    def __init__(
        self,
        pool: Pool,
        entries: ModelEntries,
        resolve: Resolver,
        retire: Callable[[PoolMembership], None],
    ) -> None:
        self.pool = pool
        """Pool of the stable version, which takes over what other versions cannot serve."""
        self._resolve = resolve
        self._retire = retire
        self._memberships = {
            each.version: PoolMembership(each, entries.versions[each.version], resolve)
            for each in pool.all_versions
        }
        self._published_stable = entries.stable
        self._divide_requests(entries.model, entries.route)

    @property
    def route(self) -> PoolRoute | None:
        """The route that is followed; None if changes of the model are no rollouts."""
        return None if self.pool.versions is None else self.pool.versions.route

    def start(self) -> None:
        """Start the background tasks of all replicas."""
        for membership in self._memberships.values():
            membership.start()

    async def wait_first_probes(self) -> None:
        """Wait until each host name has been looked up once and each replica has been probed once."""
        for membership in tuple(self._memberships.values()):
            await membership.wait_first_probes()

    def apply_entries(self, entries: ModelEntries) -> None:
        """Replace the replicas of all versions. A later route that is known already stays in force."""
        model, versions, route = entries
        if (route is None) is not (self.route is None):
            self._rename_stable(entries.stable)
        removed = self._memberships.keys() - versions.keys()
        for digest, replicas in versions.items():
            membership = self._memberships.get(digest)
            if membership is None:
                pool = build_version_pool(model, digest, [])
                membership = self._memberships[digest] = PoolMembership(pool, (), self._resolve)
            membership.pool.set_routing_policy(model.routing, build_hedging(model))
            membership.pool.sleep = model.sleep
            membership.pool.giving_way = build_giving_way(model.giving_way)
            membership.apply_entries(replicas)
        retired = [self._memberships.pop(digest) for digest in removed]
        self._published_stable = entries.stable
        known = self.route
        is_known_later = (
            known is not None
            and route is not None
            and known.pool == route.pool
            and known.version > route.version
        )
        self._divide_requests(model, known if is_known_later else route)
        for membership in retired:
            membership.pool.traffic = membership.pool.versions = None
            membership.pool.set_startup(None, time.monotonic())
            membership.pool.set_takeover(self.pool, is_withdrawn=True)
            membership.apply_entries(())
            self._retire(membership)

    def follow_route(self, route: PoolRoute) -> bool:
        """Follow a route if it is a later one of this pool. Returns whether it is."""
        known = self.route
        if known is None or known.pool != route.pool or known.version >= route.version:
            return False
        self._divide_requests(None, route)
        return True

    def set_startup(self, startup: ModelStartup | None) -> None:
        """Set how far the start of the model is. Requests wait for it at the stable version only."""
        now = time.monotonic()
        for membership in self._memberships.values():
            pool = membership.pool
            pool.set_startup(startup if pool is self.pool else None, now)

    async def close(self) -> None:
        """Stop all background tasks and close all connections to the replicas."""
        for membership in self._memberships.values():
            await membership.close()

    # --- Internal --------------------------------------------------------------------------------

    def _rename_stable(self, digest: str) -> None:
        """Rename the stable version, because rollouts were declared for the model, or are no more."""
        if digest not in self._memberships:
            membership = self._memberships.pop(self.pool.version)
            membership.pool.version, self._memberships[digest] = digest, membership

    def _divide_requests(self, model: ModelConfig | None, route: PoolRoute | None) -> None:
        """Divide requests among the versions by a route. `model` is None if its settings have not changed."""
        traffic = self.pool.traffic if model is None else build_traffic(model)
        startup = self.pool.startup
        pools = {digest: membership.pool for digest, membership in self._memberships.items()}
        # A later route of the store may name a version whose replicas are not published yet.
        stable = route.stable if route is not None and route.stable in pools else ""
        self.pool = pools[stable or self._published_stable]
        for pool in pools.values():
            pool.traffic = pool.versions = None
        self.pool.traffic = traffic
        self.pool.versions = None if route is None else PoolVersions(route, pools)
        self.set_startup(startup)  # before requests move to this pool, which refuses them otherwise
        self.pool.set_takeover(None, is_withdrawn=False)
        for digest, pool in pools.items():
            if pool is not self.pool:
                has_requests = route is not None and (
                    route.share_of(digest) > 0.0
                    or (route.shadow is not None and route.shadow.digest == digest)
                )
                pool.set_takeover(self.pool, is_withdrawn=not has_requests)
