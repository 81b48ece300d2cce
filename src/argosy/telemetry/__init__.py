"""The instruments: metrics and logs."""

from argosy.telemetry.coalesced_scrape import Scrape
from argosy.telemetry.engine_stats import EngineStats
from argosy.telemetry.gateway_gauges import (
    GatewayReading,
    ReplicaReading,
    ReplicaState,
    SharedLimitsReading,
)
from argosy.telemetry.gateway_metrics import GatewayMetrics
from argosy.telemetry.instruments import CONTENT_TYPE
from argosy.telemetry.logs import LogFormat, configure_logs, name_request
from argosy.telemetry.replica_metrics import Metrics, SequenceTimes

__all__ = [
    "CONTENT_TYPE",
    "EngineStats",
    "GatewayMetrics",
    "GatewayReading",
    "LogFormat",
    "Metrics",
    "ReplicaReading",
    "ReplicaState",
    "Scrape",
    "SequenceTimes",
    "SharedLimitsReading",
    "configure_logs",
    "name_request",
]
