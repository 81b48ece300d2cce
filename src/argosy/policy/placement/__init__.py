"""Placement: which request runs where, and when, as a pure state machine.

A `PlacementCore` receives events (`handle`) and returns effects. The driver creates a `PlacementRequest` for each
admitted request and reports its arrival. The core keeps it in the `PoolQueue` of its `PlacementPool`, selects a
`PlacementReplica`, and follows each `Attempt` there. The module `failures` decides whether a failed request is tried
again, and a `StreamPauser` lets streams give way (see `giving_way`). A request that the pool of one version of a model
cannot serve moves to that of the stable version.
"""

from argosy.policy.placement.attempt import (
    Attempt,
    AttemptEnding,
    AttemptMode,
    AttemptRecord,
)
from argosy.policy.placement.core import PlacementCore, PlacementLimits
from argosy.policy.placement.giving_way import GivingWay
from argosy.policy.placement.messages import (
    Arrived,
    AttemptAnswered,
    AttemptEnded,
    Cancel,
    CapacityChanged,
    Effect,
    Event,
    Move,
    Pause,
    PoolRemoved,
    RefusalReason,
    Refuse,
    RequestEnded,
    Send,
    Tick,
)
from argosy.policy.placement.pool import PlacementPool, RandomSource, Selection
from argosy.policy.placement.pool_queue import PoolQueue, QueueLimits
from argosy.policy.placement.preview import PlacementPreview, explain_exclusion
from argosy.policy.placement.replica import PlacementReplica
from argosy.policy.placement.request import PlacementError, PlacementRequest, RequestState
