"""What is served: the models with the members of their pools, which may be others once the settings have changed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import structlog

from argosy.gateway.model_registry.model_entries import Behind, build_models, hedging_of, named
from argosy.gateway.model_registry.pool_membership import Members
from argosy.gateway.model_routes import RouteConfig
from argosy.gateway.pool import LookUp, Pool, Replica

FIRST_S = 5.0
"""How long the replicas may take to say how they are before the gateway listens."""
RETIRED_EACH_S = 1.0
"""How often it is looked whether a model that went has nothing left to answer."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class Served:
    """Belongs to one event loop."""

    def __init__(
        self, behind: Sequence[Behind], routes: Sequence[RouteConfig], look_up: LookUp
    ) -> None:
        self.models = build_models(behind, routes)
        self._look_up = look_up
        self._members = {
            pool.model: Members(pool, entries, look_up)
            for pool, (_, entries) in zip(self.models.pools, behind, strict=True)
        }
        self._retired: set[asyncio.Task[None]] = set()

    @property
    def replicas(self) -> list[Replica]:
        """Those of all models."""
        return [replica for pool in self.models.pools for replica in pool.replicas.values()]

    async def start(self) -> None:
        """Look after all replicas; they have been asked how they are, or have taken too long."""
        for members in self._members.values():
            members.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                for members in self._members.values():
                    await members.asked()

    def take(self, behind: Sequence[Behind], routes: Sequence[RouteConfig]) -> None:
        """Serve these models from now on, and no others, by these routes; all at once. What waits and runs goes on.

        Pools and replicas whose settings have not changed stay what they are.
        """
        before, self._members = self._members, {}
        for model, entries in behind:
            members, hedging = before.pop(model.name, None), hedging_of(model)
            if members is None:
                members = Members(Pool(model.name, [], model.routing, hedging), (), self._look_up)
                log.info("model_added", model=model.name)
            members.pool.go_by(model.routing, hedging)
            members.take(entries)
            self._members[model.name] = members
        pools = [members.pool for members in self._members.values()]
        self.models.take(named(behind, pools), routes)
        for members in before.values():
            log.info("model_removed", model=members.pool.model)
            task = asyncio.create_task(_retire(members))
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)

    async def close(self) -> None:
        """Look after nothing any more, and keep no connection."""
        for task in self._retired:
            task.cancel()
        await asyncio.gather(*self._retired, return_exceptions=True)
        for members in self._members.values():
            await members.close()


async def _retire(members: Members) -> None:
    """Keep a model that went for as long as it has something to answer."""
    try:
        while members.pool.requests:  # noqa: ASYNC110 - it is not told
            await asyncio.sleep(RETIRED_EACH_S)
    finally:
        await members.close()
