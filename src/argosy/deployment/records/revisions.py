"""Revisions of a fleet: how declarations are stored and read, and the changes from one to the next."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from argosy.deployment.declaration.capacity import MachineCapacity, check_capacity
from argosy.deployment.declaration.comparison import (
    ChangeEffect,
    PlannedChange,
    compare_fleets,
    count_serving,
)
from argosy.deployment.declaration.config import (
    FleetConfig,
    build_gateway_config,
    has_address_conflict,
)
from argosy.deployment.declaration.documents import dump_fleet
from argosy.deployment.declaration.loading import parse_fleet
from argosy.deployment.declaration.refusals import describe_refusals
from argosy.deployment.declaration.replica_command import replica_digest
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
from argosy.deployment.records.rollout_status import read_rollouts
from argosy.deployment.records.upgrade import FleetUpgrade, find_upgrade
from argosy.deployment.settings.flag_config import describe_unread_flag, find_unread_flags
from argosy.deployment.settings.gateway_config import REQUEST_SETTINGS
from argosy.deployment.settings.objective_config import ObjectivesConfig
from argosy.store import FleetRevision, FleetStore

FleetAction = Literal["fleet.apply", "fleet.down", "fleet.rollback", "pool.scale"]
"""Name of a change of a declaration in the audit log."""
MAX_AUDITED_CHANGES = 50
"""Number of changed settings that the audit log names. The history has all of them."""
MAX_KNOWN_REVISIONS = 200
"""Number of revisions in which the settings of replicas of earlier generations are looked up first."""


_PUBLISHED_SETTINGS: dict[str, Any] = {
    "models": [],
    **{name: [] for name in REQUEST_SETTINGS},
    "objectives": ObjectivesConfig(),
    "pools_file": None,
    "handover": None,
}
"""Settings of a gateway that the controller publishes or assigns. Their change needs no restart."""
_SIGNS = {"add": "+", "change": "~", "remove": "-"}


def pool_digests(config: FleetConfig) -> dict[str, str]:
    """Return the digest of the replica settings of each pool, and of the gateways' settings. See `FleetStore.apply`."""
    digests = {pool.name: replica_digest(config, pool) for pool in config.pools}
    if config.gateways:
        settings = msgspec.structs.replace(build_gateway_config(config), **_PUBLISHED_SETTINGS)
        encoded = msgspec.json.encode(msgspec.to_builtins(settings), order="sorted")
        digests[GATEWAY_POOL] = hashlib.sha256(encoded).hexdigest()
    return digests


def apply_declaration(
    store: FleetStore,
    fleet: str,
    config: FleetConfig,
    latest: FleetRevision | None,
    *,
    author: str,
    reason: str,
    action: FleetAction = "fleet.apply",
    pool: str = "",
    rollback_of: int | None = None,
    renewed: Sequence[str] = (),
) -> FleetRevision:
    """Add a revision, unless another one was added after `latest`, which is None for a new fleet. Blocks on the store.

    The declaration is valid. Events and audit log record the author, reason and changes. The pool is the one that
    `pool.scale` is about. The number `rollback_of` is that of the revision whose declaration this one repeats. All
    replicas of `renewed` pools are replaced although their settings stay, see `FleetPlan`.

    Raises:
        ConflictError: Another revision is the latest.
        ValueError: The declaration of `latest` is invalid for this version.
    """
    old = None if latest is None else parse_declaration(latest)
    changes = compare_fleets(old, config)
    details: dict[str, Any] = {
        "changes": [change.path for change in changes[:MAX_AUDITED_CHANGES]],
        "count": len(changes),
    }
    if rollback_of is not None:
        details["revision"] = rollback_of
    if renewed:
        details["renewed"] = list(renewed)
    if pool:
        found = [None if each is None else each.find_pool(pool) for each in (old, config)]
        details["replicas"] = [None if each is None else each.replicas for each in found]
    return store.apply(
        fleet,
        dump_fleet(config, "json").encode(),
        pool_digests(config),
        author=author,
        reason=reason,
        rollback_of=rollback_of,
        after=0 if latest is None else latest.number,
        action=action,
        pool=pool,
        details=details,
        renewed=renewed,
    )


def parse_declaration(revision: FleetRevision) -> FleetConfig:
    """Return the declaration of a revision.

    Raises:
        ValueError: It is invalid for this version.
    """
    return parse_fleet(revision.declaration, f"revision {revision.number}")


def list_known_revisions(
    store: FleetStore, fleet: str, replicas: Iterable[ReplicaRecord]
) -> Sequence[FleetRevision]:
    """Return the latest revisions, newest first, among which are those of all replicas. Blocks on the store."""
    known = store.list_revisions(fleet, MAX_KNOWN_REVISIONS)
    if known and any(
        find_newest_revision(known, each.pool, each.generation) is None for each in replicas
    ):
        return store.list_revisions(fleet, known[0].number)
    return known


def find_newest_revision(
    revisions: Iterable[FleetRevision], pool: str, generation: int
) -> FleetRevision | None:
    """Return the first revision that has a generation of a pool; `revisions` are sorted from new to old."""
    for revision in revisions:
        found = revision.generations.get(pool)
        if found is not None and found.generation == generation:
            return revision
    return None


def set_replicas(config: FleetConfig, pool: str, replicas: int | None) -> FleetConfig:
    """Return a declaration with another number of replicas of a pool. It pauses the pool's autoscaler.

    With None for `replicas` the autoscaler decides again.

    Raises:
        ValueError: There is no such pool, its limits do not allow the number, or it has no autoscaler.
    """
    declared = config.find_pool(pool)
    if declared is None:
        known = ", ".join(pool.name for pool in config.pools) or "none"
        raise ValueError(f"there is no pool {pool!r}; use one of: {known}")
    if replicas is None:
        if declared.autoscaling.mode == "off":
            raise ValueError(
                f"the pool {pool} has no autoscaler; set `autoscaling` of the pool, or give a number"
            )
    elif declared.min_replicas is not None and replicas < declared.min_replicas:
        raise ValueError(
            f"min_replicas of the pool {pool} is {declared.min_replicas}; change it first"
        )
    elif declared.max_replicas is not None and replicas > declared.max_replicas:
        raise ValueError(
            f"max_replicas of the pool {pool} is {declared.max_replicas}; change it first"
        )
    scaled = msgspec.structs.replace(declared, replicas=replicas)
    pools = tuple(scaled if other.name == pool else other for other in config.pools)
    return msgspec.structs.replace(config, pools=pools)


def stop_everything(config: FleetConfig) -> FleetConfig:
    """Return a declaration of the same fleet without pools and gateways."""
    return msgspec.structs.replace(config, pools=(), gateways=0)


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that a declaration would make, and what they would disturb."""

    revision: int
    """Number of the revision in force, with which it was compared; 0 for none."""
    changes: tuple[PlannedChange, ...]
    affected_replicas: int
    """Number of replicas that stop or are replaced."""
    running_requests: int
    """Number of requests that these replicas run."""
    cached_tokens: int
    """Number of tokens of prompts in their KV caches."""
    risks: tuple[str, ...]
    """Sentences that a person confirms: pools that leave, and those that get more than twice their replicas."""
    refused: tuple[str, ...] = ()
    """Which requests are refused or cut, and for how long, one sentence each. No others are lost."""
    renewed: tuple[str, ...] = ()
    """Pools, and the gateways, whose processes are replaced by those of the installed version."""
    lines: tuple[str, ...]
    """The plan as `argosy plan` prints it."""


def plan_declaration(
    store: FleetStore,
    fleet: str,
    latest: FleetRevision | None,
    new: FleetConfig,
    machine: MachineCapacity | None = None,
    installed: str | None = None,
) -> FleetPlan:
    """Return what a declaration would change. Blocks on the store, and changes nothing.

    The new declaration is valid. `latest` is None if the fleet was never applied. `machine` is the capacity of the
    controller's machine, if the caller runs on it. By default it is the recorded one. `installed` is the version of
    Argosy there, if what runs another one shall be replaced.

    Raises:
        ValueError: The declaration in force is invalid for this version, or the new one does not fit on the machine.
    """
    old = None if latest is None else parse_declaration(latest)
    records = store.read_records(fleet)
    check_fit(records, old, new, machine)
    decided = decode_kind(records, SCALING_PREFIX, ScalingRecord)
    scaled = {name: record.target for name, record in decided.items()}
    replicas = decode_replicas(records).values()
    upgrade = FleetUpgrade()
    if latest is not None and installed is not None:
        upgrade = find_upgrade(
            latest,
            new,
            installed,
            kept=[
                name
                for name, digest in pool_digests(new).items()
                if name in latest.generations and latest.generations[name].digest == digest
            ],
            replicas=replicas,
            rollouts=read_rollouts(store, fleet),
            scaled=scaled,
        )
    changes = (*compare_fleets(old, new, scaled), *upgrade.changes)
    moved = {pool for change in changes if _stops_replicas(change) for pool in change.pools}
    start_times = [
        record.ready_at - record.started_at
        for record in replicas
        if record.pool == GATEWAY_POOL and record.ready_at is not None
    ]
    refused = (
        () if old is None else describe_refusals(old, new, changes, max(start_times, default=None))
    )
    affected = [record for record in replicas if record.pool in moved]
    running_requests = sum(record.running for record in affected)
    cached_tokens = sum(record.cached_tokens for record in affected)
    lines = [describe_change(change) for change in changes] or ["Nothing changes."]
    lines += dict.fromkeys(each for change in changes for each in change.rollout)
    if affected:
        requests = "request" if running_requests == 1 else "requests"
        tokens = "token" if cached_tokens == 1 else "tokens"
        lines.append(
            f"Moves up to {running_requests} running {requests}, and gives up {cached_tokens:,} cached prompt {tokens}."
        )
    restarts = any(change.effect == ChangeEffect.GATEWAY_RESTART for change in changes)
    if restarts and old is not None and not has_address_conflict(old, new):
        lines.append("Each new gateway listens before the old one leaves.")
    unread = find_unread_flags(new.feature_flags, new.conditions)
    lines += (*map(describe_unread_flag, unread), *upgrade.lines, *refused)
    return FleetPlan(
        revision=0 if latest is None else latest.number,
        changes=changes,
        affected_replicas=len(affected),
        running_requests=running_requests,
        cached_tokens=cached_tokens,
        risks=() if old is None else tuple(_find_risks(fleet, old, new, scaled)),
        refused=refused,
        renewed=tuple(upgrade.renewed),
        lines=tuple(lines),
    )


def check_fit(
    records: Mapping[str, bytes],
    old: FleetConfig | None,
    new: FleetConfig,
    machine: MachineCapacity | None = None,
) -> None:
    """Check that a new declaration fits on the controller's machine, as far as its capacity is known.

    Raises:
        ValueError: It does not fit. The message says what would.
    """
    if machine is None:
        observed = decode_kind(records, OBSERVED_NAME, ObservedRevision).get("")
        machine = None if observed is None else observed.machine
    if machine is not None:
        check_capacity(old, new, machine)


def _find_risks(
    fleet: str, old: FleetConfig, new: FleetConfig, scaled: Mapping[str, int]
) -> Iterator[str]:
    removed = [pool.name for pool in old.pools if new.find_pool(pool.name) is None]
    if removed:
        yield (
            f"This removes from the fleet {fleet}: {', '.join(removed)}. If the file is of another fleet, give it"
            " another name by `fleet`."
        )
    for pool in old.pools:
        changed, present = new.find_pool(pool.name), count_serving(pool, scaled)
        if changed is None or changed.is_autoscaled:
            continue
        if changed.initial_replicas > 2 * max(1, present):
            yield (
                f"The pool {pool.name} gets {changed.initial_replicas} replicas, more than twice its {present}."
            )


class RevisionChanges(msgspec.Struct, frozen=True, kw_only=True):
    """A declaration that was applied, and how it differs from the one before."""

    revision: int
    applied_at: float
    author: str
    reason: str
    rollback_of: int | None
    """Number of the revision whose declaration this one repeats."""
    changes: tuple[PlannedChange, ...]
    problem: str
    """Why the changes cannot be shown; empty if they can."""


def list_revision_changes(
    store: FleetStore, fleet: str, limit: int, before: int | None = None
) -> list[RevisionChanges]:
    """Return the latest revisions, or those with numbers below `before`, newest first. Blocks on the store."""
    revisions = store.list_revisions(fleet, limit + 1, before)
    earlier: list[FleetRevision | None] = [*revisions[1:], None]
    pairs = list(zip(revisions, earlier, strict=True))[:limit]
    return [_describe_revision(revision, previous) for revision, previous in pairs]


def _describe_revision(revision: FleetRevision, previous: FleetRevision | None) -> RevisionChanges:
    changes: tuple[PlannedChange, ...] = ()
    problem = ""
    try:
        config = parse_declaration(revision)
        changes = compare_fleets(None if previous is None else parse_declaration(previous), config)
    except ValueError as error:
        problem = str(error)
    return RevisionChanges(
        revision=revision.number,
        applied_at=revision.applied_at,
        author=revision.author,
        reason=revision.reason,
        rollback_of=revision.rollback_of,
        changes=changes,
        problem=problem,
    )


def describe_change(change: PlannedChange) -> str:
    """Return a change as one line, such as `~ pools[chat].replicas: 2 -> 3   (1 replica started)`."""
    values = {
        "add": _show(change.new),
        "change": f"{_show(change.old)} -> {_show(change.new)}",
        "remove": _show(change.old),
    }
    effect = "" if change.effect == ChangeEffect.NONE else str(change.effect)
    if change.count:
        effect = f"{change.count} {effect if change.count > 1 else effect.replace('s ', ' ', 1)}"
    if effect.endswith("replaced"):
        effect += f", {change.at_once} at a time"
    line = f"{_SIGNS[change.action]} {change.path}: {values[change.action]}"
    return f"{line}   ({effect})" if effect else line


def _show(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _stops_replicas(change: PlannedChange) -> bool:
    return change.effect in {ChangeEffect.REPLICAS_REPLACED, ChangeEffect.REPLICAS_STOPPED}
