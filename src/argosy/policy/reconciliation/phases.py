"""Phase of each replica, with a sentence that says why it is in it."""

from __future__ import annotations

from argosy.policy.reconciliation.actions import PhaseReport, ReplicaPhase
from argosy.policy.reconciliation.desired import DesiredPool
from argosy.policy.reconciliation.member import Member
from argosy.policy.reconciliation.observed import LaunchState, WarmUpState
from argosy.policy.reconciliation.restarts import RestartPlan

_ROUTED = PhaseReport(ReplicaPhase.READY, "every gateway routes to it")
_ACCEPTS = PhaseReport(ReplicaPhase.READY, "it accepts requests")
_SPARE = PhaseReport(ReplicaPhase.READY, "it is a spare")


def describe_start(plan: RestartPlan, now: float) -> PhaseReport:
    """Describe a replica that does not run and shall be started."""
    phase = ReplicaPhase.FAILED if plan.has_failed else ReplicaPhase.PENDING
    wait_s = plan.starts_at - now
    when = f"starts again in {_format_seconds(wait_s)}" if wait_s > 0 else "starts now"
    return PhaseReport(phase, f"{plan.reason}; {when}")


def describe_member(member: Member, pool: DesiredPool) -> PhaseReport:
    """Describe a replica that its launcher lists and that is not restarted."""
    replica = member.replica
    if replica.state is LaunchState.DRAINING:
        report = PhaseReport(ReplicaPhase.DRAINING, replica.reason or "it finishes its requests")
    elif replica.state is LaunchState.EXITED:
        report = PhaseReport(ReplicaPhase.STOPPED, member.leaving_reason or replica.reason)
    elif member.leaving_reason and not member.in_rotation:
        waits = "; a gateway still routes to it" if replica.is_routed_by_any else ""
        report = PhaseReport(ReplicaPhase.DRAINING, member.leaving_reason + waits)
    elif replica.state is LaunchState.PROVISIONING:
        reason = replica.reason or "its launcher prepares its start"
        report = PhaseReport(ReplicaPhase.PROVISIONING, reason)
    elif member.is_hung:
        report = PhaseReport(ReplicaPhase.FAILED, member.deadline.reason)
    else:
        report = _describe_running(member, pool)
    if member.held_reason:
        report = PhaseReport(report.phase, f"{report.reason}; {member.held_reason}")
    return report


def _describe_running(member: Member, pool: DesiredPool) -> PhaseReport:
    replica = member.replica
    if not replica.is_serving:
        starts = "it loads its model" if pool.serves_model else "it starts"
        reason = starts if replica.ready_at is None else "it has stopped serving"
        return PhaseReport(ReplicaPhase.LOADING, replica.activity or reason)
    if pool.requires_warm_up and replica.warm_up is not WarmUpState.SUCCEEDED:
        failed = replica.warm_up is WarmUpState.FAILED
        error = f"its warm-up failed: {replica.warm_up_error}"
        return PhaseReport(
            ReplicaPhase.FAILED if failed else ReplicaPhase.WARMING,
            error if failed else "it answers its warm-up requests",
        )
    if not member.in_rotation:
        return _SPARE
    if not replica.is_routed:
        return PhaseReport(ReplicaPhase.WARMING, "not every gateway routes to it yet")
    return _ROUTED if pool.serves_model else _ACCEPTS


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1.0 else f"{seconds:.1g} s"
