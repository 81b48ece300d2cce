"""The instruments: metrics and logs."""

from argosy.telemetry.counting import CONTENT_TYPE
from argosy.telemetry.engine_stats import EngineStats
from argosy.telemetry.gateway_metrics import GatewayMetrics
from argosy.telemetry.gateway_reading import (
    GatewayReading,
    ReplicaReading,
    ReplicaState,
    SharedLimitsReading,
)
from argosy.telemetry.logs import LogFormat, configure_logs, name_request
from argosy.telemetry.metrics import Metrics, SequenceTimes
from argosy.telemetry.scrape import Scrape

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
