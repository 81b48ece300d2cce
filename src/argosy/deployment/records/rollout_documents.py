"""Stored documents of rollouts, which any process may change by compare-and-set, with or without a controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from argosy.policy.rollout import PoolRollouts, RolloutCommand
from argosy.policy.traffic import PoolRoute
from argosy.store import AuditedDecision, ConflictError, FleetDocument, FleetStore

ROUTE_PREFIX = "route/"
ROLLOUTS_PREFIX = "rollout/"
COMMANDS_PREFIX = "rollout-commands/"
MAX_COMMANDS = 100
"""Pending commands of a pool that are kept while no controller runs."""
MAX_ATTEMPTS = 20
"""Attempts to replace a document that other processes change at the same time."""

T = TypeVar("T")
D = TypeVar("D")


class RolloutDocuments(msgspec.Struct, frozen=True, kw_only=True):
    """Documents of one pool."""

    pool: str
    route: PoolRoute | None = None
    """None before the first deployment of a pool with rollouts."""
    rollouts: PoolRollouts
    commands: tuple[RolloutCommand, ...] = ()
    """Commands that no controller has followed yet, oldest first."""


def read_rollout_documents(store: FleetStore, fleet: str) -> dict[str, RolloutDocuments]:
    """Return the documents of all pools of a fleet that have some, by name. Blocks on the store.

    Raises:
        ValueError: A document cannot be decoded.
    """
    documents = store.read_documents(fleet)
    prefixes = (ROUTE_PREFIX, ROLLOUTS_PREFIX, COMMANDS_PREFIX)
    pools = {
        name.removeprefix(prefix)
        for name in documents
        for prefix in prefixes
        if name.startswith(prefix)
    }
    return {
        pool: RolloutDocuments(
            pool=pool,
            route=_decode(documents, f"{ROUTE_PREFIX}{pool}", PoolRoute, default=None),
            rollouts=_decode(
                documents, f"{ROLLOUTS_PREFIX}{pool}", PoolRollouts, default=PoolRollouts(pool=pool)
            ),
            commands=_decode(
                documents, f"{COMMANDS_PREFIX}{pool}", tuple[RolloutCommand, ...], default=()
            ),
        )
        for pool in sorted(pools)
    }


def append_command(
    store: FleetStore,
    fleet: str,
    pool: str,
    command: RolloutCommand,
) -> None:
    """Store a command for the controller. Events and audit log record who sent it. Blocks on the store.

    Raises:
        ConflictError: Other processes changed the commands all the time.
    """

    def append(commands: Sequence[RolloutCommand]) -> Sequence[RolloutCommand]:
        return [*commands, command][-MAX_COMMANDS:]

    decision = AuditedDecision(
        actor=command.by,
        action=f"rollout.{command.kind}",
        pool=pool,
        reason=command.reason,
        is_forced=command.force,
        details={"rollout": command.rollout},
    )
    _change_commands(store, fleet, pool, append, decision)


def remove_commands(
    store: FleetStore, fleet: str, pool: str, followed: Sequence[RolloutCommand]
) -> None:
    """Remove commands after a decision about them and its status were stored. Blocks on the store.

    `followed` are the commands as they were read.

    Raises:
        ConflictError: Other processes changed the commands all the time.
    """

    def remove(commands: Sequence[RolloutCommand]) -> Sequence[RolloutCommand]:
        remaining = list(commands)
        for command in followed:
            if command in remaining:
                remaining.remove(command)
        return remaining

    if followed:
        _change_commands(store, fleet, pool, remove)


def roll_back_route(
    store: FleetStore, fleet: str, pool: str, reason: str, at: float
) -> PoolRoute | None:
    """Route all users of a pool to its stable version, whatever else happens. Blocks on the store.

    Gateways that use the store follow the route by themselves within seconds.

    Returns:
        The new route; None if the stored one serves the stable version only, or if there is none.

    Raises:
        ConflictError: Other processes changed the route all the time.
    """
    name = f"{ROUTE_PREFIX}{pool}"
    for _ in range(MAX_ATTEMPTS):
        route = _decode(store.read_documents(fleet, name), name, PoolRoute, default=None)
        changed = None if route is None else route.roll_back(reason, at)
        if route is None or changed is None or changed is route:
            return None
        document = FleetDocument(changed.version, msgspec.json.encode(changed))
        if store.replace_document(fleet, name, document, after=route.version):
            return changed
    raise ConflictError(f"the route of pool {pool} is changed by others all the time; try again")


def _change_commands(
    store: FleetStore,
    fleet: str,
    pool: str,
    change: Callable[[Sequence[RolloutCommand]], Sequence[RolloutCommand]],
    decision: AuditedDecision | None = None,
) -> None:
    name = f"{COMMANDS_PREFIX}{pool}"
    for _ in range(MAX_ATTEMPTS):
        documents = store.read_documents(fleet, name)
        commands = _decode(documents, name, tuple[RolloutCommand, ...], default=())
        changed = change(commands)
        stored = documents.get(name)
        version = 0 if stored is None else stored.version
        # An empty list is kept, so that the version never returns to one that another process has read.
        document = FleetDocument(version + 1, msgspec.json.encode(changed))
        if store.replace_document(fleet, name, document, after=version, decision=decision):
            return
    raise ConflictError(f"commands for pool {pool} are changed by others all the time; try again")


def _decode(
    documents: Mapping[str, FleetDocument], name: str, kind: type[T], *, default: D
) -> T | D:
    document = documents.get(name)
    return default if document is None else msgspec.json.decode(document.content, type=kind)
