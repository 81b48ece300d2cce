"""What every request passes on its way in and out: the record, kept answers, limits, the ledger."""

from argosy.gateway.filters.idempotency_filter import Idempotency, kept_answers
from argosy.gateway.filters.limit_filter import Limits, LimitsConfig, shared_state
from argosy.gateway.filters.telemetry_filter import Recorder
from argosy.gateway.filters.usage_recorder import Ledger, settle_forever

__all__ = [
    "Idempotency",
    "Ledger",
    "Limits",
    "LimitsConfig",
    "Recorder",
    "kept_answers",
    "settle_forever",
    "shared_state",
]
