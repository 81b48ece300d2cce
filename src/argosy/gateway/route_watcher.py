"""Watch of the routes of a fleet's pools in the store, which any process may replace, also without a controller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

import msgspec
import structlog

from argosy.gateway.rollout_messages import ROUTE_PREFIX
from argosy.policy.traffic import PoolRoute
from argosy.process import run_in_daemon_thread
from argosy.store import FleetDocument, FleetStore, StoreError

POLL_INTERVAL_S = 1.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class RouteWatcher:
    """Reads the routes of a fleet every second.

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
