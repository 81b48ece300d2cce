"""Revisions of a fleet: puts a declaration in force, reads that of one, and finds those of running replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from argosy.fleet.control.declared_fleet import find_newest_revision, pool_digests
from argosy.fleet.control.fleet_records import ReplicaRecord
from argosy.fleet.declaration import FleetConfig, dump_fleet, parse_fleet
from argosy.store import AuditedDecision, FleetRevision, FleetStore

MAX_KNOWN_REVISIONS = 200
"""Number of revisions in which the settings of replicas of earlier generations are looked up first."""


def apply_declaration(
    store: FleetStore,
    fleet: str,
    config: FleetConfig,
    *,
    author: str,
    reason: str,
    after: int | None,
    rollback_of: int | None = None,
    decision: AuditedDecision | None = None,
) -> FleetRevision:
    """Add a revision, unless another one was added after the revision `after`. Blocks on the store.

    Args:
        store: Store of the fleet.
        fleet: Name of the fleet.
        config: The declaration, which is valid.
        author: Who applies it.
        reason: Why.
        after: Number of the revision that the author has seen as the latest; 0 for none, None to replace any.
        rollback_of: Number of the revision whose declaration this one repeats.
        decision: Decision to record in the audit log.

    Raises:
        ConflictError: The latest revision is not `after`.
    """
    return store.apply(
        fleet,
        dump_fleet(config, "json").encode(),
        pool_digests(config),
        author=author,
        reason=reason,
        rollback_of=rollback_of,
        after=after,
        decision=decision,
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
