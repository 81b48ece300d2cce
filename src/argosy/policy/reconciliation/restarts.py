"""When a replica that has exited is started again: at once, after a back-off, or rarely after many failed starts."""

from __future__ import annotations

import math
from typing import NamedTuple

from argosy.policy.reconciliation.fleet_state import (
    LaunchState,
    ObservedReplica,
    ReplicaRun,
    RestartLimits,
    WarmUpState,
)


class RestartPlan(NamedTuple):
    """When a replica is started again, and why not earlier."""

    starts_at: float
    """Seconds since the epoch."""
    has_failed: bool
    """Whether the limit of failed starts is reached. The next one is attempted because the cause may have passed."""
    reason: str
    """Cause of the last end, such as `it crashed 3 times, last because it exited with status 3`."""


def ended_run(replica: ObservedReplica) -> ReplicaRun | None:
    """Return the run of a replica that has exited; None if it runs, or if the launcher does not list it."""
    if replica.state is not LaunchState.EXITED:
        return None
    has_served = replica.ready_at is not None and replica.warm_up is not WarmUpState.FAILED
    return ReplicaRun(
        attempt=replica.attempt,
        started_at=replica.started_at,
        ready_at=replica.ready_at if has_served else None,
        exited_at=replica.started_at if replica.exited_at is None else replica.exited_at,
        reason=replica.start_error or replica.warm_up_error or replica.reason or "it exited",
    )


def plan_restart(replica: ObservedReplica, limits: RestartLimits) -> RestartPlan:
    """Decide when a replica that does not run is started.

    The first restart after a healthy run is immediate. Consecutive short runs back off, and a replica is given up after
    `max_failed_starts` runs in a row that never served. One that never served before is given up at once if it states
    why it cannot start.
    """
    last = ended_run(replica)
    runs = [run for run in replica.past_runs if last is None or run.attempt != last.attempt]
    if last is not None:
        runs.append(last)
    if not runs:
        return RestartPlan(-math.inf, has_failed=False, reason="it does not exist yet")
    newest = runs[-1]
    failed_starts = short_runs = 0
    for run in reversed(runs):
        if run.ready_at is not None:
            break
        failed_starts += 1
    for run in reversed(runs):
        if run.ready_at is not None and run.exited_at - run.ready_at >= limits.healthy_after_s:
            break
        short_runs += 1
    cannot_start = bool(replica.start_error) and failed_starts == len(runs)
    if cannot_start or failed_starts >= limits.max_failed_starts:
        attempts = "a start" if failed_starts == 1 else f"{failed_starts} starts in a row"
        return RestartPlan(
            newest.exited_at + limits.give_up_retry_interval_s,
            has_failed=True,
            reason=f"{attempts} failed: {newest.reason}",
        )
    if short_runs <= 1:
        return RestartPlan(newest.exited_at, has_failed=False, reason=newest.reason)
    backoff_s = limits.base_backoff_s * 2.0 ** min(short_runs - 2, 30)
    return RestartPlan(
        newest.exited_at + min(backoff_s, limits.max_backoff_s),
        has_failed=False,
        reason=f"it crashed {short_runs} times, last: {newest.reason}",
    )
