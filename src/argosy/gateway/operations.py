"""What those who run a gateway ask it: its metrics, and whether it can answer for every model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from argosy.gateway.auth import check_role
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.pool import Pool
from argosy.gateway.principal import Principal
from argosy.gateway.proxy import RETRY_AFTER_S
from argosy.http_server import HttpExchange
from argosy.protocol import ApiError, StatusResponse
from argosy.telemetry import (
    METRICS_CONTENT_TYPE,
    CoalescedScrape,
    GatewayGauges,
    GatewayMetrics,
    ReplicaGauges,
)

_encode = msgspec.json.Encoder().encode


class OperationsHandlers:
    """The handlers. `read` tells what is counted elsewhere: requests that run, that wait, and rows to settle."""

    def __init__(
        self,
        models: ModelRouter,
        metrics: GatewayMetrics,
        read_metrics: Callable[[], GatewayGauges],
    ) -> None:
        self._models = models
        self._scrape = CoalescedScrape(
            lambda: asyncio.to_thread(metrics.exposition, read_metrics())
        )

    async def metrics(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /metrics`: they name tenants of all organisations."""
        check_role(principal, "viewer", "gateway")
        await exchange.send_response(200, await self._scrape.get_text(), METRICS_CONTENT_TYPE)

    async def ready(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /ready`: 503 while there is a model that no replica can answer for."""
        del principal
        lacking = [pool.model for pool in self._models.pools if not pool.is_available()]
        if lacking:
            message = f"No replica takes requests for {', '.join(lacking)}. Start one, or wait."
            raise ApiError(503, "no_replica", message, retry_after_s=RETRY_AFTER_S)
        await exchange.send_response(200, _encode(StatusResponse(status="ready")))


def list_replica_readings(pools: list[Pool]) -> list[ReplicaGauges]:
    """All replicas as they are now."""
    now = time.monotonic()
    return [
        ReplicaGauges(pool.model, replica.name, replica.status(now), replica.load.in_flight)
        for pool in pools
        for replica in pool.replicas.values()
    ]
