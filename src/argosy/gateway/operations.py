"""Handlers for operators: the gateway's metrics, version and health, and its readiness to serve every model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.pool import Pool
from argosy.gateway.principal import Principal
from argosy.gateway.proxy import RETRY_AFTER_S
from argosy.http_server import HttpExchange
from argosy.protocol import ApiError, StatusResponse, VersionResponse
from argosy.telemetry import (
    METRICS_CONTENT_TYPE,
    CoalescedScrape,
    GatewayGauges,
    GatewayMetrics,
    ReplicaGauges,
)
from argosy.version import VERSION

_encode = msgspec.json.Encoder().encode


class OperationsHandlers:
    """Handlers of `GET /metrics`, `/health`, `/ready` and `/version`."""

    def __init__(
        self,
        models: ModelRouter,
        metrics: GatewayMetrics,
        read_metrics: Callable[[], GatewayGauges],
        gateway_id: str,
        is_accepting: Callable[[], bool],
    ) -> None:
        """Create the handlers. `is_accepting` returns whether the gateway accepts clients."""
        self._models = models
        self._gateway_id = gateway_id
        self._is_accepting = is_accepting
        self._scrape = CoalescedScrape(
            lambda: asyncio.to_thread(metrics.exposition, read_metrics())
        )

    async def metrics(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /metrics`."""
        del principal
        await exchange.send_response(200, await self._scrape.get_text(), METRICS_CONTENT_TYPE)

    async def health(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /health`. Names the gateway that answers and its version, since two may listen on one address."""
        del principal
        status, text = (200, "ok") if self._is_accepting() else (503, "starting")
        body = StatusResponse(status=text, gateway=self._gateway_id, version=VERSION)
        await exchange.send_response(status, _encode(body))

    async def version(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /version`."""
        del principal
        await exchange.send_response(200, _encode(VersionResponse(version=VERSION)))

    async def ready(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /ready`.

        Raises:
            ApiError: 503 if no replica is available for one of the models and no request would start one, or if the
                controller has published no model yet.
        """
        del principal
        unavailable = [
            pool.model
            for pool in self._models.pools
            if not (pool.is_available() or pool.is_starting or pool.is_answered_by_others)
        ]
        message = "The controller of the fleet has published no model yet. Start it, or wait."
        if unavailable:
            message = f"No replica is available for {', '.join(unavailable)}. Start one, or wait."
        if unavailable or not self._models.pools:
            raise ApiError(503, "no_replica", message, retry_after_s=RETRY_AFTER_S)
        await exchange.send_response(200, _encode(StatusResponse(status="ready")))


def list_replica_readings(pools: list[Pool]) -> list[ReplicaGauges]:
    """Return the current status and load of all replicas."""
    now = time.monotonic()
    return [
        ReplicaGauges(pool.model, replica.name, replica.health.status(now), replica.load.in_flight)
        for pool in pools
        for replica in pool.replicas.values()
    ]
