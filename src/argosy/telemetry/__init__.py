"""The instruments: metrics and logs."""

from argosy.telemetry.coalesced_scrape import CoalescedScrape
from argosy.telemetry.engine_stats import EngineStats
from argosy.telemetry.gateway_gauges import (
    GatewayGauges,
    QuotaBackendGauges,
    ReplicaGauges,
)
from argosy.telemetry.gateway_metrics import GatewayMetrics
from argosy.telemetry.instruments import METRICS_CONTENT_TYPE
from argosy.telemetry.logs import LogFormat, bind_request, configure_logging
from argosy.telemetry.replica_metrics import ReplicaMetrics, SequenceTimes

__all__ = [
    "METRICS_CONTENT_TYPE",
    "CoalescedScrape",
    "EngineStats",
    "GatewayGauges",
    "GatewayMetrics",
    "LogFormat",
    "QuotaBackendGauges",
    "ReplicaGauges",
    "ReplicaMetrics",
    "SequenceTimes",
    "bind_request",
    "configure_logging",
]
