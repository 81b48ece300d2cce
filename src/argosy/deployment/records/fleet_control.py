"""Control of a declared fleet for the gateway's admin API: reads what the controller stored, and stores decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from argosy.deployment.declaration.comparison import PlannedChange, compare_fleets
from argosy.deployment.declaration.config import FleetConfig, PoolConfig
from argosy.deployment.declaration.documents import dump_fleet
from argosy.deployment.declaration.loading import parse_remote_change
from argosy.deployment.declaration.validation import GATEWAY_POOL
from argosy.deployment.records.fleet_plan import plan_declaration
from argosy.deployment.records.fleet_records import ReplicaRecord
from argosy.deployment.records.fleet_views import (
    FleetChangeView,
    FleetDeclarationView,
    FleetGatewaysView,
    FleetPlanView,
    FleetPoolView,
    FleetReplicaView,
    FleetRevisionView,
    FleetView,
    PoolRolloutView,
    VersionView,
)
from argosy.deployment.records.revisions import apply_declaration, parse_declaration, set_replicas
from argosy.deployment.records.rollout_commands import abort_route, is_rejected, send_command
from argosy.deployment.records.rollout_status import RolloutReport, RolloutStatus, read_rollouts
from argosy.deployment.records.status import PoolStatus, read_fleet_status, read_known_rollouts
from argosy.policy.rollout import (
    CommandKind,
    GateResult,
    RolloutCommand,
    RolloutRecord,
    RolloutState,
)
from argosy.store import (
    AuditedDecision,
    ConflictError,
    FleetRevision,
    FleetStore,
    NotFoundError,
    PoolGeneration,
)

MAX_AUDITED_CHANGES = 50
"""Number of changed settings that the audit log names. The history has all of them."""
_DECLARATION = "the declaration"
"""Name of a declaration from the admin API in error messages."""


class FleetControl:
    """Implements `argosy.gateway.FleetControl` on the store, with or without a running controller.

    Args:
        fleet: Name of the fleet.
        store: Its store.
        is_embedded: Whether the controller runs in this process, and the command line that started it declares the
            fleet, as that of `argosy serve`. Such a fleet has a leader as long as the process runs, and is read-only.
    """

    def __init__(self, fleet: str, store: FleetStore, *, is_embedded: bool = False) -> None:
        self._fleet = fleet
        self._store = store
        self._is_embedded = is_embedded

    @property
    def name(self) -> str:
        """Name of the fleet."""
        return self._fleet

    @property
    def store(self) -> FleetStore:
        """Store of the fleet."""
        return self._store

    def read_fleet(self) -> FleetView:
        """Return the fleet as its controller recorded it. See `FleetControl`."""
        revision = self._require_latest()
        config = parse_declaration(revision)
        status = read_fleet_status(self._store, self._fleet)
        reports = read_known_rollouts(self._store, self._fleet)
        pools = []
        gateways: FleetGatewaysView | None = None
        for pool_status in status.pools:
            if pool_status.name == GATEWAY_POOL:
                gateways = FleetGatewaysView(
                    ready=pool_status.ready,
                    desired=pool_status.desired,
                    existing=pool_status.replicas,
                )
            pool = config.find_pool(pool_status.name)
            if pool is not None:
                report = reports.get(pool.name)
                pools.append(_describe_pool(pool, pool_status, report, revision.generations))
        return FleetView(
            fleet=self._fleet,
            revision=status.revision,
            is_as_declared=status.is_as_declared,
            is_read_only=self._is_embedded,
            has_leader=self._is_embedded or status.has_leader,
            leader=status.leader,
            epoch=status.epoch,
            lease_age_s=status.lease_age_s,
            url=status.url,
            gateways=gateways,
            pools=pools,
            replicas=[_describe_replica(record) for record in status.replicas],
        )

    def list_revisions(self, limit: int, before: int | None) -> list[FleetRevisionView]:
        """Return revisions with their changes, newest first. See `FleetControl`."""
        revisions = self._store.list_revisions(self._fleet, limit + 1, before)
        earlier: list[FleetRevision | None] = [*revisions[1:], None]
        pairs = list(zip(revisions, earlier, strict=True))[:limit]
        return [_describe_revision(revision, previous) for revision, previous in pairs]

    def read_declaration(self, revision: int | None) -> FleetDeclarationView:
        """Return the declaration of a revision, or the one in force. See `FleetControl`."""
        found = (
            self._require_latest()
            if revision is None
            else self._store.get_revision(self._fleet, revision)
        )
        return FleetDeclarationView(
            fleet=self._fleet,
            revision=found.number,
            declaration=dump_fleet(parse_declaration(found)),
        )

    def plan_change(self, declaration: str) -> FleetPlanView:
        """Return what applying a declaration would change. See `FleetControl`."""
        latest = self._require_latest()
        old = parse_declaration(latest)
        return self._plan(latest, old, parse_remote_change(declaration, _DECLARATION, old))

    def apply_change(self, declaration: str, after: int, reason: str, actor: str) -> int:
        """Put a declaration in force. See `FleetControl`."""
        latest = self._require_latest()
        if latest.number != after:  # before it is compared with one that the operator has not seen
            raise ConflictError(
                f"Revision {latest.number} was applied meanwhile. Plan the declaration again."
            )
        old = parse_declaration(latest)
        config = parse_remote_change(declaration, _DECLARATION, old)
        changes = compare_fleets(old, config)
        if not changes:
            raise ConflictError("Nothing changes: this declaration is in force.")
        paths = [change.path for change in changes[:MAX_AUDITED_CHANGES]]
        decision = self._decision(
            "fleet.apply", "", actor, changes=paths, count=len(changes), reason=reason
        )
        return self._apply(config, actor, reason, after, decision)

    def plan_rollback(self, revision: int) -> FleetPlanView:
        """Return what putting an earlier declaration in force would change. See `FleetControl`."""
        config = parse_declaration(self._store.get_revision(self._fleet, revision))
        latest = self._require_latest()
        return self._plan(latest, parse_declaration(latest), config)

    def roll_back(self, revision: int, after: int | None, reason: str, actor: str) -> int:
        """Put an earlier declaration in force again. See `FleetControl`."""
        config = parse_declaration(self._store.get_revision(self._fleet, revision))
        if not compare_fleets(parse_declaration(self._require_latest()), config):
            raise ConflictError(
                f"Nothing changes: the declaration of revision {revision} is in force."
            )
        decision = self._decision("fleet.rollback", "", actor, revision=revision, reason=reason)
        return self._apply(config, actor, reason, after, decision, rollback_of=revision)

    def scale(self, pool: str, replicas: int | None, reason: str, actor: str) -> int:
        """Change the number of replicas of a pool. See `FleetControl`."""
        latest = self._require_latest()
        config = parse_declaration(latest)
        scaled = set_replicas(config, pool, replicas)
        if scaled == config:
            return latest.number
        old = _replicas_of(config, pool)
        decision = self._decision(
            "pool.scale", pool, actor, replicas=[old, replicas], reason=reason
        )
        count = "the number that the autoscaler decides" if replicas is None else replicas
        reason = reason or f"scale {pool} to {count}"
        return self._apply(scaled, actor, reason, latest.number, decision)

    def command_rollout(
        self, pool: str, kind: CommandKind, *, rollout: str, reason: str, force: bool, actor: str
    ) -> None:
        """Store a command for the controller. See `FleetControl`."""
        report = self._find_report(pool)
        current, running = report.rollouts.current, report.rollouts.running
        is_retry = kind is CommandKind.RESUME and is_rejected(
            report, self._require_latest().generations
        )
        if running is None and not is_retry:
            raise ConflictError(f"No rollout of the pool {pool} is running.")
        if current is None or current.id != rollout:
            raise ConflictError(
                f"Another rollout of the pool {pool} has begun. Look at it, and repeat the command."
            )
        command = RolloutCommand(kind=kind, by=actor, reason=reason, force=force)
        decision = self._decision(
            f"rollout.{kind}", pool, actor, rollout=rollout, reason=reason, force=force
        )
        sent = send_command(self._store, self._fleet, report, command, decision)
        if kind is CommandKind.ABORT:
            abort_route(self._store, self._fleet, pool, sent)

    def _plan(self, latest: FleetRevision, old: FleetConfig, new: FleetConfig) -> FleetPlanView:
        plan = plan_declaration(self._store, self._fleet, old, new)
        return FleetPlanView(
            revision=latest.number,
            changes=_describe_changes(plan.changes),
            running_requests=plan.running_requests,
            cached_tokens=plan.cached_tokens,
            lines=plan.describe(),
        )

    def _apply(
        self,
        config: FleetConfig,
        actor: str,
        reason: str,
        after: int | None,
        decision: AuditedDecision,
        rollback_of: int | None = None,
    ) -> int:
        return apply_declaration(
            self._store,
            self._fleet,
            config,
            author=actor,
            reason=reason,
            after=after,
            rollback_of=rollback_of,
            decision=decision,
        ).number

    def _require_latest(self) -> FleetRevision:
        revision = self._store.latest_revision(self._fleet)
        if revision is None:
            raise NotFoundError(
                f"The fleet {self._fleet!r} was never applied. Use `argosy up` with its declaration."
            )
        return revision

    def _find_report(self, pool: str) -> RolloutReport:
        for report in read_rollouts(self._store, self._fleet):
            if report.pool == pool:
                return report
        raise NotFoundError(
            f"The pool {pool!r} of the fleet {self._fleet!r} has had no rollout. Declare `rollout` for it."
        )

    def _decision(self, action: str, pool: str, actor: str, **details: object) -> AuditedDecision:
        """Return the decision to be stored. Raises ConflictError if the fleet is read-only."""
        if self._is_embedded:
            raise ConflictError(
                "The command line of `argosy serve` declares this fleet. Start it again with other options, "
                "or declare a fleet for `argosy up`."
            )
        subject = f"{self._fleet}/{pool}" if pool else self._fleet
        return AuditedDecision(actor=actor, action=action, subject=subject, details=details)


def _replicas_of(config: FleetConfig, name: str) -> int | None:
    pool = config.find_pool(name)
    return None if pool is None else pool.replicas


def _describe_replica(record: ReplicaRecord) -> FleetReplicaView:
    return FleetReplicaView(
        replica=record.name,
        pool=record.pool,
        phase=record.phase,
        reason=record.reason,
        since=record.phase_since,
        generation=record.generation,
        launcher=record.launcher,
        node=record.node,
        zone=record.zone,
        running=record.running,
    )


def _describe_pool(
    pool: PoolConfig,
    status: PoolStatus,
    report: RolloutReport | None,
    generations: Mapping[str, PoolGeneration],
) -> FleetPoolView:
    return FleetPoolView(
        pool=pool.name,
        model=pool.model,
        ready=status.ready,
        desired=status.desired,
        existing=status.replicas,
        spares=pool.spares,
        minimum=pool.min_replicas if pool.min_replicas is not None else pool.initial_replicas,
        maximum=pool.max_replicas,
        declared=pool.replicas if pool.autoscaling.mode == "on" else pool.initial_replicas,
        autoscaling=pool.autoscaling.mode,
        decision=status.scaling,
        rollout=None
        if report is None or report.rollouts.current is None
        else _describe_rollout(report, report.rollouts.current, generations),
    )


def _describe_rollout(
    report: RolloutReport, current: RolloutRecord, generations: Mapping[str, PoolGeneration]
) -> PoolRolloutView:
    status = report.status or RolloutStatus(pool=report.pool, status="")
    plan, gate = current.plan, current.plan.gate
    waits_for_person = not plan.auto_promote or current.is_endless
    return PoolRolloutView(
        rollout=current.id,
        strategy=plan.strategy,
        state=current.state,
        state_since=current.state_since,
        started_at=current.started_at,
        summary=report.sentence,
        is_running=not current.has_ended,
        can_roll_back=current.can_roll_back,
        can_retry=current.has_ended and is_rejected(report, generations),
        needs_promotion=current.state is RolloutState.STEP
        and waits_for_person
        and status.result == GateResult.PROMOTE,
        cause=current.cause,
        stable=_describe_version(report, status, current.stable),
        candidate=_describe_version(report, status, current.candidate),
        steps=plan.comparison_steps,
        step=current.step,
        result=status.result,
        result_reason=status.reason,
        regression=status.regression,
        regression_threshold=1.0 / gate.max_false_rollbacks,
        equivalence_threshold=1.0 / gate.max_false_promotions,
        metrics=status.metrics,
        check=status.check,
        check_reason=status.check_reason,
        error_budget=status.error_budget,
        pending_commands=tuple(f"{each.kind} by {each.by}" for each in report.commands),
        refusals=status.refusals,
        rejected=report.rollouts.verdicts,
        transitions=current.transitions,
    )


def _describe_version(report: RolloutReport, status: RolloutStatus, digest: str) -> VersionView:
    replicas = status.versions.get(digest)
    return VersionView(
        digest=digest,
        share=0.0 if report.route is None else report.route.share_of(digest),
        desired=0 if replicas is None else replicas.desired,
        existing=0 if replicas is None else replicas.existing,
        ready=0 if replicas is None else replicas.ready,
    )


def _describe_revision(
    revision: FleetRevision, previous: FleetRevision | None
) -> FleetRevisionView:
    changes: list[FleetChangeView] = []
    problem = ""
    try:
        config = parse_declaration(revision)
        before = None if previous is None else parse_declaration(previous)
        changes = _describe_changes(compare_fleets(before, config))
    except ValueError as error:
        problem = str(error)
    return FleetRevisionView(
        revision=revision.number,
        applied_at=revision.applied_at,
        author=revision.author,
        reason=revision.reason,
        rollback_of=revision.rollback_of,
        changes=changes,
        problem=problem,
    )


def _describe_changes(changes: Sequence[PlannedChange]) -> list[FleetChangeView]:
    return [
        FleetChangeView(
            path=change.path,
            action=change.action,
            old=change.old,
            new=change.new,
            effect=change.effect,
            count=change.count,
        )
        for change in changes
    ]
