"""What those who run a gateway ask it: its metrics, and whether it can answer for every model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from argosy.gateway.auth import check_role
from argosy.gateway.model_registry import Models
from argosy.gateway.pool import Pool, Replica
from argosy.gateway.principal import Caller
from argosy.gateway.proxy import RETRY_AFTER_S
from argosy.http_server import Exchange
from argosy.protocol import ApiError, Status
from argosy.telemetry import (
    CONTENT_TYPE,
    GatewayMetrics,
    GatewayReading,
    ReplicaReading,
    ReplicaState,
    Scrape,
)

_encode = msgspec.json.Encoder().encode


class Operating:
    """The handlers. `read` tells what is counted elsewhere: requests that run, that wait, and rows to settle."""

    def __init__(
        self, models: Models, metrics: GatewayMetrics, read: Callable[[], GatewayReading]
    ) -> None:
        self._models = models
        self._scrape = Scrape(lambda: asyncio.to_thread(metrics.exposition, read()))

    async def metrics(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /metrics`: they name tenants of all organisations."""
        check_role(caller, "viewer", "gateway")
        await exchange.answer(200, await self._scrape.text(), CONTENT_TYPE)

    async def ready(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /ready`: 503 while there is a model that no replica can answer for."""
        del caller
        lacking = [pool.model for pool in self._models.pools if not pool.serves()]
        if lacking:
            message = f"No replica takes requests for {', '.join(lacking)}. Start one, or wait."
            raise ApiError(503, "no_replica", message, retry_after_s=RETRY_AFTER_S)
        await exchange.answer(200, _encode(Status(status="ready")))


def read_replicas(pools: list[Pool]) -> list[ReplicaReading]:
    """All replicas as they are now."""
    now = time.monotonic()
    return [
        ReplicaReading(pool.model, replica.name, _state(replica, now), replica.load.in_flight)
        for pool in pools
        for replica in pool.replicas.values()
    ]


def _state(replica: Replica, now: float) -> ReplicaState:
    if not replica.breaker.closed:
        return "open"
    if not replica.taking:
        return "away"
    return "cooling" if replica.backpressure.cooling(now) else "ready"
