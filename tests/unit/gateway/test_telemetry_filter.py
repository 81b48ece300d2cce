"""Telemetry filter: labels of the metrics of a request."""

from __future__ import annotations

from unittest.mock import Mock

from tests.support.limit_harness import make_context

from argosy.deployment import ExplainConfig
from argosy.gateway.filters.telemetry_filter import TelemetryFilter
from argosy.gateway.principal import Principal
from argosy.gateway.request_trace import TraceStore
from argosy.http_server import HttpExchange
from argosy.telemetry import GatewayGauges, GatewayMetrics


async def test_telemetry_without_project_uses_organisation_as_tenant() -> None:
    metrics = GatewayMetrics()
    telemetry = TelemetryFilter(TraceStore(ExplainConfig()), metrics, lambda: 1.0)
    for organisation in ("acme", "zeta"):
        context = make_context(Principal(organisation=organisation))
        context.exchange = Mock(spec=HttpExchange, request_id="r", path="/v1/completions")
        await telemetry.on_request(context)
        telemetry.on_complete(context)
    exposition = metrics.exposition(GatewayGauges()).decode()
    for organisation in ("acme", "zeta"):
        assert (
            f'requests_total{{model="big",status="failed",tenant="{organisation}"}} 1.0'
            in exposition
        )
