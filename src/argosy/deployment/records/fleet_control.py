"""Control of a declared fleet for the admin API: reads what its controller stored, and stores what people decide."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from argosy.deployment.declaration.comparison import compare_fleets
from argosy.deployment.declaration.config import FleetConfig, PoolConfig
from argosy.deployment.declaration.documents import dump_fleet
from argosy.deployment.declaration.forecast import PoolVariation
from argosy.deployment.declaration.loading import parse_remote_change
from argosy.deployment.declaration.remote_change import check_remote_change
from argosy.deployment.records.revisions import (
    FleetAction,
    FleetPlan,
    apply_declaration,
    check_fit,
    parse_declaration,
    plan_declaration,
    set_replicas,
)
from argosy.deployment.records.rollout_status import (
    RolloutReport,
    abort_route,
    read_rollouts,
    send_command,
)
from argosy.deployment.records.status import FleetStatus, read_fleet_status
from argosy.policy.rollout import CommandKind, RolloutCommand
from argosy.store import ConflictError, FleetRevision, FleetStore, NotFoundError

_DECLARATION = "the declaration"
"""Name of a declaration from the admin API in error messages."""


class AppliedDeclaration(msgspec.Struct, frozen=True, kw_only=True):
    """A declaration that was applied."""

    fleet: str
    revision: int
    declaration: str
    """The declaration in YAML, without the settings that have their defaults."""


class FleetControl:
    """Control of a declared fleet, with or without a running controller. Every call may block on the store.

    Args:
        is_embedded: Whether the controller runs in this process, and the command line that started it declares the
            fleet, as that of `argosy serve`. Such a fleet has a leader as long as the process runs, and is read-only.
    """

    def __init__(self, name: str, store: FleetStore, *, is_embedded: bool = False) -> None:
        self.name = name
        self.store = store
        self._is_embedded = is_embedded

    def read_fleet(self) -> FleetStatus:
        """Return the fleet as its controller recorded it.

        Raises:
            NotFoundError: The fleet was never applied.
            ValueError: The declaration in force is invalid for this version.
        """
        self._require_latest()
        return read_fleet_status(self.store, self.name, is_embedded=self._is_embedded)

    def read_declaration(self, revision: int | None) -> AppliedDeclaration:
        """Return the declaration of a revision, or the one in force.

        Raises:
            NotFoundError: There is no such revision.
            ValueError: The declaration is invalid for this version.
        """
        found = (
            self._require_latest()
            if revision is None
            else self.store.get_revision(self.name, revision)
        )
        return AppliedDeclaration(
            fleet=self.name,
            revision=found.number,
            declaration=dump_fleet(parse_declaration(found)),
        )

    def read_pools(self) -> Sequence[PoolConfig]:
        """Return the pools of the declaration in force.

        Raises:
            NotFoundError: The fleet was never applied.
            ValueError: The declaration is invalid for this version.
        """
        return parse_declaration(self._require_latest()).pools

    def plan_change(self, declaration: str) -> FleetPlan:
        """Return what applying a declaration in YAML or JSON would change.

        Raises:
            NotFoundError: The fleet was never applied.
            ValueError: The declaration is invalid, or changes what only the command line may change.
        """
        latest = self._require_latest()
        config = parse_remote_change(declaration, _DECLARATION, parse_declaration(latest))
        return plan_declaration(self.store, self.name, latest, config)

    def prepare_forecast(
        self, declaration: str | None, variation: PoolVariation | None
    ) -> tuple[str, str]:
        """Return the canonical texts of the declaration in force, and of another or the same with a variation.

        Raises:
            NotFoundError: The fleet was never applied.
            ValueError: It is invalid, or changes what only the command line may change.
        """
        old = parse_declaration(self._require_latest())
        if variation is not None:
            declaration = dump_fleet(variation.apply(old))
        new = parse_remote_change(declaration or "", _DECLARATION, old)
        present, declared = (msgspec.structs.replace(each, fleet=self.name) for each in (old, new))
        return dump_fleet(present), dump_fleet(declared)

    def apply_change(self, declaration: str, after: int, reason: str, actor: str) -> int:
        """Put a declaration in YAML or JSON in force, and return the number of the new revision.

        `after` is the number of the revision that the operator has seen as the latest.

        Raises:
            NotFoundError: The fleet was never applied.
            ConflictError: The latest revision is not `after`, or nothing would change.
            ValueError: The declaration is invalid, or changes what only the command line may change.
        """
        latest = self._require_latest()
        if latest.number != after:  # before it is compared with one that the operator has not seen
            raise ConflictError(
                f"Revision {latest.number} was applied meanwhile. Plan the declaration again."
            )
        old = parse_declaration(latest)
        config = parse_remote_change(declaration, _DECLARATION, old)
        if not compare_fleets(old, config):
            raise ConflictError("Nothing changes: this declaration is in force.")
        return self._apply(latest, config, actor, reason)

    def plan_rollback(self, revision: int) -> FleetPlan:
        """Return what `roll_back` to a revision would change. Raises as that does."""
        config = parse_declaration(self.store.get_revision(self.name, revision))
        latest = self._require_latest()
        check_remote_change(parse_declaration(latest), config)
        return plan_declaration(self.store, self.name, latest, config)

    def roll_back(self, revision: int, after: int | None, reason: str, actor: str) -> int:
        """Put the declaration of an earlier revision in force again, and return the number of the new revision.

        `after` is the number of the revision that the operator has seen as the latest; None to replace any.

        Raises:
            NotFoundError: There is no such revision.
            ConflictError: The latest revision is not `after`, or nothing would change.
            ValueError: Its declaration is invalid for this version, or changes what only the command line may change.
        """
        config, latest = (
            parse_declaration(self.store.get_revision(self.name, revision)),
            self._require_latest(),
        )
        if after is not None and latest.number != after:
            raise ConflictError(
                f"Revision {latest.number} was applied meanwhile. Look at it first."
            )
        if not compare_fleets(parse_declaration(latest), config):
            raise ConflictError(
                f"Nothing changes: the declaration of revision {revision} is in force."
            )
        return self._apply(
            latest, config, actor, reason, action="fleet.rollback", rollback_of=revision
        )

    def scale(self, pool: str, replicas: int | None, reason: str, actor: str) -> int:
        """Change the number of replicas of a pool, and return the number of the revision in force.

        With None for `replicas` the autoscaler decides again.

        Raises:
            ConflictError: Another revision was applied meanwhile.
            ValueError: There is no such pool, its limits do not allow the number, or it has no autoscaler.
        """
        latest = self._require_latest()
        config = parse_declaration(latest)
        scaled = set_replicas(config, pool, replicas)
        if scaled == config:
            return latest.number
        count = "the number that the autoscaler decides" if replicas is None else replicas
        reason = reason or f"scale {pool} to {count}"
        return self._apply(latest, scaled, actor, reason, action="pool.scale", pool=pool)

    def command_rollout(
        self, pool: str, kind: CommandKind, *, rollout: str, reason: str, force: bool, actor: str
    ) -> None:
        """Store a command for the controller. `abort` also routes all users to the stable version at once.

        `rollout` is the id that the operator has seen. With `force` it goes on without evidence, or with a spent error
        budget.

        Raises:
            NotFoundError: The pool has had no rollout.
            ConflictError: The rollout has ended, another one runs, or it cannot be rolled back any more.
            ValueError: The command is forced without a reason.
        """
        report = self._find_report(pool)
        current = report.rollouts.current
        is_retry = kind is CommandKind.RESUME and report.can_retry
        if not (report.is_running or is_retry):
            raise ConflictError(f"No rollout of the pool {pool} is running.")
        if current is None or current.id != rollout:
            raise ConflictError(
                f"Another rollout of the pool {pool} has begun. Look at it, and repeat the command."
            )
        command = RolloutCommand(kind=kind, by=actor, reason=reason, force=force)
        self._check_writable()
        sent = send_command(self.store, self.name, report, command)
        if kind is CommandKind.ABORT:
            abort_route(self.store, self.name, pool, sent)

    def _apply(
        self,
        latest: FleetRevision,
        config: FleetConfig,
        actor: str,
        reason: str,
        *,
        action: FleetAction = "fleet.apply",
        pool: str = "",
        rollback_of: int | None = None,
    ) -> int:
        """Put a declaration in force if `latest` is, it fits, and nothing changes that only the command line may."""
        self._check_writable()
        old = parse_declaration(latest)
        check_remote_change(old, config)
        check_fit(self.store.read_records(self.name), old, config)
        return apply_declaration(
            self.store,
            self.name,
            config,
            latest,
            author=actor,
            reason=reason,
            action=action,
            pool=pool,
            rollback_of=rollback_of,
        ).number

    def _require_latest(self) -> FleetRevision:
        revision = self.store.latest_revision(self.name)
        if revision is None:
            raise NotFoundError(
                f"The fleet {self.name!r} was never applied. Use `argosy up` with its declaration."
            )
        return revision

    def _find_report(self, pool: str) -> RolloutReport:
        for report in read_rollouts(self.store, self.name):
            if report.pool == pool:
                return report
        raise NotFoundError(
            f"The pool {pool!r} of the fleet {self.name!r} has had no rollout. Declare `rollout` for it."
        )

    def _check_writable(self) -> None:
        """Raise ConflictError if the fleet is read-only."""
        if self._is_embedded:
            raise ConflictError(
                "The command line of `argosy serve` declares this fleet. Start it again with other options, "
                "or declare a fleet for `argosy up`."
            )
