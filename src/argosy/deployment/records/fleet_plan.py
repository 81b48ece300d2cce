"""Plan of a change of a fleet: the differences, what they disturb, and both as text."""

from __future__ import annotations

import msgspec

from argosy.deployment.declaration.comparison import ChangeEffect, PlannedChange, compare_fleets
from argosy.deployment.declaration.config import FleetConfig
from argosy.deployment.records.fleet_records import decode_records
from argosy.store import FleetStore

_SIGNS = {"add": "+", "change": "~", "remove": "-"}


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that a declaration would make, and what they would disturb."""

    changes: tuple[PlannedChange, ...]
    affected_replicas: int
    """Number of replicas that stop or are replaced."""
    running_requests: int
    """Number of requests that these replicas run."""
    cached_tokens: int
    """Number of tokens of prompts in their KV caches."""

    def describe(self) -> list[str]:
        """Return the plan as lines of text."""
        if not self.changes:
            return ["Nothing changes."]
        lines = [describe_change(change) for change in self.changes]
        lines += dict.fromkeys(each for change in self.changes for each in change.rollout)
        if self.affected_replicas:
            requests = "request" if self.running_requests == 1 else "requests"
            tokens = "token" if self.cached_tokens == 1 else "tokens"
            lines.append(
                f"Moves up to {self.running_requests} running {requests}, and gives up {self.cached_tokens:,} cached "
                f"prompt {tokens}."
            )
        return lines


def plan_declaration(
    store: FleetStore, fleet: str, old: FleetConfig | None, new: FleetConfig
) -> FleetPlan:
    """Return what a declaration would change. Blocks on the store, and changes nothing.

    Args:
        store: Store of the fleet, with the records of its replicas.
        fleet: Name of the fleet.
        old: The declaration in force; None if the fleet was never applied.
        new: The declaration to apply, which is valid.
    """
    changes = compare_fleets(old, new)
    moved = {pool for change in changes if _stops_replicas(change) for pool in change.pools}
    replicas, _ = decode_records(store.read_records(fleet))
    affected = [record for record in replicas.values() if record.pool in moved]
    return FleetPlan(
        changes=changes,
        affected_replicas=len(affected),
        running_requests=sum(record.running for record in affected),
        cached_tokens=sum(record.cached_tokens for record in affected),
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
