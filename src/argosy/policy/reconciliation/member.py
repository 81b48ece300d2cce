"""A replica with what follows from its observed state for the reconciliation of its pool."""

from __future__ import annotations

from collections.abc import Mapping

from argosy.policy.reconciliation.desired import DesiredPool
from argosy.policy.reconciliation.liveness import hang_deadline
from argosy.policy.reconciliation.observed import (
    LaunchState,
    ObservedFleet,
    ObservedReplica,
    WarmUpState,
)

_STATES: Mapping[LaunchState | None, int] = {
    LaunchState.RUNNING: 0,
    LaunchState.PROVISIONING: 1,
    LaunchState.DRAINING: 2,
    LaunchState.EXITED: 4,
}
_HUNG = 3
"""Ranks of states: the further from serving, the larger."""


class Member:
    """A replica of one pool during one reconciliation."""

    __slots__ = (
        "deadline",
        "has_failed_warm_up",
        "held_reason",
        "in_rotation",
        "is_available",
        "is_current",
        "is_hung",
        "is_known",
        "is_stopped",
        "is_usable",
        "leaving_reason",
        "may_serve",
        "replica",
    )

    def __init__(
        self, replica: ObservedReplica, pool: DesiredPool, observed: ObservedFleet, now: float
    ) -> None:
        self.replica = replica
        self.deadline = hang_deadline(replica, pool.restart_limits, observed.observing_since)
        self.is_current = replica.generation == pool.generation
        self.is_known = replica.launcher not in observed.unavailable_launchers
        """Whether its launcher can list it now. Nothing is done to a replica of unknown state."""
        is_running = self.is_known and replica.state is LaunchState.RUNNING
        self.is_hung = is_running and now >= self.deadline.at
        self.may_serve = is_running and replica.in_rotation and replica.ready_at is not None
        """Whether it may serve requests, even if a health check of the controller says otherwise."""
        self.has_failed_warm_up = pool.requires_warm_up and replica.warm_up is WarmUpState.FAILED
        self.is_usable = (
            is_running
            and replica.is_serving
            and not self.is_hung
            and (not pool.requires_warm_up or replica.warm_up is WarmUpState.SUCCEEDED)
        )
        """Whether it can be in the rotation, or a spare."""
        self.is_available = self.is_usable and self.may_serve and replica.is_routed
        """Whether it serves the requests of all gateways."""
        self.in_rotation = replica.in_rotation
        """Whether the rotation contains it once the actions decided so far are carried out."""
        self.leaving_reason = ""
        """Why it leaves the fleet; empty if it stays."""
        self.is_stopped = False
        """Whether it is killed now."""
        self.held_reason = ""
        """Why it is not taken out, although it is hung or leaves; empty if it need not be or is taken out."""

    def sort_key(self) -> tuple[bool, bool, int, bool, int, int]:
        """Return the order in which members are kept: those with the smallest key first."""
        replica = self.replica
        return (
            not self.is_current,
            not self.is_usable,
            _HUNG if self.is_hung else _STATES[replica.state],
            not replica.in_rotation,
            -replica.generation,
            replica.ordinal,
        )
