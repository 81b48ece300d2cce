"""Whether a replica is hung: it runs, but neither answers nor steps."""

from __future__ import annotations

import math
from typing import NamedTuple

from argosy.policy.reconciliation.observed import LaunchState, ObservedReplica
from argosy.policy.restart_limits import RestartLimits


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
