"""Observation of the versions of a pool, and the targets for them that follow from the split of a rollout."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.fleet.control.declared_fleet import VersionTarget
from argosy.fleet.control.pinned_prompts import CheckResult
from argosy.policy.reconciliation import (
    LaunchState,
    ObservedReplica,
    RestartLimits,
    is_ready,
    plan_restart,
)
from argosy.policy.rollout import (
    ROLLBACK_STATES,
    CheckStatus,
    ReplicaSplit,
    RolloutRecord,
    VersionStatus,
)

MAX_CRASHES = 3
"""Crashes of one replica from which a version does not stay up, unless the stable one crashes as often."""
MAX_EJECTED_S = 15.0
"""Time for which gateways may eject all replicas of a candidate. Shorter times without an ejection do not interrupt it,
since gateways try an ejected replica again and again."""


def observe_version(
    replicas: Sequence[ObservedReplica],
    limits: RestartLimits,
    check: CheckResult,
    *,
    requires_warm_up: bool,
    problem: str,
) -> VersionStatus:
    """Return the status of a version.

    A version has failed if a replica exceeds the limits of restarts. `problem` says why it cannot serve although its
    replicas start; empty if it can.
    """
    serving = [each for each in replicas if each.state is LaunchState.RUNNING and each.is_serving]
    failure = problem
    for replica in replicas:
        plan = plan_restart(replica, limits)
        if plan.has_failed and not replica.is_serving:
            failure = f"replica {replica.name}: {plan.reason}"
            break
    return VersionStatus(
        existing=len(replicas),
        serving=len(serving),
        ready=sum(is_ready(each, requires_warm_up=requires_warm_up) for each in replicas),
        check=check.status,
        check_reason="" if check.status is CheckStatus.PENDING else check.reason,
        failure=failure,
    )


def find_crash_loop(
    candidate: Sequence[ObservedReplica], stable: Sequence[ObservedReplica], since: float
) -> str:
    """Return why a candidate does not stay up; empty if it does, or crashes no more often than the stable version.

    One crash of several replicas may be that of a machine, so the crashes of a single one decide.

    Crashes before `since`, the start of the rollout, do not count.
    """
    worst = max(candidate, key=lambda each: _count_crashes(each, since), default=None)
    if worst is None:
        return ""
    crashes = _count_crashes(worst, since)
    most = max((_count_crashes(each, since) for each in stable), default=0)
    if crashes < MAX_CRASHES or crashes <= most:
        return ""
    return f"replica {worst.name} has crashed {crashes} times, last: {worst.past_runs[-1].reason}"


class EjectionWatch:
    """Finds a candidate whose replicas are healthy, but whose requests fail, so that all gateways eject them.

    Its users are served by the stable version then, and the gate gets hardly any evidence.
    """

    def __init__(self) -> None:
        self._rollout = ""
        self._since = self._last = float("-inf")

    def find_problem(
        self,
        rollout: str,
        candidate: Sequence[ObservedReplica],
        stable: Sequence[ObservedReplica],
        now: float,
    ) -> str:
        """Return why a candidate with traffic cannot serve; empty if it can, or if the stable version cannot either.

        Call it at each observation of a step with traffic.
        """
        if rollout != self._rollout:
            self._rollout, self._last = rollout, float("-inf")
        serving = [each for each in candidate if each.is_serving and each.in_rotation]
        is_ejected = bool(serving) and not any(each.is_routed_by_any for each in serving)
        if not is_ejected or not any(each.is_routed_by_any for each in stable):
            return ""
        if now - self._last > MAX_EJECTED_S:
            self._since = now
        self._last = now
        if now - self._since < MAX_EJECTED_S:
            return ""
        causes = [each.gateway_reason for each in serving if each.gateway_reason]
        cause = f", because {causes[0]}" if causes else ""
        return f"gateways have ejected all its replicas for {MAX_EJECTED_S:g} s{cause}"


def _count_crashes(replica: ObservedReplica, since: float) -> int:
    return sum(run.ready_at is not None and run.exited_at >= since for run in replica.past_runs)


def divide_pool(
    split: ReplicaSplit,
    record: RolloutRecord | None,
    replicas: Sequence[ObservedReplica],
    generations: tuple[int, int | None],
    spares: int,
    *,
    stable: str,
) -> list[VersionTarget]:
    """Return the desired replicas of both versions of a pool.

    `generations` are those of the stable version and of the candidate of the split. `stable` is the digest of the
    version that serves all other users, by the stored route. It has the spare replicas. `record` is None if the pool
    never had a rollout.
    """
    first, second = generations
    if second is None or split.candidate is None:
        return [VersionTarget(first, split.stable_replicas, spares)]
    num_stable, num_candidate = split.stable_replicas, split.candidate_replicas
    existing = [
        sum(each.generation == number and each.state is not None for each in replicas)
        for number in generations
    ]
    if record is not None and record.state in ROLLBACK_STATES:
        # A candidate that is lost meanwhile is not started again.
        alive = sum(
            each.generation == second and each.state not in {None, LaunchState.EXITED}
            for each in replicas
        )
        num_candidate = min(num_candidate, alive)
    if record is not None and record.plan.replaces_in_place:
        # One version has to leave its place before the other one starts.
        places = split.stable_replicas + split.candidate_replicas + spares
        if record.state in ROLLBACK_STATES:
            num_stable = min(num_stable, max(existing[0], places - existing[1]))
        else:
            num_candidate = min(num_candidate, max(existing[1], places - existing[0]))
    serves_new = stable == split.candidate
    return [
        VersionTarget(
            first,
            num_stable,
            0 if serves_new else spares,
            f"version {split.candidate[:12]} has replaced it" if serves_new else "",
        ),
        VersionTarget(
            second,
            num_candidate,
            spares if serves_new else 0,
            "its version is rolled back" if record is not None and record.cause else "",
        ),
    ]
