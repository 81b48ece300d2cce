"""Routes of a fleet's pools without a controller: gateways follow those in the store and roll failing versions back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

import msgspec
import structlog

from argosy.gateway.rollout_messages import ROUTE_PREFIX, PublishedVersions
from argosy.policy.rollout import OutcomeBatch, RolloutGate
from argosy.policy.traffic import PoolRoute
from argosy.process import run_in_daemon_thread
from argosy.store import FleetDocument, FleetStore, StoreError

POLL_INTERVAL_S = 1.0
CHECK_INTERVAL_S = 1.0
STORE_TIMEOUT_S = 5.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class RouteWatcher:
    """Reads the routes of a fleet every second, which any process may replace, also without a controller.

    Args:
        store: Store of the fleet.
        fleet: Name of the fleet.
        follow_routes: Called with the routes after each poll.
    """

    def __init__(
        self,
        store: FleetStore,
        fleet: str,
        follow_routes: Callable[[Collection[PoolRoute]], Awaitable[None]],
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._follow_routes = follow_routes
        self._documents: dict[str, FleetDocument] = {}
        self._routes: tuple[PoolRoute, ...] = ()

    async def watch(self) -> None:
        """Poll until cancelled. Routes stay as they are while the store is unreachable, which the account sync logs."""
        while True:
            try:
                documents = await run_in_daemon_thread(
                    self._store.read_documents, self._fleet, ROUTE_PREFIX
                )
            except StoreError as error:
                log.debug("routes_unreadable", reason=str(error))
            else:
                if documents != self._documents:
                    self._routes = tuple(_decode_routes(documents))
                    self._documents = documents
                await self._follow_routes(self._routes)
            await asyncio.sleep(POLL_INTERVAL_S)


def _decode_routes(documents: dict[str, FleetDocument]) -> list[PoolRoute]:
    routes: list[PoolRoute] = []
    for name, document in documents.items():
        try:
            routes.append(msgspec.json.decode(document.content, type=PoolRoute))
        except ValueError as error:
            log.error("route_invalid", document=name, version=document.version, reason=str(error))  # noqa: TRY400 - the reason suffices
    return routes


class LocalGate:
    """Judges the batches of this gateway, and rolls back while no controller is heard.

    The evidence is that of this gateway alone. The controller's gate, which has that of all gateways, decides
    otherwise. A rollback is followed at once, and written to the store as soon as that is possible, where other
    gateways read it. Not thread-safe: use it from one event loop.
    """

    def __init__(
        self,
        store: FleetStore,
        fleet: str,
        *,
        is_controller_silent: Callable[[], bool],
        read_routes: Callable[[], Mapping[str, PoolRoute]],
        follow_routes: Callable[[Collection[PoolRoute]], Awaitable[None]],
        on_rolled_back: Callable[[str], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a gate without evidence.

        Args:
            store: Where the routes of the fleet are stored.
            fleet: Name of the fleet.
            is_controller_silent: Returns whether no controller is heard.
            read_routes: Returns the routes that this gateway follows, by model.
            follow_routes: Follows later routes.
            on_rolled_back: Called with the model of each rollback.
            wall_clock: Returns seconds since the epoch.
        """
        self._store = store
        self._fleet = fleet
        self._is_controller_silent = is_controller_silent
        self._read_routes = read_routes
        self._follow_routes = follow_routes
        self._on_rolled_back = on_rolled_back
        self._wall_clock = wall_clock
        self._gates: dict[str, RolloutGate] = {}
        """Gate of the current rollout of each model."""
        self._unwritten: dict[str, PoolRoute] = {}
        """Rollbacks that the store does not have yet, by pool."""

    def on_batch(self, versions: PublishedVersions, batch: OutcomeBatch) -> None:
        """Add measurements of this gateway."""
        comparison = versions.comparison
        if comparison is None:
            return
        gate = self._gates.get(versions.model)
        if gate is None or gate.record.rollout != comparison.rollout:
            gate = self._gates[versions.model] = RolloutGate.start(
                comparison.rollout,
                comparison.settings,
                comparison.num_gate_starts,
                comparison.baseline.miss_rate,
            )
        gate.open_step(comparison.step, comparison.share, self._wall_clock())
        gate.add(batch)

    async def run(self) -> None:
        """Check every second until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self.check()

    async def check(self) -> None:
        """Roll back what the evidence rejects if no controller is heard, and write earlier rollbacks to the store."""
        if self._is_controller_silent():
            for model, route in self._read_routes().items():
                await self._judge(model, route)
        for pool, rolled_back in tuple(self._unwritten.items()):
            if await self._write(pool, rolled_back):
                del self._unwritten[pool]

    async def _judge(self, model: str, route: PoolRoute) -> None:
        gate, now = self._gates.get(model), self._wall_clock()
        if gate is None:
            return
        verdict = gate.verdict(now)
        if not verdict.rejects(route.rollout):
            return
        reason = f"{verdict.reason}, by a gateway without a controller"
        rolled_back = route.roll_back(reason, now)
        if rolled_back is route:
            return
        self._unwritten[route.pool] = rolled_back
        await self._follow_routes([rolled_back])
        self._on_rolled_back(model)
        log.warning("version_rolled_back", model=model, pool=route.pool, reason=reason)

    async def _write(self, pool: str, rolled_back: PoolRoute) -> bool:
        """Write a rollback. Returns False if the store is unreachable, or another process writes at the same time."""
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                return await run_in_daemon_thread(self._replace_route, pool, rolled_back)
        except (StoreError, TimeoutError) as error:
            reason = str(error) or "the store does not respond"
            log.debug("rollback_not_stored", pool=pool, reason=reason)
            return False

    def _replace_route(self, pool: str, rolled_back: PoolRoute) -> bool:
        """Replace the stored route, unless it is of another rollout or has no candidate any more."""
        name = f"{ROUTE_PREFIX}{pool}"
        document = self._store.read_documents(self._fleet, name).get(name)
        mark = rolled_back.rollback
        if document is None or mark is None:
            return True
        stored = msgspec.json.decode(document.content, type=PoolRoute)
        replacement = stored.roll_back(mark.reason, mark.at)
        if replacement is stored or stored.rollout != rolled_back.rollout:
            return True
        return self._store.replace_document(
            self._fleet,
            name,
            FleetDocument(replacement.version, msgspec.json.encode(replacement)),
            after=document.version,
        )
