"""Rollback after a promotion: what speaks for it, and what speaks against doing it without a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from argosy.policy.incidents.incident import Incident, RollbackAdvice

DAY_S = 86_400.0
MIN_VERSION_EXCESS = 0.5
"""Part of the excess that the new version must carry, if requests of several versions were counted."""
OTHER_SLICE_EXCESS = 0.8
"""Part of the excess at one replica or tenant from which the version is not the likely cause."""


class PoolVersions(msgspec.Struct, frozen=True, kw_only=True):
    """Latest change of a pool's version, which can still be rolled back. Times are seconds since the epoch.

    A pool has one such change at a time, since the replicas of the version before it are removed at its end.
    """

    pool: str
    model: str
    rollout: str
    candidate: str
    """Digest of the version that all users, or some of them, have since."""
    changed_at: float
    """Time of its last step."""
    is_warm: bool
    """Whether the replicas of the version before are still there."""
    last_rollback_at: float | None = None
    """Last rollback that was done without a person."""


def judge_rollback(
    incident: Incident,
    pools: Sequence[PoolVersions],
    pages: Sequence[Mapping[str, str]],
    now: float,
) -> RollbackAdvice | None:
    """Return the advice for the pool of an incident that has changed its version; None if none has.

    Args:
        incident: The incident.
        pools: Pools whose version has changed lately.
        pages: Labels of all pages that fire.
        now: Seconds since the epoch.
    """
    for versions in pools:
        labels = [
            each
            for each in incident.all_labels
            if each.get("pool") == versions.pool or each.get("model") == versions.model
        ]
        if labels and versions.changed_at <= incident.onset + 600.0:
            return _judge(incident, versions, labels, pages, now)
    return None


def _judge(
    incident: Incident,
    versions: PoolVersions,
    labels: Sequence[Mapping[str, str]],
    pages: Sequence[Mapping[str, str]],
    now: float,
) -> RollbackAdvice:
    obstacles = []
    if not any("objective" in each and each.get("severity") == "page" for each in labels):
        obstacles.append("No page of an objective of this pool fires.")
    if not versions.is_warm:
        obstacles.append(
            "The replicas of the version before are gone, so that they must start first."
        )
    others = {
        each.get("model") or each.get("pool") or "the fleet"
        for each in pages
        if each.get("model") != versions.model and each.get("pool") != versions.pool
    }
    if others:
        obstacles.append(f"Pages fire for {', '.join(sorted(others))} too.")
    elsewhere = next(
        (
            each
            for each in incident.slices
            if each.dimension in {"replica", "tenant"}
            and each.excess_share >= OTHER_SLICE_EXCESS
            and each.request_share < 0.5
        ),
        None,
    )
    if elsewhere is not None:
        obstacles.append(
            f"{elsewhere.dimension} {elsewhere.value} has {elsewhere.excess_share:.0%} of the excess."
        )
    own = next(
        (
            each
            for each in incident.slices
            if each.dimension == "version" and each.value == versions.candidate
        ),
        None,
    )
    if own is not None and own.excess_share < MIN_VERSION_EXCESS:
        obstacles.append(f"The new version has only {own.excess_share:.0%} of the excess.")
    last = versions.last_rollback_at
    if last is not None and now - last < DAY_S:
        obstacles.append("The pool was rolled back without a person in the last 24 h.")
    minutes = (incident.onset - versions.changed_at) / 60
    reasons = [f"The version changed {max(0.0, minutes):.0f} min before the onset."]
    if versions.is_warm:
        reasons.append("The replicas of the version before are warm.")
    return RollbackAdvice(
        pool=versions.pool,
        rollout=versions.rollout,
        candidate=versions.candidate,
        reasons=tuple(reasons),
        obstacles=tuple(obstacles),
    )
