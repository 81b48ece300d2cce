"""The controller's decision: what has to be done so that a fleet becomes what is declared."""

from __future__ import annotations

import math
from collections import defaultdict

from argosy.policy.reconciliation.actions import Action, PhaseReport, Reconciliation
from argosy.policy.reconciliation.desired import DesiredFleet, DesiredPool
from argosy.policy.reconciliation.observed import ObservedFleet, ObservedReplica
from argosy.policy.reconciliation.pool_reconciler import PoolReconciler


def reconcile(desired: DesiredFleet, observed: ObservedFleet, now: float) -> Reconciliation:
    """Compare the desired with the observed state of a fleet.

    The result depends on the arguments alone: the same arguments give the same actions in the same order, and none is
    left once the fleet is as desired. Call it after each change, and at `Reconciliation.wake_at`.

    Args:
        desired: What the fleet shall consist of.
        observed: What exists.
        now: Seconds since the epoch.
    """
    by_pool = defaultdict[str, list[ObservedReplica]](list)
    for replica in observed.replicas:
        by_pool[replica.pool].append(replica)
    actions: list[Action] = []
    phases: dict[str, PhaseReport] = {}
    wake_at = math.inf
    declared = defaultdict[str, list[DesiredPool]](list)
    for pool in desired.pools:
        declared[pool.name].append(pool)
    for name in [*declared, *sorted(by_pool.keys() - declared.keys())]:
        is_declared = name in declared
        versions = declared.get(name) or [
            DesiredPool(name=name, launcher="", generation=-1, replicas=0)
        ]
        others = {pool.generation: pool for pool in versions[1:]}
        for pool in versions:
            replicas = [
                each
                for each in by_pool.get(name, ())
                if others.get(each.generation, versions[0]) is pool
            ]
            reconciler = PoolReconciler(pool, replicas, observed, now, is_declared=is_declared)
            reconciler.run()
            actions += reconciler.actions
            phases |= reconciler.phases
            wake_at = min(wake_at, reconciler.wake_at)
    return Reconciliation(
        actions=tuple(actions),
        wake_at=None if math.isinf(wake_at) else wake_at,
        phases=phases,
    )
