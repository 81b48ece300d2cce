"""Commands of people to rollouts: which are possible, and how one is stored for the controller."""

from __future__ import annotations

import time

import msgspec

from argosy.deployment.records.rollout_documents import append_command, roll_back_route
from argosy.deployment.records.rollout_status import RolloutReport
from argosy.policy.rollout import CommandKind, RolloutCommand
from argosy.policy.traffic import PoolRoute
from argosy.store import AuditedDecision, ConflictError, FleetStore


def send_command(
    store: FleetStore,
    fleet: str,
    report: RolloutReport,
    command: RolloutCommand,
    decision: AuditedDecision | None = None,
) -> RolloutCommand:
    """Store a command for the rollout that runs, and return it with the rollout's id. Blocks on the store.

    Args:
        store: Store of the fleet.
        fleet: Name of the fleet.
        report: The pool's rollouts.
        command: The command.
        decision: Decision to record in the audit log.

    Raises:
        ConflictError: The rollout cannot be rolled back any more.
    """
    running = report.rollouts.running
    if command.kind is CommandKind.ABORT and running is not None and not running.can_roll_back:
        raise ConflictError(
            f"abort is refused: the rollout is {running.state}: {running.reason}; `argosy history` lists earlier"
            " declarations, and `argosy rollback` puts one in force again"
        )
    rollout = "" if running is None else running.id
    addressed = msgspec.structs.replace(command, rollout=rollout)
    append_command(store, fleet, report.pool, addressed, decision)
    return addressed


def abort_route(
    store: FleetStore, fleet: str, pool: str, command: RolloutCommand
) -> PoolRoute | None:
    """Route all users to the stable version, after `abort` was stored. See `roll_back_route`."""
    cause = command.reason or f"abort by {command.by}"
    return roll_back_route(store, fleet, pool, cause, at=time.time())
