"""Replica of a pool during one reconciliation: its state, when it counts as hung, and the phase that operators see."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import NamedTuple

from argosy.policy.reconciliation.actions import PhaseReport, ReplicaPhase
from argosy.policy.reconciliation.fleet_state import (
    DesiredPool,
    LaunchState,
    ObservedFleet,
    ObservedReplica,
    RestartLimits,
    WarmUpState,
)
from argosy.policy.reconciliation.problems import ProblemKind, describe_problem
from argosy.policy.reconciliation.restarts import RestartPlan
from argosy.policy.replica_status import ReplicaStatus
from argosy.protocol import SLEEP_STATES

SILENCE_S = 3.0
"""Time without an answer after which operators see that a replica is silent. Checks are a second apart."""
CORE_EXIT_SHOWN_S = 5.0
"""Time for which operators see that an engine core ended, since it may be started again between two checks."""


class HangDeadline(NamedTuple):
    """When a replica counts as hung, unless it gives a sign of life before."""

    at: float
    """Seconds since the epoch; infinite for a replica that does not run or already drains."""
    timeout_s: float
    cause: str

    @property
    def reason(self) -> str:
        """Why the replica counts as hung from then on."""
        return f"{self.cause} for {self.timeout_s:g} s"


_NEVER = HangDeadline(math.inf, math.inf, "it does not run")


def hang_deadline(
    replica: ObservedReplica, limits: RestartLimits, observing_since: float
) -> HangDeadline:
    """Return when a replica counts as hung by what is known of it now.

    Args:
        replica: The replica.
        limits: Timeouts of its pool.
        observing_since: Silence before this time is no evidence, because the controller did not observe.
    """
    if replica.state is not LaunchState.RUNNING:
        return _NEVER
    started_at, responded_at, stepped_at = (
        replica.started_at,
        replica.last_response_at,
        replica.last_step_at,
    )
    if responded_at is None or responded_at < started_at:
        timeout_s = limits.start_timeout_s
        at = max(started_at, observing_since) + timeout_s
        return HangDeadline(at, timeout_s, "it has not answered since its start")
    at = max(responded_at, observing_since) + limits.hang_timeout_s
    if stepped_at is not None:
        step_at = max(stepped_at, started_at, observing_since) + limits.step_timeout_s
        if step_at < at:
            return HangDeadline(step_at, limits.step_timeout_s, "its engine has made no step")
    return HangDeadline(at, limits.hang_timeout_s, "it has not answered")


class MemberState(enum.StrEnum):
    """State of a replica that its launcher lists. `STATES` says what each means."""

    DRAINING = "draining"
    EXITED = "exited"
    PROVISIONING = "provisioning"
    HUNG = "hung"
    NOT_WARM = "not warm"
    LOADING = "loading"
    WARMING = "warming"
    SERVING = "serving"


class StateRow(NamedTuple):
    """Meaning of a state."""

    condition: str
    phase: ReplicaPhase
    """Phase that operators see, as long as the replica stays in the fleet."""
    keep_rank: int
    """The smaller, the rather it is kept if the pool has too many replicas."""


STATES: Mapping[MemberState, StateRow] = {
    MemberState.DRAINING: StateRow(
        "it finishes its requests, then exits", ReplicaPhase.DRAINING, 2
    ),
    MemberState.EXITED: StateRow("its process has exited", ReplicaPhase.STOPPED, 4),
    MemberState.PROVISIONING: StateRow(
        "its launcher waits for a machine, a GPU or an image", ReplicaPhase.PROVISIONING, 1
    ),
    MemberState.HUNG: StateRow(
        "it neither answers nor steps since its deadline", ReplicaPhase.FAILED, 3
    ),
    MemberState.NOT_WARM: StateRow("its warm-up failed", ReplicaPhase.FAILED, 0),
    MemberState.LOADING: StateRow("it runs, but does not serve", ReplicaPhase.LOADING, 0),
    MemberState.WARMING: StateRow(
        "it serves, but has not finished its warm-up", ReplicaPhase.WARMING, 0
    ),
    MemberState.SERVING: StateRow(
        "it serves: it can be in the rotation, or a spare", ReplicaPhase.READY, 0
    ),
}
"""All states. The first whose condition holds counts. The documentation shows this table."""

_LAUNCH_STATES = {
    LaunchState.DRAINING: MemberState.DRAINING,
    LaunchState.EXITED: MemberState.EXITED,
    LaunchState.PROVISIONING: MemberState.PROVISIONING,
}


class Member:
    """A replica of one pool during one reconciliation."""

    __slots__ = (
        "deadline",
        "held_reason",
        "in_rotation",
        "is_current",
        "is_known",
        "is_stopped",
        "leaving_reason",
        "may_serve",
        "replica",
        "serves_model",
        "state",
    )

    def __init__(
        self, replica: ObservedReplica, pool: DesiredPool, observed: ObservedFleet, now: float
    ) -> None:
        self.replica = replica
        self.deadline = hang_deadline(replica, pool.restart_limits, observed.observing_since)
        self.is_current = replica.generation == pool.generation
        self.serves_model = pool.serves_model
        self.is_known = replica.launcher not in observed.unavailable_launchers
        """Whether its launcher can list it now. Nothing is done to a replica of unknown state."""
        is_hung = self.is_known and now >= self.deadline.at
        self.state = _find_state(replica, pool.requires_warm_up, is_hung=is_hung)
        self.may_serve = (
            self.is_known
            and replica.state is LaunchState.RUNNING
            and replica.in_rotation
            and replica.ready_at is not None
        )
        """Whether it may serve requests, even if a health check of the controller says otherwise."""
        self.in_rotation = replica.in_rotation
        """Whether the rotation contains it once the actions decided so far are carried out."""
        self.leaving_reason = ""
        """Why it leaves the fleet; empty if it stays."""
        self.is_stopped = False
        """Whether it is killed now."""
        self.held_reason = ""
        """Why it is not taken out, although it is hung or leaves; empty if it need not be or is taken out."""

    @property
    def is_usable(self) -> bool:
        """Whether it can be in the rotation, or a spare."""
        return self.is_known and self.state is MemberState.SERVING

    @property
    def is_asleep(self) -> bool:
        """Whether it has freed its memory until a gateway wakes it up."""
        return self.replica.reported_state in SLEEP_STATES

    @property
    def is_available(self) -> bool:
        """Whether it serves the requests of all gateways, after it has woken up for them if it sleeps."""
        return self.is_usable and self.may_serve and self.replica.is_routed

    def sort_key(self) -> tuple[bool, int, bool, int, bool, bool, int, int]:
        """Return the order in which members are kept: those with the smallest key first.

        Of those in the rotation, the ones that sleep leave first.
        """
        replica = self.replica
        return (
            not self.is_current,
            0 if self.serves_model else replica.ordinal,
            not self.is_usable,
            STATES[self.state].keep_rank,
            not replica.in_rotation,
            self.is_asleep,
            -replica.generation,
            replica.ordinal,
        )


def _find_state(
    replica: ObservedReplica,
    requires_warm_up: bool,  # noqa: FBT001 - of the pool
    *,
    is_hung: bool,
) -> MemberState:
    launched = None if replica.state is None else _LAUNCH_STATES.get(replica.state)
    if launched is not None:
        return launched
    if is_hung:
        return MemberState.HUNG
    if requires_warm_up and replica.warm_up is WarmUpState.FAILED:
        return MemberState.NOT_WARM
    if not replica.is_serving:
        return MemberState.LOADING
    if requires_warm_up and replica.warm_up is not WarmUpState.SUCCEEDED:
        return MemberState.WARMING
    return MemberState.SERVING


def is_ready(replica: ObservedReplica, *, requires_warm_up: bool) -> bool:
    """Return whether a replica is in the rotation, can be there, and every gateway can send it requests."""
    state = _find_state(replica, requires_warm_up, is_hung=False)
    return state is MemberState.SERVING and replica.in_rotation and replica.is_routed


def describe_start(plan: RestartPlan, now: float) -> PhaseReport:
    """Describe a replica that does not run and shall be started."""
    phase = ReplicaPhase.FAILED if plan.has_failed else ReplicaPhase.PENDING
    wait_s = plan.starts_at - now
    when = f"starts again in {_format_seconds(wait_s)}" if wait_s > 0 else "starts now"
    is_first = plan.starts_at == -math.inf
    problem = ProblemKind.START if plan.has_failed else None if is_first else ProblemKind.CRASH
    return PhaseReport(phase, f"{plan.reason}; {when}", problem)


def describe_member(
    member: Member, pool: DesiredPool, observing_since: float, now: float
) -> PhaseReport:
    """Describe a replica that its launcher lists and that is not restarted."""
    replica, state = member.replica, member.state
    phase, problem, reason = STATES[state].phase, None, ""
    if state in {MemberState.DRAINING, MemberState.EXITED}:
        pass
    elif member.leaving_reason and not member.in_rotation:
        waits = "; a gateway still routes to it" if replica.is_routed_by_any else ""
        phase, reason = ReplicaPhase.DRAINING, member.leaving_reason + waits
    elif found := _find_problem(member, pool, observing_since, now):
        problem, detail = found
        phase, reason = _PROBLEM_PHASES.get(problem, phase), describe_problem(problem, detail)
    elif state is MemberState.SERVING and member.in_rotation and member.is_asleep:
        phase, reason = ReplicaPhase.SLEEPING, "it sleeps until a request wakes it up"
    elif state is MemberState.SERVING and member.in_rotation and not _is_available(replica):
        phase = ReplicaPhase.WARMING
    reason = reason or _explain(member, pool)
    held = f"; {member.held_reason}" if member.held_reason else ""
    return PhaseReport(phase, reason + held, problem)


_PROBLEM_PHASES = {
    ProblemKind.ENGINE: ReplicaPhase.FAILED,
    ProblemKind.SILENT: ReplicaPhase.LOADING,
    ProblemKind.DRAINED: ReplicaPhase.OUT_OF_SERVICE,
    ProblemKind.DRAINS: ReplicaPhase.OUT_OF_SERVICE,
    ProblemKind.EJECTED: ReplicaPhase.FAILED,
    ProblemKind.UNREACHABLE: ReplicaPhase.WARMING,
}
"""Phases that follow from a problem and not from the state."""


def _is_available(replica: ObservedReplica) -> bool:
    """Whether every gateway routes to a replica, or would if it were not full for a moment."""
    return replica.is_routed or replica.gateway_status is ReplicaStatus.BACKOFF


def _find_problem(
    member: Member, pool: DesiredPool, observing_since: float, now: float
) -> tuple[ProblemKind, str] | None:
    """Return the first cause for which a replica does not serve, with the detail of its sentence."""
    replica, state = member.replica, member.state
    if state is MemberState.PROVISIONING:
        return None
    if state is MemberState.HUNG:
        return ProblemKind.HUNG, member.deadline.reason
    answered_at = replica.last_response_at or -math.inf
    is_silent = now - max(answered_at, observing_since) >= SILENCE_S
    if is_silent and answered_at >= replica.started_at:
        return ProblemKind.SILENT, f"{pool.restart_limits.hang_timeout_s:g} s"
    if state is MemberState.NOT_WARM:
        return ProblemKind.WARM_UP, replica.warm_up_error
    if replica.reported_state == "failed":
        return ProblemKind.ENGINE, ""
    exited_at = replica.core_exited_at
    was_exit_seen = exited_at is not None and now - exited_at < CORE_EXIT_SHOWN_S
    if was_exit_seen or replica.reported_state == "restarting":
        return ProblemKind.CORE_EXIT, replica.core_exit or replica.activity
    return _find_gateway_problem(replica, state)


def _find_gateway_problem(
    replica: ObservedReplica, state: MemberState
) -> tuple[ProblemKind, str] | None:
    """Return why a replica whose process is well gets no requests."""
    is_serving = state is MemberState.SERVING
    match replica.gateway_status:
        case ReplicaStatus.DRAINING | ReplicaStatus.CORDONED if replica.gateway_reason.startswith(
            ("drained", "cordoned")
        ):
            return ProblemKind.DRAINED, replica.gateway_reason
        case ReplicaStatus.EJECTED if is_serving:
            return ProblemKind.EJECTED, replica.gateway_reason
        case ReplicaStatus.UNREACHABLE if is_serving and replica.in_rotation:
            return ProblemKind.UNREACHABLE, replica.gateway_reason
    if replica.reported_state == "draining":
        return ProblemKind.DRAINS, ""
    if state is not MemberState.LOADING:
        return None
    answered_at = replica.last_response_at or -math.inf
    if replica.ready_at is not None and answered_at > replica.ready_at:  # it may report it first
        problem = replica.serving_problem
        return ProblemKind.STOPPED_SERVING, f": {problem}" if problem else ""
    if replica.past_runs and replica.past_runs[-1].ready_at is not None:
        activity = f": {replica.activity}" if replica.activity else ""
        return ProblemKind.CRASH, f"{replica.past_runs[-1].reason}; it starts again{activity}"
    return None


def _explain(member: Member, pool: DesiredPool) -> str:
    """Return why a replica without a problem is in its state."""
    replica = member.replica
    match member.state:
        case MemberState.DRAINING:
            return replica.reason or "it finishes its requests"
        case MemberState.EXITED:
            return member.leaving_reason or replica.reason
        case MemberState.PROVISIONING:
            return replica.reason or "its launcher prepares its start"
        case MemberState.WARMING:
            return "it answers its warm-up requests"
        case MemberState.SERVING:
            if not member.in_rotation:
                return "it is a spare"
            if not replica.is_routed:
                if replica.gateway_status is ReplicaStatus.BACKOFF:
                    return "it is full, and gets fewer requests for a moment"
                return "not every gateway routes to it yet"
            return "every gateway routes to it" if pool.serves_model else "it accepts requests"
        case _:
            starts = "it loads its model" if pool.serves_model else "it starts"
            problem = f"; {replica.serving_problem}" if replica.serving_problem else ""
            return (replica.activity or starts) + problem


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1.0 else f"{seconds:.1g} s"
