"""Takeover: which requests of one version of a model the pool of the stable version serves instead."""

from __future__ import annotations

from typing import Any

from argosy.policy.placement.pool import PlacementPool
from argosy.policy.placement.request import PlacementRequest

WITHDRAWN = "the version has no share of the users"
UNAVAILABLE = "no replica of the version is available"
NONE_LEFT = "no other replica of the version can serve the request"

_Pool = PlacementPool[Any]


def find_takeover_reason(pool: _Pool, now: float) -> str:
    """Return why requests that do not run leave the pool; empty if they stay, as in a pool without takeover."""
    if pool.takeover is None:
        return ""
    if pool.is_withdrawn:
        return WITHDRAWN
    return UNAVAILABLE if not pool.is_available() and pool.takeover.may_recover(now) else ""


def may_move(pool: _Pool, request: PlacementRequest, now: float) -> bool:
    """Whether a request without a running attempt may go to the pool that takes over.

    A response that has begun goes there only if it can be resumed exactly or starts from its beginning, or if no
    replica of this pool can resume it either. If the arithmetic of the response is unknown, the versions may differ in
    the model, so it stays.
    """
    takeover = pool.takeover
    if takeover is None or not request.output_tokens:
        return takeover is not None
    return bool(request.arithmetic_id) and (
        not request.is_stream
        or takeover.can_resume(request, now)
        or not pool.can_resume(request, now)
    )


def can_be_served(pool: _Pool, request: PlacementRequest, now: float) -> bool:
    """Whether a displaced request may go to the pool that takes over, and that one has replicas or may have soon."""
    takeover = pool.takeover
    return takeover is not None and takeover.may_recover(now) and may_move(pool, request, now)


def has_replica_left(pool: _Pool, request: PlacementRequest) -> bool:
    """Whether the pool has a replica for a displaced request, free or not, that has not failed it."""
    return not pool.is_withdrawn and any(
        replica.name not in request.failed
        and replica.name not in request.unsuitable
        and not replica.health.is_down
        and replica.has_arithmetic(request.arithmetic_id)
        for replica in pool.eligible_replicas()
    )
