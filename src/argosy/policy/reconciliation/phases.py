"""Phase of each replica, with a sentence that says why it is in it."""

from __future__ import annotations

from argosy.policy.reconciliation.actions import PhaseReport, ReplicaPhase
from argosy.policy.reconciliation.desired import DesiredPool
from argosy.policy.reconciliation.member import STATES, Member, MemberState
from argosy.policy.reconciliation.restarts import RestartPlan


def describe_start(plan: RestartPlan, now: float) -> PhaseReport:
    """Describe a replica that does not run and shall be started."""
    phase = ReplicaPhase.FAILED if plan.has_failed else ReplicaPhase.PENDING
    wait_s = plan.starts_at - now
    when = f"starts again in {_format_seconds(wait_s)}" if wait_s > 0 else "starts now"
    return PhaseReport(phase, f"{plan.reason}; {when}")


def describe_member(member: Member, pool: DesiredPool) -> PhaseReport:
    """Describe a replica that its launcher lists and that is not restarted."""
    replica, state = member.replica, member.state
    phase, reason = STATES[state].phase, _explain(member, pool)
    if state in {MemberState.DRAINING, MemberState.EXITED}:
        pass
    elif member.leaving_reason and not member.in_rotation:
        waits = "; a gateway still routes to it" if replica.is_routed_by_any else ""
        phase, reason = ReplicaPhase.DRAINING, member.leaving_reason + waits
    elif state is MemberState.SERVING and member.in_rotation and not replica.is_routed:
        phase = ReplicaPhase.WARMING
    return PhaseReport(phase, f"{reason}; {member.held_reason}" if member.held_reason else reason)


def _explain(member: Member, pool: DesiredPool) -> str:
    """Return why a replica is in its state."""
    replica = member.replica
    match member.state:
        case MemberState.DRAINING:
            return replica.reason or "it finishes its requests"
        case MemberState.EXITED:
            return member.leaving_reason or replica.reason
        case MemberState.PROVISIONING:
            return replica.reason or "its launcher prepares its start"
        case MemberState.HUNG:
            return member.deadline.reason
        case MemberState.NOT_WARM:
            return f"its warm-up failed: {replica.warm_up_error}"
        case MemberState.LOADING:
            starts = "it loads its model" if pool.serves_model else "it starts"
            is_first = replica.ready_at is None
            return replica.activity or (starts if is_first else "it has stopped serving")
        case MemberState.WARMING:
            return "it answers its warm-up requests"
        case MemberState.SERVING:
            if not member.in_rotation:
                return "it is a spare"
            if not replica.is_routed:
                return "not every gateway routes to it yet"
            return "every gateway routes to it" if pool.serves_model else "it accepts requests"


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1.0 else f"{seconds:.1g} s"
