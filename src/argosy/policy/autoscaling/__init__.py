"""Autoscaling: how many replicas a pool shall have.

An `Autoscaler` receives a `PoolObservation` each 5 s: the tokens that arrived, the queue, and the supply. Its
`DemandHistory` turns arrivals into means and peaks. The need is the demand in tokens divided by what a replica serves
within the objectives, which a `CapacityEstimator` learns. The result is a `ScalingDecision` with its arithmetic and a
sentence. The `AutoscalerState` and the `CapacityState` can be stored, so that another controller resumes them.
"""

from argosy.policy.autoscaling.autoscaler import Autoscaler, AutoscalerState
from argosy.policy.autoscaling.capacity import CapacityEstimator, CapacityState, ReplicaReport
from argosy.policy.autoscaling.decision import (
    ArrivedTokens,
    DemandBasis,
    ManualScale,
    PoolObservation,
    ScalingAction,
    ScalingArithmetic,
    ScalingDecision,
    ScalingOwner,
)
from argosy.policy.autoscaling.settings import WEEKDAYS, AutoscalerSettings, ScheduleWindow, Weekday
