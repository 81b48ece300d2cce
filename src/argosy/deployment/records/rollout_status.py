"""Status of rollouts, as the controller records it and people read it, and the commands that people can send."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from argosy.deployment.records.fleet_records import ROLLOUT_STATUS_PREFIX, decode_kind
from argosy.deployment.records.rollout_documents import (
    RolloutDocuments,
    append_command,
    read_rollout_documents,
    roll_back_route,
)
from argosy.policy.rollout import (
    CheckStatus,
    CommandKind,
    GateResult,
    GateVerdict,
    MetricVerdict,
    RolloutCommand,
    RolloutDecision,
    RolloutObservation,
    RolloutState,
)
from argosy.policy.traffic import PoolRoute
from argosy.store import ConflictError, FleetStore

ROLLOUT_REFUSED = "rollout_refused"
"""Kind of the events about commands that are not followed. Their reason is that of `RolloutDecision.refusals`."""


class ReplicaCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of one version of a pool, or gateways, in numbers."""

    desired: int = 0
    existing: int = 0
    ready: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether exactly the desired replicas exist, and all are ready."""
        return self.desired == self.existing == self.ready


class RolloutStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the controller's last decision about a pool. Without a change it is not recorded again."""

    pool: str
    status: str
    """State, and what it waits for, in one sentence."""
    declared: str = ""
    """Digest of the declared version."""
    versions: Mapping[str, ReplicaCounts] = {}
    """Replicas by the digest of their version."""
    check: CheckStatus = CheckStatus.PENDING
    check_reason: str = ""
    error_budget: float | None = None
    """Remaining part of the error budget; None if it is not known."""
    result: str = ""
    """Recommendation of the gate; empty before the first step."""
    reason: str = ""
    """Why it recommends so."""
    regression: float = 1.0
    """Mean e-value of a regression."""
    metrics: tuple[MetricVerdict, ...] = ()
    candidate_requests: int = 0
    """Requests of the candidate that were measured in the step."""
    stable_requests: int = 0
    refusals: tuple[str, ...] = ()
    """Commands that were not followed, and why, of the last decision about commands."""


def describe_decision(
    decision: RolloutDecision,
    verdict: GateVerdict | None,
    observation: RolloutObservation,
    declared: str,
    refusals: Sequence[str],
) -> RolloutStatus:
    """Return the status of a pool after a decision. Save it before the commands are removed.

    `verdict` is that of the gate on which the decision rests, `declared` the digest of the declared version, and
    `refusals` are those of the last decision about commands.
    """
    split = decision.split
    desired = {} if split is None else {split.stable: split.stable_replicas}
    if split is not None and split.candidate is not None:
        desired[split.candidate] = split.candidate_replicas
    statuses = {
        digest: observation.status(digest) for digest in {**desired, **observation.versions}
    }
    current = decision.rollouts.current
    candidate = observation.status("" if current is None else current.candidate)
    return RolloutStatus(
        pool=decision.rollouts.pool,
        status=decision.status,
        declared=declared,
        versions={
            digest: ReplicaCounts(
                desired=desired.get(digest, 0), existing=status.existing, ready=status.ready
            )
            for digest, status in statuses.items()
        },
        check=candidate.check,
        check_reason=candidate.check_reason,
        error_budget=observation.error_budget,
        result="" if verdict is None else verdict.result,
        reason="" if verdict is None else verdict.reason,
        regression=1.0 if verdict is None else verdict.regression,
        metrics=() if verdict is None else verdict.metrics,
        candidate_requests=0 if verdict is None else verdict.candidate_requests,
        stable_requests=0 if verdict is None else verdict.stable_requests,
        refusals=tuple(refusals),
    )


class RolloutReport(RolloutDocuments, frozen=True, kw_only=True):
    """All that is known about the rollouts of a pool, and what follows from it for a person."""

    status: RolloutStatus | None
    """Last record of the controller; None before its first decision."""
    summary: str
    """State, and what it waits for, in one sentence; empty if no rollout has begun."""
    shares: Mapping[str, float]
    """Part of the users that gets each version, by digest."""
    is_running: bool
    can_roll_back: bool
    """Whether `abort` is possible."""
    can_retry: bool
    """Whether the declared version was rolled back, so that it is tried again only after `resume`."""
    needs_promotion: bool
    """Whether the evidence suffices, and the plan waits for `promote`."""


def read_rollouts(store: FleetStore, fleet: str) -> list[RolloutReport]:
    """Return the rollouts of all pools that have had some, by name. Blocks on the store.

    Raises:
        ValueError: A document cannot be decoded.
    """
    # A controller saves the status before it removes the commands that it has followed.
    pools = read_rollout_documents(store, fleet)
    statuses = decode_kind(store.read_records(fleet), ROLLOUT_STATUS_PREFIX, RolloutStatus)
    revision = store.latest_revision(fleet) if pools else None
    declared = {} if revision is None else revision.generations
    return [
        _report(documents, statuses.get(pool), declared[pool].digest if pool in declared else None)
        for pool, documents in pools.items()
    ]


def _report(
    documents: RolloutDocuments, status: RolloutStatus | None, declared: str | None
) -> RolloutReport:
    """Return the report of a pool. `declared` is the digest of the declared version."""
    current, route = documents.rollouts.current, documents.route
    is_running = current is not None and not current.has_ended
    verdict = None if declared is None else documents.rollouts.verdict_on(declared)
    started = "" if current is None else f"{current.state}: {current.reason}"
    versions = (
        [] if route is None else [route.stable, *(variant.digest for variant in route.variants)]
    )
    return RolloutReport(
        **msgspec.structs.asdict(documents),
        status=status,
        summary=started if status is None else status.status,
        shares={} if route is None else {digest: route.share_of(digest) for digest in versions},
        is_running=is_running,
        can_roll_back=current is not None and current.can_roll_back,
        can_retry=verdict is not None and not is_running,
        needs_promotion=current is not None
        and status is not None
        and current.state is RolloutState.STEP
        and (not current.plan.auto_promote or current.is_endless)
        and status.result == GateResult.PROMOTE,
    )


def send_command(
    store: FleetStore,
    fleet: str,
    report: RolloutReport,
    command: RolloutCommand,
) -> RolloutCommand:
    """Store a command for the rollout that runs, and return it with the rollout's id. Blocks on the store.

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
    append_command(store, fleet, report.pool, addressed)
    return addressed


def abort_route(
    store: FleetStore, fleet: str, pool: str, command: RolloutCommand
) -> PoolRoute | None:
    """Route all users to the stable version, after `abort` was stored. See `roll_back_route`."""
    cause = command.reason or f"abort by {command.by}"
    return roll_back_route(store, fleet, pool, cause, at=time.time())
