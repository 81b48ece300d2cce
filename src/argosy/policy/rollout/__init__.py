"""Rollout: how a pool gets to a new version, and back from a bad one.

The gateways score each `RequestOutcome` that was assigned at random, against thresholds of a `Baseline` and rates of
users that were frozen before. An `OutcomeAggregator` sums them up in batches, and the `RolloutGate` judges these by a
race e-process for each `Metric`.

`decide` follows the `RolloutPlan` of the declared version. Its inputs are the stored `PoolRollouts`, the commands of
people, a `RolloutObservation` and the gate's verdict. Its results are the next record, the route of the pool (see
`argosy.policy.traffic`) and the split of its replicas. All records are versioned, and a new controller needs no more.

`decide_share` is for versions that share their replicas, which adapters do. Only the candidate's share changes.
"""

from argosy.policy.rollout.baseline import (
    MIN_SAMPLES,
    Baseline,
    BaselineRecorder,
    UserHistory,
    UserRates,
    freeze_history,
)
from argosy.policy.rollout.comparison import Comparison, EventCell, OutcomeAggregator, OutcomeBatch
from argosy.policy.rollout.gate import GateResult, GateVerdict, MetricVerdict, RolloutGate
from argosy.policy.rollout.gate_record import GateLimits, GateRecord, GateSettings, MetricRule
from argosy.policy.rollout.metrics import EVENTS, Arm, Metric, OutcomeStatus, RequestOutcome
from argosy.policy.rollout.race import candidate_probability
from argosy.policy.rollout.rollout_controller import (
    DeclaredVersion,
    GateStep,
    RolloutDecision,
    decide,
)
from argosy.policy.rollout.rollout_inputs import (
    CheckStatus,
    CommandKind,
    RolloutCommand,
    RolloutObservation,
    VersionStatus,
)
from argosy.policy.rollout.rollout_outputs import ReplicaSplit
from argosy.policy.rollout.rollout_record import (
    ROLLBACK_STATES,
    TRAFFIC_STATES,
    DigestVerdict,
    PoolRollouts,
    RollbackCause,
    RolloutPlan,
    RolloutRecord,
    RolloutSettings,
    RolloutState,
    RolloutStep,
    Transition,
)
from argosy.policy.rollout.share_steps import (
    SHADOW_FRACTION,
    SHARE_STEPS,
    ShareAction,
    ShareDecision,
    decide_share,
)
