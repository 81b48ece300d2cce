"""What every request passes on its way in and out: the record, kept answers, limits, the ledger."""

from argosy.gateway.stages.idempotency import Idempotency, kept_answers
from argosy.gateway.stages.ledger import Ledger, settle_forever
from argosy.gateway.stages.limits import Limits, LimitsConfig, shared_state
from argosy.gateway.stages.recorder import Recorder

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
