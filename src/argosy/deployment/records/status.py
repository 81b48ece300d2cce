"""Status of a fleet for operators: the declaration in force, and what its controller recorded.

The command line, the admin API and the console show this record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from argosy.deployment.declaration.config import (
    FleetConfig,
    PoolConfig,
    build_gateway_config,
    listen_url,
)
from argosy.deployment.declaration.validation import GATEWAY_POOL
from argosy.deployment.records.fleet_records import (
    OBSERVED_NAME,
    SCALING_PREFIX,
    ObservedRevision,
    ReplicaRecord,
    ScalingRecord,
    decode_kind,
    decode_replicas,
)
from argosy.deployment.records.revisions import parse_declaration
from argosy.deployment.records.rollout_status import ReplicaCounts, RolloutReport, read_rollouts
from argosy.deployment.records.upgrade import describe_versions
from argosy.policy.autoscaling import ScalingDecision
from argosy.policy.reconciliation import (
    SERVING_PHASES,
    PoolCounts,
    Problem,
    ProblemKind,
    ReplicaPhase,
    build_problem,
    order_problems,
)
from argosy.policy.rollout import ROLLBACK_STATES, RollbackCause, RolloutState
from argosy.store import FleetRevision, FleetStore, PoolGeneration

MAX_LEASE_AGE_S = 15.0
"""Age of a lease from which its holder counts as gone."""
STALE_LEASE_S = 3.0
"""Age of a lease from which the store is suspected. By default a leader renews it each 1.25 s."""
_STARTING = frozenset(
    {
        ReplicaPhase.PENDING,
        ReplicaPhase.PROVISIONING,
        ReplicaPhase.LOADING,
        ReplicaPhase.WARMING,
    }
)


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A declared pool in numbers."""

    pool: str
    model: str
    desired: int
    """Replicas that there shall be, with spares."""
    existing: int
    """Replicas that exist, with spares."""
    ready: int
    """Replicas of the current generation that are ready or sleep, with spares. With rollouts, those of the version that
    serves by default."""
    serving: int
    """Replicas of any generation that are ready or sleep, with spares."""
    starting: int
    """Replicas of any generation that start, or wait for it, and have no problem."""
    spares: int
    minimum: int
    """Fewest replicas that the declaration allows to serve, without spares."""
    maximum: int | None
    declared: int | None
    """Number that the declaration or an operator set, without spares; None if the autoscaler decides."""
    autoscaling: str
    """Mode of the autoscaler: `off`, `advisory` or `on`."""
    decision: ScalingDecision | None
    """Last decision of its autoscaler; None if it has none, or has not decided yet."""
    rollout: RolloutReport | None
    """The rollout that runs, or the last one; None before the first, or if the declaration has none."""
    is_as_declared: bool
    """Whether it has exactly its replicas, all are ready, no other version serves, and no rollout runs."""


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet at one moment."""

    fleet: str
    revision: int
    """Number of the revision in force; 0 if the fleet was never applied."""
    is_as_declared: bool
    """Whether all pools are as declared, as the latest leader found them for this revision."""
    is_read_only: bool
    """Whether nothing can be changed, as in the fleet of `argosy serve`, whose command line declares it."""
    has_leader: bool
    """Whether a controller leads the fleet, as far as clocks of different machines agree."""
    leader: str
    """Name of the controller that leads, or led until its lease ended; empty if none did or it was released."""
    epoch: int
    """Number of controllers that have led."""
    version: str | None
    """Version of Argosy that the latest leader runs; None before the first one, and empty for one that records none."""
    lease_age_s: float | None
    """Seconds since the leader last renewed its lease; None before the first controller."""
    url: str
    """Address of the first gateway that the controller runs; empty without one."""
    gateways: ReplicaCounts | None
    """None if the controller runs no gateways."""
    problems: Sequence[Problem]
    """Problems, most severe first, and causes before the symptoms that they explain."""
    pools: Sequence[PoolStatus]
    replicas: Sequence[ReplicaRecord]
    """Replicas and gateways that exist or shall exist, by name."""


def read_fleet_status(store: FleetStore, fleet: str, *, is_embedded: bool = False) -> FleetStatus:
    """Return the status of a fleet. Blocks on the store.

    `is_embedded` says whether its controller runs in this process, and the command line that started it declares it.

    Raises:
        ValueError: The declaration in force is invalid for this version.
    """
    revision, lease = store.latest_revision(fleet), store.read_lease(fleet)
    encoded = store.read_records(fleet)
    replicas = sorted(decode_replicas(encoded).values(), key=lambda record: record.name)
    observed = decode_kind(encoded, OBSERVED_NAME, ObservedRevision).get("")
    config = None if revision is None else parse_declaration(revision)
    pools: list[PoolStatus] = []
    gateways: ReplicaCounts | None = None
    if revision is not None and config is not None:
        scaling = decode_kind(encoded, SCALING_PREFIX, ScalingRecord)
        pools = _describe_pools(store, fleet, revision, config, replicas, scaling)
        if config.gateways:
            generation = revision.generations[GATEWAY_POOL]
            gateways = _count(replicas, GATEWAY_POOL, generation, config.gateways)
    number = 0 if revision is None else revision.number
    lease_age_s = store.lease_age_s(fleet)
    is_observed = observed is None or (observed.epoch, observed.revision) == (lease.epoch, number)
    declared = {pool.pool for pool in pools} | ({GATEWAY_POOL} if gateways else set[str]())
    has_leader = is_embedded or (bool(lease.holder) and (lease_age_s or 0.0) < MAX_LEASE_AGE_S)
    problems = [] if config is None else _find_problems(pools, replicas)
    if revision is not None and config is not None and observed is not None and observed.version:
        others = describe_versions(revision, config, replicas, observed.version)
        problems += [build_problem(ProblemKind.OTHER_VERSION, others)] if others else []
    if pools or gateways:
        store_problem = find_store_problem(store, fleet)
        problems += [build_problem(ProblemKind.STORE, store_problem)] if store_problem else []
        problems += [] if has_leader else [build_problem(ProblemKind.CONTROLLER, fleet)]
    counts = {pool.pool: count_replicas(pool) for pool in pools}
    if gateways is not None:
        counts[GATEWAY_POOL] = count_gateways(replicas, gateways.desired)
    return FleetStatus(
        fleet=fleet,
        revision=number,
        is_as_declared=is_observed
        and all(pool.is_as_declared for pool in pools)
        and (gateways is None or gateways.is_complete)
        and all(record.pool in declared for record in replicas),
        is_read_only=is_embedded,
        has_leader=has_leader,
        leader=lease.holder,
        epoch=lease.epoch,
        version=None if observed is None else observed.version,
        lease_age_s=lease_age_s,
        url="" if config is None or gateways is None else listen_url(build_gateway_config(config)),
        gateways=gateways,
        problems=order_problems(problems, counts),
        pools=pools,
        replicas=replicas,
    )


def find_store_problem(store: FleetStore, fleet: str) -> str:
    """Return why the store cannot be written; empty if it can. Blocks on the store.

    The writes of a leader that is not silent prove it. Otherwise one is tried, which changes nothing.
    """
    lease_age_s = store.lease_age_s(fleet)
    if lease_age_s is None or lease_age_s <= STALE_LEASE_S:
        return ""
    return store.find_write_problem()


def count_replicas(pool: PoolStatus) -> PoolCounts:
    """Return the replicas of a pool in numbers, of all versions together."""
    return PoolCounts(
        desired=pool.desired,
        minimum=pool.minimum,
        serving=pool.serving,
        starting=pool.starting,
    )


def count_gateways(replicas: Sequence[ReplicaRecord], desired: int) -> PoolCounts:
    """Return the gateways that the controller runs in numbers, of all versions together. One suffices to serve."""
    gateways = [record for record in replicas if record.pool == GATEWAY_POOL]
    serving, starting = _count_phases(gateways)
    return PoolCounts(
        desired=desired, minimum=1, serving=serving, starting=starting, noun="gateway"
    )


def _count_phases(replicas: Sequence[ReplicaRecord]) -> tuple[int, int]:
    """Return how many replicas serve, and how many start without a problem."""
    serving = sum(record.phase in SERVING_PHASES for record in replicas)
    starting = sum(record.phase in _STARTING and record.problem is None for record in replicas)
    return serving, starting


def _find_problems(pools: Sequence[PoolStatus], replicas: Sequence[ReplicaRecord]) -> list[Problem]:
    """Return the problems of replicas and rollouts, in no order."""
    problems = [
        build_problem(record.problem, record.reason, pool=record.pool, replica=record.name)
        for record in replicas
        if record.problem is not None
    ]
    for pool in pools:
        found = None if pool.rollout is None else _find_rollout_problem(pool.rollout)
        if found is not None:
            kind, clause = found
            problems.append(build_problem(kind, f"{pool.pool} {clause}", pool=pool.pool))
    return problems


def _find_rollout_problem(rollout: RolloutReport) -> tuple[ProblemKind, str] | None:
    """Return the problem of a rollout for a person, with a clause whose subject is the rollout."""
    current = rollout.rollouts.current
    if current is None:
        return None
    is_by_person = current.cause is RollbackCause.COMMAND
    if current.active_state in ROLLBACK_STATES:
        kind = ProblemKind.ROLLOUT_ABORTED if is_by_person else ProblemKind.ROLLING_BACK
        verb = "was aborted" if is_by_person else "is rolled back"
        return kind, f"{verb}: {current.reason}"
    if rollout.can_retry:
        verdict = next(
            (each for each in rollout.rollouts.verdicts if each.digest == current.candidate), None
        )
        reason = current.reason if verdict is None else verdict.reason
        if verdict is not None and verdict.cause is RollbackCause.COMMAND:
            return ProblemKind.ROLLOUT_ABORTED, f"was aborted: {reason}"
        return ProblemKind.ROLLED_BACK, f"was rolled back: {reason}"
    if current.state in {RolloutState.PAUSED, RolloutState.INCONCLUSIVE}:
        return ProblemKind.ROLLOUT_WAITS, f"is {rollout.summary}"
    if rollout.needs_promotion:
        return ProblemKind.ROLLOUT_WAITS, "has enough evidence"
    return None


def _describe_pools(
    store: FleetStore,
    fleet: str,
    revision: FleetRevision,
    config: FleetConfig,
    replicas: Sequence[ReplicaRecord],
    scaling: Mapping[str, ScalingRecord],
) -> list[PoolStatus]:
    rollouts = {}
    if any(pool.rollout is not None for pool in config.pools):
        rollouts = _read_known_rollouts(store, fleet)
    known = [revision, *(store.list_revisions(fleet) if rollouts else ())]
    return [
        _describe_pool(
            pool,
            [each.generations[pool.name] for each in known if pool.name in each.generations],
            replicas,
            scaling.get(pool.name),
            None if pool.rollout is None else rollouts.get(pool.name),
        )
        for pool in config.pools
    ]


def _describe_pool(
    pool: PoolConfig,
    generations: Sequence[PoolGeneration],
    replicas: Sequence[ReplicaRecord],
    scaling: ScalingRecord | None,
    rollout: RolloutReport | None,
) -> PoolStatus:
    """Return the status of a pool.

    `generations` are its generation in the revision in force, then those in the latest revisions.
    """
    declared = serving = generations[0]
    if rollout is not None and rollout.route is not None:
        stable = rollout.route.stable
        serving = next((each for each in generations if each.digest == stable), declared)
    is_scaled = pool.autoscaling.mode == "on"
    serves = pool.initial_replicas
    if scaling is not None and pool.replicas is None and is_scaled:
        serves = scaling.target
    counts = _count(replicas, pool.name, serving, serves + pool.count_spares(serves))
    is_running = rollout is not None and rollout.is_running
    serving_count, starting = _count_phases([each for each in replicas if each.pool == pool.name])
    return PoolStatus(
        pool=pool.name,
        model=pool.model,
        desired=counts.desired,
        existing=counts.existing,
        ready=counts.ready,
        serving=serving_count,
        starting=starting,
        spares=pool.spares,
        minimum=pool.min_replicas if pool.min_replicas is not None else pool.initial_replicas,
        maximum=pool.max_replicas,
        declared=pool.replicas if is_scaled else pool.initial_replicas,
        autoscaling=pool.autoscaling.mode,
        decision=None if scaling is None else scaling.state.last_decision,
        rollout=None if rollout is None or rollout.rollouts.current is None else rollout,
        is_as_declared=counts.is_complete and serving == declared and not is_running,
    )


def _count(
    replicas: Sequence[ReplicaRecord], pool: str, serving: PoolGeneration, desired: int
) -> ReplicaCounts:
    existing = [record for record in replicas if record.pool == pool]
    ready = sum(
        record.phase in SERVING_PHASES and record.generation == serving.generation
        for record in existing
    )
    return ReplicaCounts(desired=desired, existing=len(existing), ready=ready)


def _read_known_rollouts(store: FleetStore, fleet: str) -> dict[str, RolloutReport]:
    """Return the rollouts by pool, or nothing if a later version of Argosy wrote them. Blocks on the store."""
    try:
        return {each.pool: each for each in read_rollouts(store, fleet)}
    except msgspec.MsgspecError:
        return {}  # of a later version, whose `argosy rollout status` shows them
