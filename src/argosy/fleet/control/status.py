"""Status of a fleet for operators: the declaration in force, and what its controller recorded."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from argosy.fleet.control.declared_fleet import gateway_url
from argosy.fleet.control.fleet_records import ReplicaRecord, decode_records, decode_scaling
from argosy.fleet.control.rollout_status import read_rollouts
from argosy.fleet.declaration import GATEWAY_POOL, parse_fleet
from argosy.policy.autoscaling import ScalingDecision
from argosy.policy.reconciliation import ReplicaPhase
from argosy.store import FleetStore

MAX_LEASE_AGE_S = 15.0
"""Age of a lease from which its holder counts as gone."""


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pool in numbers."""

    name: str
    desired: int
    """Number of replicas, with spares."""
    ready: int
    """Number of replicas of the current generation that are ready."""
    replicas: int
    """Number of replicas that exist."""
    scaling: ScalingDecision | None = None
    """Last decision of its autoscaler; None if it has none, or has not decided yet."""
    rollout: str = ""
    """State of its rollout; empty if none runs and the declared version was not rolled back."""


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet at one moment."""

    fleet: str
    revision: int
    """Number of the revision in force; 0 if the fleet was never applied."""
    leader: str
    """Name of the controller that leads, or led until its lease ended; empty if none did or it was released."""
    epoch: int
    lease_age_s: float | None
    """Seconds since the leader last renewed its lease; None before the first controller."""
    url: str
    """Address of the first gateway on this machine; empty without one."""
    pools: Sequence[PoolStatus]
    replicas: Sequence[ReplicaRecord]

    @property
    def has_leader(self) -> bool:
        """Whether a controller leads the fleet, as far as clocks of different machines agree."""
        return bool(self.leader) and (self.lease_age_s or 0.0) < MAX_LEASE_AGE_S

    @property
    def is_as_declared(self) -> bool:
        """Whether each pool has exactly its replicas, and all are ready."""
        declared = {pool.name for pool in self.pools}
        return all(pool.desired == pool.ready == pool.replicas for pool in self.pools) and all(
            record.pool in declared for record in self.replicas
        )


def read_fleet_status(store: FleetStore, fleet: str) -> FleetStatus:
    """Return the status of a fleet. Blocks on the store.

    Raises:
        ValueError: The declaration in force is invalid for this version.
    """
    revision, lease = store.latest_revision(fleet), store.read_lease(fleet)
    encoded = store.read_records(fleet)
    records, _ = decode_records(encoded)
    scaling = decode_scaling(encoded)
    rollouts = _read_rollout_sentences(store, fleet)
    desired: dict[str, int] = {}
    url = ""
    if revision is not None:
        config = parse_fleet(revision.declaration, f"revision {revision.number}")
        for pool in config.pools:
            scaled = scaling.get(pool.name)
            if scaled is None or pool.replicas is not None or pool.autoscaling.mode != "on":
                replicas = pool.initial_replicas
            else:
                replicas = scaled.target
            desired[pool.name] = replicas + pool.spares
        if config.gateways:
            desired[GATEWAY_POOL] = config.gateways
            url = gateway_url(config)
    return FleetStatus(
        fleet=fleet,
        revision=0 if revision is None else revision.number,
        leader=lease.holder,
        epoch=lease.epoch,
        lease_age_s=store.lease_age_s(fleet),
        url=url,
        pools=[
            PoolStatus(
                name=name,
                desired=count,
                ready=sum(
                    record.pool == name
                    and record.phase is ReplicaPhase.READY
                    and revision is not None
                    and record.generation == revision.generations[name].generation
                    for record in records.values()
                ),
                replicas=sum(record.pool == name for record in records.values()),
                scaling=scaling[name].state.last_decision if name in scaling else None,
                rollout=rollouts.get(name, ""),
            )
            for name, count in desired.items()
        ],
        replicas=sorted(records.values(), key=lambda record: record.name),
    )


def _read_rollout_sentences(store: FleetStore, fleet: str) -> dict[str, str]:
    try:
        reports = read_rollouts(store, fleet)
    except msgspec.MsgspecError:
        return {}  # of a later version, whose `argosy rollout status` shows them
    return {report.pool: report.sentence for report in reports if report.concerns_operators}
