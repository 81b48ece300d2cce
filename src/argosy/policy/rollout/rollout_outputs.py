"""Outputs of a rollout: the split of the pool's replicas between two versions, and the route to write."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from argosy.policy.rollout.rollout_inputs import RolloutObservation
from argosy.policy.rollout.rollout_record import (
    BAD_VERSION_CAUSES,
    ROLLBACK_STATES,
    TRAFFIC_STATES,
    RolloutPlan,
    RolloutRecord,
    RolloutState,
)
from argosy.policy.traffic import PoolRoute, ShadowCopy, Variant, clamp_share


class ReplicaSplit(NamedTuple):
    """Desired replicas of each version. The autoscaler decides the demand, the rollout how it is split."""

    stable: str
    stable_replicas: int
    candidate: str | None = None
    candidate_replicas: int = 0


def split_replicas(record: RolloutRecord, observation: RolloutObservation) -> ReplicaSplit:
    """Return the desired replicas of both versions.

    Until the old replicas are removed, the stable version has as many as the whole demand needs, unless the plan
    replaces them in place.
    """
    plan, needed = record.plan, observation.needed
    if record.active_state in {RolloutState.RETIRING, RolloutState.DONE}:
        return ReplicaSplit(record.stable, 0, record.candidate, needed)
    stable, candidate = needed, _candidate_goal(record, observation)
    if plan.replaces_in_place and record.state not in ROLLBACK_STATES:
        # One after the other: the next one leaves when its predecessor's replacement is ready.
        status = observation.status(record.candidate)
        candidate = min(candidate, max(status.ready + 1, status.existing))
        stable = needed - candidate
    return ReplicaSplit(record.stable, stable, record.candidate, candidate)


def _candidate_goal(record: RolloutRecord, observation: RolloutObservation) -> int:
    plan, needed = record.plan, observation.needed
    match record.active_state:
        case RolloutState.PLANNED | RolloutState.CLEANING | RolloutState.ABORTED:
            return 0
        case RolloutState.ROLLING_BACK | RolloutState.ROLLED_BACK:
            # None is started again. In place, they make room for the stable ones.
            return 0 if plan.replaces_in_place else observation.status(record.candidate).existing
        case RolloutState.SOAKING:
            if plan.strategy == "rolling":
                status = observation.status(record.candidate)
                started = max(status.ready + 1, status.existing)
                return min(needed, max(first_replicas(plan, needed), started))
            return needed
        case RolloutState.STEP:
            return plan.candidate_replicas(_step_share(record), needed)
        case _:
            return first_replicas(plan, needed)


def first_replicas(plan: RolloutPlan, needed: int) -> int:
    """Return the replicas of the candidate that have to be ready before it gets traffic."""
    if plan.steps:
        return plan.candidate_replicas(plan.steps[0].share, needed)
    if plan.strategy == "blue_green" and not plan.replaces_in_place:
        return needed
    return plan.candidate_replicas(0.0, needed)


def _step_share(record: RolloutRecord) -> float:
    """Return the share of the step, or of the copied requests."""
    steps = record.plan.steps
    return steps[record.step].share if record.step < len(steps) else 1.0


def is_shadow_step(record: RolloutRecord) -> bool:
    """Return whether the candidate gets copies of requests only."""
    steps = record.plan.steps
    return (
        record.active_state is RolloutState.STEP
        and record.step < len(steps)
        and steps[record.step].is_shadow
    )


def wanted_share(record: RolloutRecord) -> float:
    """Return the share of the users that the candidate should have now."""
    match record.active_state:
        case RolloutState.STEP:
            return 0.0 if is_shadow_step(record) else _step_share(record)
        case RolloutState.SOAKING:
            return 1.0
        case _:
            return 0.0


def build_route(
    record: RolloutRecord, observation: RolloutObservation, route: PoolRoute, now: float
) -> PoolRoute:
    """Return the route for the state of a rollout. The same object is returned if nothing changes.

    Args:
        record: The rollout.
        observation: What exists.
        route: The stored route.
        now: Seconds since the epoch.
    """
    state, share = record.active_state, candidate_share(record, observation)
    fields: dict[str, object] = {
        "stable": record.stable,
        "salt": record.salt,
        "per_session_tenants": record.per_session_tenants,
        "shadow": None,
        "rollback": None,
        "rollout": record.id,
    }
    if state in {RolloutState.RETIRING, RolloutState.DONE}:
        fields["stable"] = record.candidate
    elif state in ROLLBACK_STATES or state is RolloutState.ABORTED:
        share = _remaining_share(record, observation)
        if not share:
            return route.roll_back(record.reason, now)
    elif is_shadow_step(record):
        fields["shadow"] = ShadowCopy(
            pool=route.pool,
            digest=record.candidate,
            fraction=_step_share(record),
            max_requests_per_s=record.plan.max_shadow_requests_per_s,
            salt=record.salt,
        )
    fields["variants"] = (Variant(digest=record.candidate, share=share),) if share else ()
    changed = msgspec.structs.replace(route, **fields)
    if changed == route:
        return route
    return msgspec.structs.replace(changed, version=route.version + 1)


def candidate_share(record: RolloutRecord, observation: RolloutObservation) -> float:
    """Return the share of the users for the candidate that both versions have ready replicas for."""
    if record.active_state not in TRAFFIC_STATES:
        return 0.0
    stable = observation.status(record.stable).ready
    return clamp_share(
        wanted_share(record),
        stable_ready=stable,
        candidate_ready=observation.status(record.candidate).ready,
        needed=observation.needed,
        may_exceed=not stable or (record.plan.replaces_in_place and not is_shadow_step(record)),
    )


def _remaining_share(record: RolloutRecord, observation: RolloutObservation) -> float:
    """Return the share of a candidate during a rollback: what too few stable replicas are ready for.

    It is none if the candidate is a bad version, or if it has to make room for the stable one.
    """
    is_ending = record.state in {RolloutState.CLEANING, RolloutState.ABORTED}
    if record.cause in BAD_VERSION_CAUSES or record.plan.replaces_in_place or is_ending:
        return 0.0
    route = observation.route
    if route is None or not route.share_of(record.candidate):
        return 0.0
    return clamp_share(
        0.0,
        stable_ready=observation.status(record.stable).ready,
        candidate_ready=observation.status(record.candidate).ready,
        needed=observation.needed,
        may_exceed=True,
    )
