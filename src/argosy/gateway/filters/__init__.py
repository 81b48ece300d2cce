"""What every request passes on its way in and out: the record, kept answers, limits, the ledger."""

from argosy.gateway.filters.idempotency_filter import IdempotencyFilter, open_idempotency_store
from argosy.gateway.filters.limit_filter import LimitFilter, LimitsConfig, open_quota_backend
from argosy.gateway.filters.telemetry_filter import TelemetryFilter
from argosy.gateway.filters.usage_recorder import UsageRecorder, flush_usage_forever

__all__ = [
    "IdempotencyFilter",
    "LimitFilter",
    "LimitsConfig",
    "TelemetryFilter",
    "UsageRecorder",
    "flush_usage_forever",
    "open_idempotency_store",
    "open_quota_backend",
]
