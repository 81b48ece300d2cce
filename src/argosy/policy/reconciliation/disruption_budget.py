"""How many replicas of a pool may be taken out of the rotation at once, whatever the reason."""

from __future__ import annotations

from collections.abc import Iterable

from argosy.policy.reconciliation.desired import DesiredPool
from argosy.policy.reconciliation.member import Member


class DisruptionBudget:
    """Counts the replicas of one pool that serve, and refuses to take out too many of them.

    A usable replica is taken out only if enough *available* ones remain, to which every gateway routes. For a replica
    that the health check finds unusable, enough have to remain that *may* serve, because the health check can be wrong
    about all of them.
    """

    def __init__(self, pool: DesiredPool, members: Iterable[Member]) -> None:
        self._pool = pool
        self._num_available = self._num_serving = 0
        for member in members:
            self._num_available += member.is_available
            self._num_serving += member.may_serve

    def take_out(self, member: Member, *, replaces_first: bool) -> bool:
        """Count a member that leaves the rotation or the fleet. Return False if it has to stay for now.

        Args:
            member: The member.
            replaces_first: Whether one that is usable leaves only if the rotation is complete without it.
        """
        tolerance = 0 if member.is_usable and replaces_first else self._pool.max_unavailable
        return self._take_out(member, tolerance)

    def take_out_failed(self, member: Member) -> bool:
        """Count a hung member that is restarted in place. Return False if it has to stay for now."""
        return self._take_out(member, max(1, self._pool.max_unavailable))

    def _take_out(self, member: Member, tolerance: int) -> bool:
        if not member.may_serve:
            return True
        min_remaining = self._pool.replicas - tolerance
        if member.is_usable:
            if self._num_available - member.is_available < min_remaining:
                return False
        elif self._num_serving - 1 < min_remaining:
            return False
        self._num_available -= member.is_available
        self._num_serving -= 1
        return True
