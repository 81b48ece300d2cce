"""Reconciliation: the pure function that decides how a fleet becomes what is declared.

    desired state + observed state + time  --->  reconcile  --->  actions, phases

The controller observes and carries out, `reconcile` decides. A `PoolReconciler` treats each pool on its own. It selects
the replicas that leave and those in the rotation, and asks the `DisruptionBudget` whether one may be taken out now.

The module `restarts` says when a missing replica is started. The module `member` finds hung replicas, and says in which
phase each one is. The module `problems` says how urgent that is, and in which words operators read it.
"""

from argosy.policy.reconciliation.actions import (
    SERVING_PHASES,
    Action,
    Admit,
    Drain,
    PhaseReport,
    Reconciliation,
    Remove,
    ReplicaPhase,
    Start,
    Stop,
    Warm,
    Withdraw,
)
from argosy.policy.reconciliation.fleet_state import (
    MAX_PAST_RUNS,
    DesiredFleet,
    DesiredPool,
    LaunchState,
    ObservedFleet,
    ObservedReplica,
    ReplicaMemory,
    ReplicaRun,
    RestartLimits,
    WarmUpState,
    continue_observation,
    parse_replica_name,
    replica_name,
)
from argosy.policy.reconciliation.member import is_ready
from argosy.policy.reconciliation.problems import (
    PROBLEMS,
    PoolCounts,
    Problem,
    ProblemKind,
    Severity,
    build_problem,
    order_problems,
    status_severity,
)
from argosy.policy.reconciliation.reconciler import reconcile
from argosy.policy.reconciliation.restarts import MAX_REFUSAL_DELAY_S, plan_restart
