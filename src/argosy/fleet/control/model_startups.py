"""How far the starts of models are that the autoscaler scales to zero, for the gateways in which requests wait."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.deployment import FleetRecords, ReplicaRecord
from argosy.fleet.control.declared_fleet import DeclaredFleet
from argosy.gateway import ModelStartup
from argosy.policy.reconciliation import ReplicaPhase

_LEAVING = frozenset({ReplicaPhase.DRAINING, ReplicaPhase.STOPPED})


def find_startups(declared: DeclaredFleet, records: FleetRecords) -> dict[str, ModelStartup]:
    """Return the models without a replica in the rotation that requests start, by name.

    A pool that an operator scaled to zero is not among them, because requests do not start it.
    """
    startups: dict[str, ModelStartup] = {}
    for pool in declared.config.pools:
        if not pool.scales_to_zero or pool.replicas == 0:
            continue
        replicas = [each for each in records.replicas.values() if each.pool == pool.name]
        if not any(each.in_rotation and each.url for each in replicas):
            present = [each for each in replicas if each.phase not in _LEAVING]
            scaling = records.scaling.get(pool.name)
            startups[pool.model] = _describe(
                present,
                records.expected_start_s(declared.source(pool.name)),
                is_wanted=scaling is not None and scaling.target > 0,
            )
    return startups


def _describe(
    replicas: Sequence[ReplicaRecord], expected_s: float | None, *, is_wanted: bool
) -> ModelStartup:
    starting = [each for each in replicas if each.phase is not ReplicaPhase.FAILED]
    if starting:
        started_at = min((each.started_at for each in starting if each.started_at), default=None)
        return ModelStartup(state="starting", expected_s=expected_s, started_at=started_at)
    if replicas:
        return ModelStartup(state="failing")
    return ModelStartup(state="starting" if is_wanted else "stopped", expected_s=expected_s)
