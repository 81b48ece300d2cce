"""Upgrade of a fleet: which replicas and gateways run another version of Argosy, and what replaces them.

Only processes that the controller's installation starts count: gateways, and native replicas on its machine. Pods have
the version of their image, and nodes of a Ray cluster that of their own installation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from argosy.deployment.declaration.comparison import PlannedChange, plan_upgrade
from argosy.deployment.declaration.config import FleetConfig
from argosy.deployment.declaration.engines import ARGOSY_ENGINE
from argosy.deployment.declaration.validation import GATEWAY_POOL
from argosy.deployment.records.fleet_records import ReplicaRecord
from argosy.deployment.records.rollout_status import RolloutReport
from argosy.policy.reconciliation import SERVING_PHASES
from argosy.store import FleetRevision

UNKNOWN_VERSION = "unknown"


class FleetUpgrade(NamedTuple):
    """Changes that replace the replicas and gateways that run another version than the installed one."""

    changes: Sequence[PlannedChange] = ()
    renewed: Sequence[str] = ()
    """Pools that get a new generation for the same settings."""
    lines: Sequence[str] = ()
    """Pools that are left out, one sentence each."""


def find_upgrade(
    latest: FleetRevision,
    config: FleetConfig,
    installed: str,
    *,
    kept: Collection[str],
    replicas: Iterable[ReplicaRecord],
    rollouts: Iterable[RolloutReport],
    scaled: Mapping[str, int],
) -> FleetUpgrade:
    """Return how the fleet gets to the installed version, beside the changes of its declaration.

    A rollout that has not ended compares two versions of its pool, so the replicas of both stay as they are.

    Args:
        latest: The revision in force.
        config: The new declaration.
        installed: The installed version.
        kept: Pools that have the same settings in both. The others are replaced because of their settings.
        replicas: All replicas and gateways.
        rollouts: The rollouts of all pools.
        scaled: Numbers of replicas that autoscalers have decided on, by pool.
    """
    declared = {name: each.digest for name, each in latest.generations.items()}
    rolled_out = {pool.name for pool in config.pools if pool.rollout is not None}
    unfinished = {
        each.pool
        for each in rollouts
        if each.pool in rolled_out
        and (
            each.is_running
            or (each.route is not None and each.route.stable != declared.get(each.pool))
        )
    }
    versions = {
        name: _join_versions(records)
        for name, records in _group_outdated(config, replicas, installed).items()
        if name in kept and (name in unfinished or _runs_declared(records, latest))
    }
    renewed = {name: version for name, version in versions.items() if name not in unfinished}
    return FleetUpgrade(
        tuple(plan_upgrade(config, renewed, installed, scaled)),
        tuple(renewed),
        tuple(
            f"The pool {name} keeps version {versions[name]}, because its declared version does not serve all users"
            " yet. Finish its rollout, or put the version that serves in force again, and repeat `argosy up`."
            for name in versions
            if name in unfinished
        ),
    )


def describe_versions(
    revision: FleetRevision, config: FleetConfig, replicas: Iterable[ReplicaRecord], version: str
) -> str:
    """Return which replicas and gateways run another version than the controller; empty if none does.

    Those that are being replaced are left out.
    """
    outdated = [
        record
        for records in _group_outdated(config, replicas, version).values()
        for record in records
        if _runs_declared([record], revision)
    ]
    if not outdated:
        return ""
    counts = Counter(record.pool == GATEWAY_POOL for record in outdated)
    names = [
        f"{counts[is_gateway]} {noun}{'s' if counts[is_gateway] > 1 else ''}"
        for is_gateway, noun in ((True, "gateway"), (False, "replica"))
        if counts[is_gateway]
    ]
    verb = "runs" if len(outdated) == 1 else "run"
    others = _join_versions(outdated)
    return (
        f"{' and '.join(names)} {verb} another version ({others}) than the controller ({version})"
    )


def _group_outdated(
    config: FleetConfig, replicas: Iterable[ReplicaRecord], version: str
) -> dict[str, list[ReplicaRecord]]:
    """Return the replicas and gateways, by pool, that run another version and that this installation starts.

    One that serves and states no version is of an earlier one. One that does not serve yet may state it later.
    """
    own = {GATEWAY_POOL} | {
        pool.name
        for pool in config.pools
        if pool.launcher == "local" and pool.engine == ARGOSY_ENGINE
    }
    outdated: dict[str, list[ReplicaRecord]] = {}
    for record in replicas:
        is_known = bool(record.version) or record.phase in SERVING_PHASES
        if record.pool in own and is_known and record.version != version:
            outdated.setdefault(record.pool, []).append(record)
    return outdated


def _runs_declared(records: Iterable[ReplicaRecord], revision: FleetRevision) -> bool:
    """Return whether one of the replicas has the declared generation. Others are being replaced already."""
    generations = revision.generations
    return any(
        each.pool in generations and each.generation == generations[each.pool].generation
        for each in records
    )


def _join_versions(records: Collection[ReplicaRecord]) -> str:
    return ", ".join(sorted({record.version or UNKNOWN_VERSION for record in records}))
