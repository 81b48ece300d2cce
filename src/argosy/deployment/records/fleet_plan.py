"""Changes of a fleet: the plan of one, what it disturbs, and those of the revisions in force until now."""

from __future__ import annotations

import msgspec

from argosy.deployment.declaration.comparison import ChangeEffect, PlannedChange, compare_fleets
from argosy.deployment.declaration.config import FleetConfig
from argosy.deployment.records.fleet_records import decode_records
from argosy.deployment.records.revisions import parse_declaration
from argosy.store import FleetRevision, FleetStore

_SIGNS = {"add": "+", "change": "~", "remove": "-"}


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
    lines: tuple[str, ...]
    """The plan as `argosy plan` prints it."""


def plan_declaration(
    store: FleetStore, fleet: str, latest: FleetRevision | None, new: FleetConfig
) -> FleetPlan:
    """Return what a declaration would change. Blocks on the store, and changes nothing.

    Args:
        store: Store of the fleet, with the records of its replicas.
        fleet: Name of the fleet.
        latest: The revision in force; None if the fleet was never applied.
        new: The declaration to apply, which is valid.

    Raises:
        ValueError: The declaration in force is invalid for this version.
    """
    changes = compare_fleets(None if latest is None else parse_declaration(latest), new)
    moved = {pool for change in changes if _stops_replicas(change) for pool in change.pools}
    replicas, _ = decode_records(store.read_records(fleet))
    affected = [record for record in replicas.values() if record.pool in moved]
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
    return FleetPlan(
        revision=0 if latest is None else latest.number,
        changes=changes,
        affected_replicas=len(affected),
        running_requests=running_requests,
        cached_tokens=cached_tokens,
        lines=tuple(lines),
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
