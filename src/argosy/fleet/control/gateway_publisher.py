"""Publishes the pools of a fleet to all its gateways, and reads which replicas they route to."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec
import structlog

from argosy.gateway import (
    FleetPools,
    GatewayPoolsClient,
    OtherFleetError,
    PoolsStatus,
    RoutedReplica,
    UpstreamError,
)
from argosy.policy import ReplicaStatus
from argosy.policy.traffic import PoolRoute
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError
from argosy.store import GatewayRecord, GatewayRegistry, StoreError

POLL_INTERVAL_S = 1.0
FIRST_POLL_INTERVAL_S = 0.1
"""Interval after a publication, in which gateways probe new replicas for the first time."""
NUM_FIRST_POLLS = 5
_VIEW_ORDER = (
    ReplicaStatus.DRAINING,
    ReplicaStatus.CORDONED,
    ReplicaStatus.EJECTED,
    ReplicaStatus.UNREACHABLE,
    ReplicaStatus.STARTING,
    ReplicaStatus.SLEEPING,
    ReplicaStatus.BACKOFF,
    ReplicaStatus.READY,
)
"""Statuses of a replica, those first that explain best why it gets no requests."""
_ROUTED_STATUSES = frozenset({ReplicaStatus.READY, ReplicaStatus.SLEEPING})
"""Statuses of the replicas that a gateway routes to. It wakes those up that sleep."""
RECENT_SECONDS = 3
"""Seconds in which a request counts as new that a gateway refused until the model has started."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class GatewayPublisher:
    """Keeps the gateways of a store at the latest version. Not thread-safe: use it from one event loop.

    Args:
        wake: Set after each round in which a gateway has another version, or other replicas.
    """

    def __init__(self, registry: GatewayRegistry, wake: asyncio.Event) -> None:
        self._registry = registry
        self._wake = wake
        self.client = GatewayPoolsClient()
        self._pools: FleetPools | None = None
        self.statuses: dict[str, PoolsStatus | None] = {}
        """Latest answer of each registered gateway, by id; None if it cannot be reached."""
        self._routed: Sequence[AbstractSet[str]] = ()
        """Replicas that each gateway routes to that can be reached."""
        self._views: Mapping[str, RoutedReplica] = {}
        """Worst view of each replica, by name."""
        self._gateways: Sequence[GatewayRecord] = ()
        """Registered gateways, by the latest round."""
        self._own_urls: Mapping[str, str] = {}
        """Addresses, by id, of gateways that may share the registered one with another gateway during a restart."""
        self._others: set[str] = set()
        """Ids of gateways on the same store that do not belong to the fleet, by the latest round."""
        self._published = asyncio.Event()
        self._updated_at = float("-inf")

    @property
    def status_age_s(self) -> float:
        """Seconds since the statuses were last updated; infinite before the first time."""
        return time.monotonic() - self._updated_at

    @property
    def _answers(self) -> Sequence[PoolsStatus]:
        """Latest answers of the gateways that can be reached."""
        return [status for status in self.statuses.values() if status is not None]

    @property
    def waiting_models(self) -> AbstractSet[str]:
        """Models for which requests wait at a gateway, or have arrived in the last seconds."""
        return {model for status in self._answers for model in _waiting_models(status)}

    @property
    def watched_logs(self) -> AbstractSet[str]:
        """Replicas whose logs a gateway shows."""
        return {replica for status in self._answers for replica in status.watched_logs}

    @property
    def reachable_gateways(self) -> Sequence[GatewayRecord]:
        """Gateways of the fleet that answered in the latest round."""
        return [each for each in self._gateways if self.statuses.get(each.id) is not None]

    def routed_version(self, route: PoolRoute) -> int:
        """Return the smallest version of a pool's route that a gateway follows that can be reached.

        Without gateways it is that of the stored route. It is 0 if none can be reached, or before the first answers.
        """
        if not self.statuses:
            return route.version if math.isfinite(self._updated_at) else 0
        return min((status.routes.get(route.pool, 0) for status in self._answers), default=0)

    def latest_version(self, pool: str) -> int:
        """Return the largest version of a pool's route that a gateway follows that can be reached."""
        return max((status.routes.get(pool, 0) for status in self._answers), default=0)

    def publish(self, pools: FleetPools) -> None:
        """Replace the pools. Sent at once by `run`."""
        self._pools = pools
        self._published.set()

    def use_own_urls(self, urls: Mapping[str, str]) -> None:
        """Reach gateways, by id, at these addresses of their own. New ones are sent the pools at once."""
        if urls.keys() - self._own_urls.keys():
            self._published.set()
        self._own_urls = urls

    def is_routed(self, replica: str) -> bool:
        """Return whether all gateways that can be reached route to a replica. Without gateways, all do."""
        if not self.statuses:
            return True
        return bool(self._routed) and all(replica in routed for routed in self._routed)

    def is_routed_by_any(self, replica: str) -> bool:
        """Return whether at least one gateway that can be reached routes to a replica."""
        return any(replica in routed for routed in self._routed)

    def worst_view(self, replica: str) -> RoutedReplica | None:
        """Return how that gateway sees a replica that has most against it; None if no gateway knows it."""
        return self._views.get(replica)

    async def run(self) -> None:
        """Publish and poll until cancelled."""
        first_polls = 0
        while True:
            first_polls = NUM_FIRST_POLLS if self._published.is_set() else max(0, first_polls - 1)
            self._published.clear()
            pools = self._pools
            if pools is not None:
                await self._run_round(pools)
            interval_s = FIRST_POLL_INTERVAL_S if first_polls else POLL_INTERVAL_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._published.wait()

    async def _run_round(self, pools: FleetPools) -> None:
        try:
            registered = await run_in_daemon_thread(self._registry.list_running)
        except StoreError as error:
            log.warning("store_unavailable", reason=str(error))
            return
        urls = self._own_urls
        gateways = [
            msgspec.structs.replace(each, url=urls[each.id], certificate="")
            if each.id in urls
            else each
            for each in registered
        ]
        self._others.clear()
        answers = await asyncio.gather(*(self._synchronise(gateway, pools) for gateway in gateways))
        statuses = {
            gateway.id: answer
            for gateway, answer in zip(gateways, answers, strict=True)
            if gateway.id not in self._others
        }
        before = {name: _summarise(status) for name, status in self.statuses.items()}
        has_changed = before != {name: _summarise(status) for name, status in statuses.items()}
        self.statuses, self._updated_at = statuses, time.monotonic()
        self._routed = [
            {each.replica for each in status.replicas if each.status in _ROUTED_STATUSES}
            for status in self._answers
        ]
        views = [each for status in self._answers for each in status.replicas]
        views.sort(key=lambda each: _VIEW_ORDER.index(each.status), reverse=True)
        self._views = {each.replica: each for each in views}
        self._gateways = gateways
        if has_changed:
            self._wake.set()

    async def _synchronise(self, gateway: GatewayRecord, pools: FleetPools) -> PoolsStatus | None:
        """Return a gateway's answer after it has the version; None if it cannot be reached or refuses it."""
        try:
            status = self.statuses.get(gateway.id)
            if status is not None and (status.epoch, status.version) == pools.order:
                status = await self.client.read_status(gateway)
            if status is None or (status.epoch, status.version) != pools.order:
                status = await self.client.publish(gateway, pools)
        except OtherFleetError:
            self._others.add(gateway.id)
            return None
        except (UpstreamError, ApiError) as error:
            if self.statuses.get(gateway.id, gateway) is not None:
                log.warning("gateway_not_updated", gateway=gateway.id, reason=str(error))
            return None
        return status


def _summarise(status: PoolsStatus | None) -> tuple[PoolsStatus, AbstractSet[str]] | None:
    """Return what the controller has to react to at once: all but the amount of the demand."""
    if status is None:
        return None
    return msgspec.structs.replace(status, demand=None), _waiting_models(status)


def _waiting_models(status: PoolsStatus) -> AbstractSet[str]:
    demand = status.demand
    return {
        each.model
        for each in (() if demand is None else demand.models)
        if each.queued_requests or any(each.arrived[-RECENT_SECONDS:])
    }
