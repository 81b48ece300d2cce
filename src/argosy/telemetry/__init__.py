"""The instruments: metrics and logs."""

from argosy.telemetry.engine_stats import EngineStats
from argosy.telemetry.gateway_metrics import GatewayMetrics
from argosy.telemetry.gateway_reading import (
    GatewayReading,
    ReplicaReading,
    ReplicaState,
    SharedLimitsReading,
)
from argosy.telemetry.logs import LogFormat, configure_logs, request_context
from argosy.telemetry.metrics import CONTENT_TYPE, Metrics, SequenceTimes

__all__ = [
    "CONTENT_TYPE",
    "EngineStats",
    "GatewayMetrics",
    "GatewayReading",
    "LogFormat",
    "Metrics",
    "ReplicaReading",
    "ReplicaState",
    "SequenceTimes",
    "SharedLimitsReading",
    "configure_logs",
    "request_context",
]
