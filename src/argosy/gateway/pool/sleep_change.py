"""Requests that put a native replica to sleep or wake it up, and their effect on its status."""

from __future__ import annotations

import asyncio
import time

from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.upstream import UpstreamError, fetch_response

CHANGE_TIMEOUT_S = 600.0
"""Time in which a replica must free or allocate its memory, with the end of its running requests."""


async def change_sleep(replica: ReplicaEndpoint, level: int, deadline_s: float | None) -> None:
    """Put a replica to sleep at a level, or wake it up with level 0. Returns when that is done.

    Its status changes at once, so that no request is sent to it while it falls asleep.

    Args:
        replica: A native replica.
        level: Level of sleep, see `LoadResponse.sleep_level`.
        deadline_s: Time after which running requests end that keep it awake. None lets them finish.

    Raises:
        UpstreamError: The replica cannot be reached, or has refused.
        TimeoutError: It has not answered in time.
    """
    path = "/wake_up"
    if level:
        path = f"/sleep?level={level}" + (
            "" if deadline_s is None else f"&deadline_s={deadline_s:g}"
        )
        _set_state(replica, "sleeping")
    upstream = replica.upstream
    async with asyncio.timeout(CHANGE_TIMEOUT_S):
        request = upstream.build_request(b"POST", path.encode(), b"", [])
        status, body = await fetch_response(upstream, request)
    if status != 200:
        text = body.decode(errors="replace")[:200]
        raise UpstreamError(f"the replica answered {status} to {path}: {text}")
    _set_state(replica, "sleeping" if level else "ready")


def _set_state(replica: ReplicaEndpoint, state: str) -> None:
    replica.health.on_reported_state(state, time.monotonic())
    replica.on_capacity_change()
