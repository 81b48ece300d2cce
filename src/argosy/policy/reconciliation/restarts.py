"""When replicas start: those that have exited at once, after a back-off or rarely, and new ones a few at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import takewhile
from operator import attrgetter, itemgetter
from typing import NamedTuple

from argosy.policy.reconciliation.actions import Action, PhaseReport, ReplicaPhase, Start
from argosy.policy.reconciliation.fleet_state import (
    DesiredFleet,
    LaunchState,
    ObservedFleet,
    ObservedReplica,
    ReplicaRun,
    RestartLimits,
    WarmUpState,
)

MAX_REFUSAL_DELAY_S = 50.0
"""Longest time after which an action that a launcher refuses is tried again, about 20 times in ten minutes."""
START_SLOT_S = 60.0
"""Time after which a start that has not ended holds up no others. It waits for a download or a disk, not for cores."""


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
        reason=replica.start_error
        or replica.warm_up_error
        or replica.stop_reason
        or replica.reason
        or "it exited",
    )


def plan_restart(replica: ObservedReplica, limits: RestartLimits) -> RestartPlan:
    """Decide when a replica that does not run is started.

    The first restart after a healthy run is immediate. Consecutive short runs back off, and a replica is given up after
    `max_failed_starts` runs in a row that never served. One that never served before is given up at once if it states
    why it cannot start. A start that the launcher refuses is no run, and is repeated after a back-off of its own.
    """
    last = ended_run(replica)
    runs = [run for run in replica.past_runs if last is None or run.attempt != last.attempt]
    if last is not None:
        runs.append(last)
    if not runs:
        return RestartPlan(-math.inf, has_failed=False, reason="it does not exist yet")
    newest = runs[-1]
    refused = sum(1 for _ in takewhile(attrgetter("was_refused"), reversed(runs)))
    if refused:
        times = f" {refused} times" if refused > 1 else ""
        return RestartPlan(
            newest.exited_at
            + min(limits.base_backoff_s * 2.0 ** (refused - 1), MAX_REFUSAL_DELAY_S),
            has_failed=refused >= limits.max_failed_starts,
            reason=f"its start was refused{times}: {newest.reason}",
        )
    runs = [run for run in runs if not run.was_refused]
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


def limit_starts(
    launcher: str,
    cores: int,
    desired: DesiredFleet,
    observed: ObservedFleet,
    actions: Iterable[Action],
    now: float,
) -> tuple[dict[str, PhaseReport], float]:
    """Find the new replicas that wait until others on their machine have started, so that what serves has cores.

    As many may start at once as the machine has cores, and half as many while replicas serve. Pools with few running
    replicas come first. Gateways, and replicas that have served before, do not wait.

    Returns their phases by name, and when the next one may start at the latest.
    """
    gateways = {pool.name for pool in desired.pools if not pool.serves_model}
    replicas = {each.name: each for each in observed.replicas if each.launcher == launcher}
    running = [
        each
        for each in replicas.values()
        if each.state is LaunchState.RUNNING and each.pool not in gateways
    ]
    serves = any(each.in_rotation and each.is_serving for each in running)
    limit = max(1, cores // 2 if serves else cores)
    warming = {WarmUpState.NOT_STARTED, WarmUpState.RUNNING}
    warmed_up = {pool.name for pool in desired.pools if pool.requires_warm_up}
    slot_ends = [
        each.started_at + START_SLOT_S
        for each in running
        if (each.ready_at is None or (each.pool in warmed_up and each.warm_up in warming))
        and not _has_served(each)
        and each.started_at + START_SLOT_S > now
    ]
    num_running = Counter(each.pool for each in running)
    starts: list[tuple[int, str]] = []
    for action in actions:
        if not isinstance(action, Start) or action.launcher != launcher:
            continue
        replica = replicas.get(action.replica)
        if action.pool not in gateways and not (replica is not None and _has_served(replica)):
            starts.append((num_running[action.pool], action.replica))
            num_running[action.pool] += 1
    starts.sort(key=itemgetter(0))
    waiting = starts[max(0, limit - len(slot_ends)) :]
    count = "1 new replica starts" if limit == 1 else f"{limit} new replicas start"
    report = PhaseReport(ReplicaPhase.PENDING, f"it waits for its turn: at most {count} at once")
    wake_at = min(slot_ends, default=math.inf) if waiting else math.inf
    return {name: report for _, name in waiting}, wake_at


def _has_served(replica: ObservedReplica) -> bool:
    last = ended_run(replica)
    runs = replica.past_runs if last is None else (*replica.past_runs, last)
    return any(run.ready_at is not None for run in runs)
