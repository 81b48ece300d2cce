"""Rollout: how a pool gets to a new version, and back from a bad one.

The gateways score each `RequestOutcome` that was assigned at random, against thresholds of a `Baseline` and rates of
users that were frozen before. An `OutcomeAggregator` sums them up in batches, and the `RolloutGate` judges these by a
race e-process for each `Metric`.
"""

from argosy.policy.rollout.baseline import Baseline, BaselineRecorder
from argosy.policy.rollout.gate import GateResult, GateVerdict, MetricVerdict, RolloutGate
from argosy.policy.rollout.gate_record import GateRecord
from argosy.policy.rollout.gate_settings import GateSettings, MetricRule
from argosy.policy.rollout.metrics import EVENTS, Metric
from argosy.policy.rollout.outcome_batch import EventCell, OutcomeAggregator, OutcomeBatch
from argosy.policy.rollout.outcomes import Arm, OutcomeStatus, RequestOutcome
from argosy.policy.rollout.user_history import UserHistory, UserRates

__all__ = [
    "EVENTS",
    "Arm",
    "Baseline",
    "BaselineRecorder",
    "EventCell",
    "GateRecord",
    "GateResult",
    "GateSettings",
    "GateVerdict",
    "Metric",
    "MetricRule",
    "MetricVerdict",
    "OutcomeAggregator",
    "OutcomeBatch",
    "OutcomeStatus",
    "RequestOutcome",
    "RolloutGate",
    "UserHistory",
    "UserRates",
]
