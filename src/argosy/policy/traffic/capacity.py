"""Capacity clamp: a version gets no larger share of the traffic than its ready replicas can serve."""

from __future__ import annotations


def clamp_share(
    wanted: float, *, stable_ready: int, candidate_ready: int, needed: int, may_exceed: bool
) -> float:
    """Return the share of the candidate that both versions have the ready replicas for.

    If the stable version is short of replicas, the candidate takes what it has capacity for. What fits on neither
    stays with the stable version, where the queue or a fallback pool deals with it.

    Args:
        wanted: Share that the rollout asks for.
        stable_ready: Ready replicas of the stable version.
        candidate_ready: Ready replicas of the candidate.
        needed: Replicas that the whole demand needs.
        may_exceed: Whether the candidate may get more than `wanted`. False if it must not serve, because it was
            rejected or has not been checked.
    """
    if needed <= 0:
        return wanted if candidate_ready or not wanted else 0.0
    limit = min(1.0, candidate_ready / needed)
    if may_exceed:
        wanted = max(wanted, 1.0 - stable_ready / needed)
    return min(wanted, limit)
