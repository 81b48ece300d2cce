"""Status of a fleet for operators: the declaration in force, and what its controller recorded."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from argosy.deployment.declaration.loading import parse_fleet
from argosy.deployment.declaration.validation import GATEWAY_POOL
from argosy.deployment.records.fleet_records import (
    ReplicaRecord,
    decode_observed,
    decode_records,
    decode_scaling,
)
from argosy.deployment.records.revisions import gateway_url
from argosy.deployment.records.rollout_status import RolloutReport, read_rollouts
from argosy.policy.autoscaling import ScalingDecision
from argosy.policy.reconciliation import ReplicaPhase
from argosy.store import FleetRevision, FleetStore, PoolGeneration

MAX_LEASE_AGE_S = 15.0
"""Age of a lease from which its holder counts as gone."""


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pool in numbers."""

    name: str
    desired: int
    """Number of replicas, with spares."""
    ready: int
    """Number of replicas of the current generation that are ready. With rollouts, those of the version that serves by
    default."""
    replicas: int
    """Number of replicas that exist."""
    scaling: ScalingDecision | None = None
    """Last decision of its autoscaler; None if it has none, or has not decided yet."""
    rollout: str = ""
    """State of its rollout; empty if none runs and the declared version was not rolled back."""
    serves_declared: bool = True
    """Whether no other version than the declared one serves, and no rollout runs."""
    is_rejected: bool = False
    """Whether the declared version was rolled back, so that it is not tried again by itself."""


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
    is_observed: bool
    """Whether the latest leader has carried out the revision in force, and the replicas are as it found them."""

    @property
    def has_leader(self) -> bool:
        """Whether a controller leads the fleet, as far as clocks of different machines agree."""
        return bool(self.leader) and (self.lease_age_s or 0.0) < MAX_LEASE_AGE_S

    @property
    def is_as_declared(self) -> bool:
        """Whether each pool has exactly its replicas, and all are ready, as the latest leader found them."""
        declared = {pool.name for pool in self.pools}
        return (
            self.is_observed
            and all(
                pool.desired == pool.ready == pool.replicas and pool.serves_declared
                for pool in self.pools
            )
            and all(record.pool in declared for record in self.replicas)
        )


def read_fleet_status(store: FleetStore, fleet: str) -> FleetStatus:
    """Return the status of a fleet. Blocks on the store.

    Raises:
        ValueError: The declaration in force is invalid for this version.
    """
    revision, lease = store.latest_revision(fleet), store.read_lease(fleet)
    encoded = store.read_records(fleet)
    records, _ = decode_records(encoded)
    scaling, observed = decode_scaling(encoded), decode_observed(encoded)
    number = 0 if revision is None else revision.number
    reports: dict[str, RolloutReport] = {}
    known: Sequence[FleetRevision] = []
    desired: dict[str, int] = {}
    url = ""
    if revision is not None:
        config = parse_fleet(revision.declaration, f"revision {revision.number}")
        rolled_out = {pool.name for pool in config.pools if pool.rollout is not None}
        reports = {
            pool: report
            for pool, report in read_known_rollouts(store, fleet).items()
            if pool in rolled_out
        }
        known = [revision, *(store.list_revisions(fleet) if reports else ())]
        for pool in config.pools:
            scaled = scaling.get(pool.name)
            if scaled is None or pool.replicas is not None or pool.autoscaling.mode != "on":
                replicas = pool.initial_replicas
            else:
                replicas = scaled.target
            desired[pool.name] = replicas + pool.count_spares(replicas)
        if config.gateways:
            desired[GATEWAY_POOL] = config.gateways
            url = gateway_url(config)
    return FleetStatus(
        fleet=fleet,
        revision=number,
        leader=lease.holder,
        epoch=lease.epoch,
        lease_age_s=store.lease_age_s(fleet),
        url=url,
        pools=[
            _describe_pool(
                name,
                count,
                [record for record in records.values() if record.pool == name],
                [each.generations[name] for each in known if name in each.generations],
                None if name not in scaling else scaling[name].state.last_decision,
                reports.get(name),
            )
            for name, count in desired.items()
        ],
        replicas=sorted(records.values(), key=lambda record: record.name),
        is_observed=observed is None
        or (observed.epoch, observed.revision) == (lease.epoch, number),
    )


def _describe_pool(
    name: str,
    desired: int,
    records: Sequence[ReplicaRecord],
    generations: Sequence[PoolGeneration],
    scaling: ScalingDecision | None,
    rollout: RolloutReport | None,
) -> PoolStatus:
    """Return the status of a pool.

    Args:
        name: Name of the pool.
        desired: Number of its replicas, with spares.
        records: Its replicas.
        generations: Its generation in the revision in force, then those in the latest revisions.
        scaling: Last decision of its autoscaler.
        rollout: Its rollouts; None without.
    """
    declared = serving = generations[0]
    if rollout is not None and rollout.route is not None:
        stable = rollout.route.stable
        serving = next((each for each in generations if each.digest == stable), declared)
    status = PoolStatus(
        name=name,
        desired=desired,
        ready=sum(
            record.phase is ReplicaPhase.READY and record.generation == serving.generation
            for record in records
        ),
        replicas=len(records),
        scaling=scaling,
        serves_declared=serving == declared,
    )
    if rollout is None:
        return status
    is_running = rollout.rollouts.running is not None
    is_rejected = rollout.rollouts.verdict_on(declared.digest) is not None
    return msgspec.structs.replace(
        status,
        rollout=rollout.sentence if is_running or is_rejected else "",
        serves_declared=status.serves_declared and not is_running,
        is_rejected=is_rejected and not is_running,
    )


def read_known_rollouts(store: FleetStore, fleet: str) -> dict[str, RolloutReport]:
    """Return the rollouts by pool, or nothing if a later version of Argosy wrote them. Blocks on the store."""
    try:
        return {each.pool: each for each in read_rollouts(store, fleet)}
    except msgspec.MsgspecError:
        return {}  # of a later version, whose `argosy rollout status` shows them
