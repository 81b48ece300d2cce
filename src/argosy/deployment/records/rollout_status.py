"""Status of the rollout of a pool, which its controller records for operators beside the stored documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from argosy.deployment.records.fleet_records import ROLLOUT_STATUS_PREFIX, decode_kind
from argosy.deployment.records.rollout_documents import RolloutDocuments, read_rollout_documents
from argosy.policy.rollout import (
    CheckStatus,
    GateVerdict,
    MetricVerdict,
    RolloutDecision,
    RolloutObservation,
)
from argosy.store import FleetStore

ROLLOUT_REFUSED = "rollout_refused"
"""Kind of the events about commands that are not followed. Their reason is that of `RolloutDecision.refusals`."""


class VersionReplicas(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of one version."""

    desired: int = 0
    existing: int = 0
    ready: int = 0


class RolloutStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of the controller's last decision about a pool. Without a change it is not recorded again."""

    pool: str
    status: str
    """State, and what it waits for, in one sentence."""
    declared: str = ""
    """Digest of the declared version."""
    versions: Mapping[str, VersionReplicas] = {}
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

    Args:
        decision: The decision.
        verdict: Verdict of the gate that it rests on; None without measurements.
        observation: Observation that it rests on.
        declared: Digest of the declared version.
        refusals: Those of the last decision about commands.
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
            digest: VersionReplicas(
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
        refusals=tuple(refusals),
    )


class RolloutReport(RolloutDocuments, frozen=True, kw_only=True):
    """All that is known about the rollouts of a pool."""

    status: RolloutStatus | None = None
    """Last record of the controller; None before its first decision."""

    @property
    def sentence(self) -> str:
        """State in one sentence; empty if no rollout has begun."""
        current = self.rollouts.current
        if self.status is not None:
            return self.status.status
        return "" if current is None else f"{current.state}: {current.reason}"


def read_rollouts(store: FleetStore, fleet: str) -> list[RolloutReport]:
    """Return the rollouts of all pools that have had some, by name. Blocks on the store.

    Raises:
        ValueError: A document cannot be decoded.
    """
    # A controller saves the status before it removes the commands that it has followed.
    pools = read_rollout_documents(store, fleet)
    statuses = decode_kind(store.read_records(fleet), ROLLOUT_STATUS_PREFIX, RolloutStatus)
    return [
        RolloutReport(**msgspec.structs.asdict(documents), status=statuses.get(pool))
        for pool, documents in pools.items()
    ]
