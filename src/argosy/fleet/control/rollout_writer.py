"""Stores decisions about rollouts, in the order that makes each of them survive a crash of the controller."""

from __future__ import annotations

from functools import partial

import msgspec

from argosy.deployment import ROLLOUTS_PREFIX, ROUTE_PREFIX, RolloutDocuments, remove_commands
from argosy.policy.rollout import PoolRollouts
from argosy.policy.traffic import PoolRoute
from argosy.process import run_in_daemon_thread
from argosy.store import FleetDocument, FleetStore


class RolloutWriter:
    """Writes the documents of a fleet's rollouts by compare-and-set.

    Args:
        store: Store of the fleet.
        fleet: Name of the fleet.
    """

    def __init__(self, store: FleetStore, fleet: str) -> None:
        self._store = store
        self._fleet = fleet

    async def write(
        self, stored: RolloutDocuments, route: PoolRoute | None, rollouts: PoolRollouts
    ) -> bool:
        """Write the result of a decision, and return whether no other process has changed the documents meanwhile.

        A rollback is written before the record, because it is valid without it. Any other route is written after the
        record that explains it. If only a part is written, the next decision writes the rest.

        Args:
            stored: The documents that the decision rests on.
            route: The new route; None to keep it.
            rollouts: The new record.
        """
        is_rollback = route is not None and route.rollback is not None
        if route is not None and is_rollback and not await self._write_route(stored, route):
            return False
        if rollouts != stored.rollouts:
            document = FleetDocument(rollouts.version, msgspec.json.encode(rollouts))
            name = f"{ROLLOUTS_PREFIX}{stored.pool}"
            if not await self._replace(name, document, stored.rollouts.version):
                return False
        return route is None or is_rollback or await self._write_route(stored, route)

    async def remove_commands(self, stored: RolloutDocuments) -> None:
        """Remove the commands that a decision was about."""
        if stored.commands:
            await run_in_daemon_thread(
                remove_commands, self._store, self._fleet, stored.pool, stored.commands
            )

    async def release(self, stored: RolloutDocuments, now: float) -> bool:
        """End the rollouts of a pool that declares none any more, and return whether that was written.

        The route remains, so that its next version is larger. It serves the stable version only.
        """
        route = stored.route
        if route is not None:
            changed = route.roll_back("the pool declares no rollout any more", now)
            if changed is not route and not await self._write_route(stored, changed):
                return False
        await self.remove_commands(stored)
        name = f"{ROLLOUTS_PREFIX}{stored.pool}"
        return await self._replace(name, None, stored.rollouts.version)

    async def _write_route(self, stored: RolloutDocuments, route: PoolRoute) -> bool:
        document = FleetDocument(route.version, msgspec.json.encode(route))
        after = 0 if stored.route is None else stored.route.version
        return await self._replace(f"{ROUTE_PREFIX}{stored.pool}", document, after)

    async def _replace(self, name: str, document: FleetDocument | None, after: int) -> bool:
        replace = partial(self._store.replace_document, after=after)
        return await run_in_daemon_thread(replace, self._fleet, name, document)
