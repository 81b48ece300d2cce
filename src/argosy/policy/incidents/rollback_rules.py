"""Rollback after a promotion: what speaks for it, and what speaks against doing it without a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from argosy.policy.incidents.incident import Incident, RollbackAdvice

DAY_S = 86_400.0
MIN_VERSION_EXCESS = 0.5
"""Part of the excess that the new version must carry, if requests of several versions were counted."""
MAX_OTHER_MODELS = 0.2
"""Part of the excess of all models at others than the version's from which the version is not the likely cause."""
MAX_OTHER_RISE = 0.5
"""Rise of the other versions' share of events, as a part of the new version's, from which both are ill."""
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
    excess_by_model: Mapping[str, float] | None = None,
) -> RollbackAdvice | None:
    """Return the advice for the pool of an incident that has changed its version; None if none has.

    Args:
        incident: The incident.
        pools: Pools whose version has changed lately.
        pages: Labels of all pages that fire.
        now: Seconds since the epoch.
        excess_by_model: Part of the excess of failures, or of slow requests, of each model.
    """
    for versions in pools:
        labels = [
            each
            for each in incident.all_labels
            if each.get("pool") == versions.pool or each.get("model") == versions.model
        ]
        if labels and versions.changed_at <= incident.onset + 600.0:
            return _judge(incident, versions, labels, pages, now, excess_by_model or {})
    return None


def _judge(
    incident: Incident,
    versions: PoolVersions,
    labels: Sequence[Mapping[str, str]],
    pages: Sequence[Mapping[str, str]],
    now: float,
    excess_by_model: Mapping[str, float],
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
    excess = sum(part for model, part in excess_by_model.items() if model != versions.model)
    if excess >= MAX_OTHER_MODELS:
        obstacles.append(f"Other models have {excess:.0%} of the excess.")
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
    obstacles += _judge_slices(incident, versions)
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


def _judge_slices(incident: Incident, versions: PoolVersions) -> list[str]:
    """Return what the excess by version says against a rollback."""
    own = next(
        (
            each
            for each in incident.slices
            if each.dimension == "version"
            and each.value
            and versions.candidate.startswith(each.value)
        ),
        None,
    )
    if own is None:
        return ["No excess is known by version yet."]
    if own.excess_share < MIN_VERSION_EXCESS:
        return [f"The new version has only {own.excess_share:.0%} of the excess."]
    rise = own.share - own.share_before
    if own.request_share < 1.0 and own.share_elsewhere - own.share_before >= MAX_OTHER_RISE * rise:
        shares = f"{own.share_elsewhere:.0%} of their requests {incident.sliced_event}, and {own.share:.0%} of its own"
        return [f"The other versions are ill too: {shares}."]
    return []
