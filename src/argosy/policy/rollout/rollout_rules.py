"""Automatic transitions of a rollout: what moves it forward, what pauses it, and what rolls it back."""

from __future__ import annotations

import math
from typing import NamedTuple

from argosy.policy.rollout.gate import GateResult, GateVerdict
from argosy.policy.rollout.rollout_inputs import CheckStatus, RolloutObservation
from argosy.policy.rollout.rollout_outputs import candidate_share, first_replicas, wanted_share
from argosy.policy.rollout.rollout_record import (
    PAUSED_STATES,
    TRAFFIC_STATES,
    RollbackCause,
    RolloutRecord,
    RolloutState,
)

MIN_REQUESTS_PER_STEP = 2.0
"""Shortest duration of a step, in durations of the longest normal request."""
_START_STATES = frozenset({RolloutState.STARTING, RolloutState.WARMING})
_EPSILON = 1e-9


class Change(NamedTuple):
    """Next state, and why."""

    state: RolloutState
    reason: str
    step: int | None = None
    """None to keep the step."""
    cause: RollbackCause | None = None


def find_rollback(
    record: RolloutRecord,
    observation: RolloutObservation,
    verdict: GateVerdict | None,
    now: float,
) -> Change | None:
    """Return the automatic rollback, which is due in a pause as well; None if there is no cause."""
    route, state = observation.route, record.active_state
    candidate = observation.status(record.candidate)
    if route is not None and route.rollback is not None and route.rollout == record.id:
        return _roll_back(RollbackCause.ROUTE, route.rollback.reason)
    if candidate.failure:
        return _roll_back(RollbackCause.FAILURE, candidate.failure)
    if state is RolloutState.CHECKING and candidate.check is CheckStatus.FAILED:
        reason = candidate.check_reason or "a pinned prompt failed"
        return _roll_back(RollbackCause.CHECK, reason)
    is_judged = state in TRAFFIC_STATES and not record.is_forced
    if is_judged and verdict is not None and verdict.rejects(record.id):
        return _roll_back(RollbackCause.GATE, verdict.reason)
    timeout_s = record.plan.start_timeout_s
    is_late = now - record.state_since >= timeout_s and observation.needed > 0
    if record.state in _START_STATES and is_late:
        needed = first_replicas(record.plan, observation.needed)
        reason = f"{candidate.ready} of {needed} replicas are ready after {timeout_s:g} s"
        return _roll_back(RollbackCause.FAILURE, reason)
    return None


def _roll_back(cause: RollbackCause, reason: str) -> Change:
    return Change(RolloutState.ROLLING_BACK, reason, cause=cause)


def find_pause(record: RolloutRecord, observation: RolloutObservation, now: float) -> Change | None:
    """Return the automatic pause; None if nothing calls for one."""
    if record.state in PAUSED_STATES or not record.can_roll_back:
        return None
    plan = record.plan
    if record.state is not RolloutState.PLANNED and is_budget_spent(record, observation):
        return Change(RolloutState.PAUSED, _budget_reason(record, observation))
    candidate = observation.status(record.candidate)
    is_undecided = candidate.check is CheckStatus.INCONCLUSIVE and not record.is_forced
    if record.state is RolloutState.CHECKING and is_undecided:
        return Change(RolloutState.INCONCLUSIVE, candidate.check_reason)
    elapsed_s = now - record.state_since
    if record.state is RolloutState.CHECKING and elapsed_s >= plan.check_timeout_s:
        reason = f"the pinned prompts have no result after {plan.check_timeout_s:g} s"
        return Change(RolloutState.INCONCLUSIVE, reason)
    if record.state in TRAFFIC_STATES and elapsed_s >= plan.max_step_s and not record.is_endless:
        return Change(RolloutState.INCONCLUSIVE, f"no promotion within {plan.max_step_s:g} s")
    return None


def is_budget_spent(record: RolloutRecord, observation: RolloutObservation) -> bool:
    """Return whether the error budget forbids to go on."""
    budget = observation.error_budget
    if budget is None or record.is_forced:
        return False
    return not budget > record.plan.min_error_budget  # also if it is no number


def _budget_reason(record: RolloutRecord, observation: RolloutObservation) -> str:
    minimum = record.plan.min_error_budget
    return f"{observation.error_budget:.0%} of the error budget is left, more than {minimum:.0%} is needed"


def is_settled(record: RolloutRecord, observation: RolloutObservation) -> bool:
    """Return whether all gateways follow the route with the whole share of the step."""
    route = observation.followed_route
    if route is None or route.rollout != record.id:
        return False
    share = wanted_share(record)
    if not share:
        return route.shadow is not None
    return route.share_of(record.candidate) >= share - _EPSILON


def find_progress(
    record: RolloutRecord,
    observation: RolloutObservation,
    verdict: GateVerdict | None,
    now: float,
) -> Change | None:
    """Return the next state of a rollout that is not paused; None if it waits."""
    candidate, plan = observation.status(record.candidate), record.plan
    first = first_replicas(plan, observation.needed)
    match record.state:
        case RolloutState.PLANNED:
            if observation.needed > 0 and not is_budget_spent(record, observation):
                return Change(RolloutState.STARTING, f"version {record.candidate} is declared")
        case RolloutState.STARTING:
            if candidate.serving >= first > 0:
                return Change(
                    RolloutState.WARMING, f"{first} replica{' serves' if first == 1 else 's serve'}"
                )
        case RolloutState.WARMING:
            if candidate.ready >= first > 0:
                return Change(
                    RolloutState.CHECKING, f"{first} replica{' is' if first == 1 else 's are'} warm"
                )
        case RolloutState.CHECKING:
            # An inconclusive check gets here if a person has decided to go on.
            if candidate.check in {CheckStatus.PASSED, CheckStatus.INCONCLUSIVE}:
                state = RolloutState.STEP if plan.steps else RolloutState.SOAKING
                reason = "the pinned prompts have passed"
                if candidate.check_reason:
                    reason = f"{reason}; {candidate.check_reason}"
                return Change(state, reason, step=0)
        case RolloutState.STEP | RolloutState.SOAKING:
            if plan.auto_promote and not record.is_endless:
                blocker = promotion_blocker(record, observation, verdict, now)
                if not blocker:
                    return next_step(record, observation, verdict.reason if verdict else "")
        case RolloutState.RETIRING:
            return _finish(record, observation)
        case RolloutState.ROLLING_BACK | RolloutState.ROLLED_BACK | RolloutState.CLEANING:
            return _clean_up(record, observation)
        case _:
            pass
    return None


def promotion_blocker(
    record: RolloutRecord,
    observation: RolloutObservation,
    verdict: GateVerdict | None,
    now: float,
) -> str:
    """Return why the rollout cannot go to its next step by itself; empty if it can."""
    plan = record.plan
    if record.settled_at is None:
        share = wanted_share(record)
        got = candidate_share(record, observation)
        return f"not all gateways route {share:.0%} to it yet (replicas allow {got:.0%})"
    minimum_s = max(plan.min_step_s, MIN_REQUESTS_PER_STEP * observation.longest_request_s)
    if record.state is RolloutState.SOAKING:
        minimum_s = max(minimum_s, plan.soak_s)
    remaining_s = record.settled_at + minimum_s - now
    if remaining_s > 0.0:
        return f"the step lasts {remaining_s:.0f} s longer"
    return evidence_blocker(record, verdict)


def evidence_blocker(record: RolloutRecord, verdict: GateVerdict | None) -> str:
    """Return which evidence a promotion lacks; empty if none, or if a person decided to go on without it."""
    if record.is_forced:
        return ""
    if verdict is None or (verdict.rollout, verdict.step) != (record.id, record.step):
        return "the gate has no verdict on this step"
    return "" if verdict.result is GateResult.PROMOTE else verdict.reason


def describe_wait(
    record: RolloutRecord,
    observation: RolloutObservation,
    verdict: GateVerdict | None,
    now: float,
) -> str:
    """Return what a rollout waits for, as far as its reason does not say so; empty if that is plain."""
    if record.state is RolloutState.PLANNED:
        if is_budget_spent(record, observation):
            return _budget_reason(record, observation)
        return "" if observation.needed else "the pool has no replicas"
    if record.state not in TRAFFIC_STATES:
        return ""
    blocker = promotion_blocker(record, observation, verdict, now)
    if blocker or (record.plan.auto_promote and not record.is_endless):
        return blocker
    return "a person has to promote or abort it"


def next_step(record: RolloutRecord, observation: RolloutObservation, reason: str) -> Change | None:
    """Return the promotion; None while the candidate has too few replicas for what the step removes."""
    steps = record.plan.steps
    if record.active_state is RolloutState.SOAKING:
        if (
            not is_settled(record, observation)
            or observation.status(record.candidate).ready < observation.needed
        ):
            return None
        return Change(RolloutState.RETIRING, reason)
    following = record.step + 1
    if record.plan.replaces_in_place:
        # A step that needs no further replica would be the same comparison again.
        while following < len(steps) and steps[following].share * observation.needed <= math.ceil(
            wanted_share(record) * observation.needed
        ):
            following += 1
    if following < len(steps):
        return Change(RolloutState.STEP, reason, step=following)
    return Change(RolloutState.SOAKING, reason, step=len(steps))


def _finish(record: RolloutRecord, observation: RolloutObservation) -> Change | None:
    route = observation.followed_route
    if (
        route is not None
        and route.stable == record.candidate
        and not observation.status(record.stable).existing
        and observation.status(record.candidate).ready >= observation.needed
    ):
        return Change(RolloutState.DONE, "every gateway routes to the new version only")
    return None


def _clean_up(record: RolloutRecord, observation: RolloutObservation) -> Change | None:
    """Return the next state of a rollback."""
    if record.state is RolloutState.CLEANING:
        if not observation.status(record.candidate).existing:
            return Change(RolloutState.ABORTED, record.reason)
        return None
    if record.state is RolloutState.ROLLING_BACK:
        route = observation.followed_route
        if route is None or route.share_of(record.candidate) or route.shadow is not None:
            return None
        return Change(RolloutState.ROLLED_BACK, record.reason)
    return Change(RolloutState.CLEANING, record.reason)
