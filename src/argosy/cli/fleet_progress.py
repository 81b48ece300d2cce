"""Waiting for a fleet, with live progress on a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import typer

from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.fleet_target import FleetTarget
from argosy.cli.output import shorten_digests

if TYPE_CHECKING:
    from argosy.deployment import FleetStatus, PoolStatus, ReplicaRecord

POLL_INTERVAL_S = 0.5
MAX_DESCRIBED = 3
"""Most replicas that an error describes."""
SETTLED_S = 5.0
"""Time after which a replica that does not exist yet waits for others, and not for the controller."""
CONTROLLER_START_S = 60.0
"""Longest wait for a new controller to lead, which reads the store and lists all replicas before."""
CONTROLLER_EXIT_S = 5.0
"""Longest wait for the exit of the controller of a fleet in which nothing runs any more."""


def wait_until_ready(target: FleetTarget, revision: int, timeout_s: float, *, quiet: bool) -> None:
    """Wait until a controller finds the fleet as declared.

    Ends the command with status 1 after the timeout, if a start fails, or if another revision is applied meanwhile.
    """
    from rich.live import Live
    from rich.table import Table

    started_at = time.monotonic()
    shown: dict[str, str] = {}
    with Live(auto_refresh=False, transient=True) as live:
        is_terminal = live.console.is_terminal
        while True:
            status = target.read_status()
            waited_s = time.monotonic() - started_at
            if status.revision != revision:
                live.stop()
                _fail_superseded(target, revision)
            # A controller that was killed does not renew its lease, and what it recorded may be gone.
            age_s = status.lease_age_s
            if not (is_terminal or quiet):
                _print_changes(status.replicas, shown)
            if status.is_as_declared and age_s is not None and age_s < waited_s:
                break
            if failed := _find_hopeless(status, waited_s):
                live.stop()
                reasons = _describe_replicas(failed)
                fail(f"{reasons}; correct it, and repeat the command", EXIT_FAILURE)
            rejected = [
                pool for pool in status.pools if pool.rollout is not None and pool.rollout.can_retry
            ]
            if rejected:
                live.stop()
                fail(_describe_rollouts(rejected), EXIT_FAILURE)
            if is_terminal and not quiet:
                table = Table("replica", "phase", "reason", box=None)
                for record in status.replicas:
                    table.add_row(record.name, record.phase, record.reason)
                live.update(table, refresh=True)
            if waited_s >= timeout_s:
                live.stop()
                _fail_unready(status)
            time.sleep(POLL_INTERVAL_S)
    if not quiet:
        replicas = sum(pool.ready for pool in status.pools)
        where = f" at {status.url}" if status.url else ""
        count = "1 replica" if replicas == 1 else f"{replicas} replicas"
        typer.echo(f"The fleet {target.name} is ready{where} ({count}).", err=True)


def wait_until_led(target: FleetTarget) -> None:
    """Wait until a controller of this version leads, or end the command."""
    from argosy.version import VERSION

    deadline = time.monotonic() + CONTROLLER_START_S
    while True:
        status = target.read_status()
        if status.has_leader and status.version == VERSION:
            return
        if time.monotonic() >= deadline:
            fail(
                f"no controller of version {VERSION} leads after {CONTROLLER_START_S:g} s; what serves, serves on."
                f" See {target.folder}/controller.log, or start the earlier version's with its `argosy up`",
                EXIT_FAILURE,
            )
        time.sleep(POLL_INTERVAL_S)


def wait_until_gone(target: FleetTarget, revision: int, timeout_s: float) -> None:
    """Wait until no replica and no controller of `argosy up` is left.

    Ends the command with status 1 after the timeout, or if another revision is applied meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    empty_since: float | None = None
    while True:
        status, now = target.read_status(), time.monotonic()
        if status.revision != revision:
            _fail_superseded(target, revision)
        if not status.replicas:
            empty_since = now if empty_since is None else empty_since
            # Another controller than that of `argosy up` leads the empty fleet on.
            has_controller = bool(status.leader) and target.folder.is_dir()
            if not has_controller or now >= empty_since + CONTROLLER_EXIT_S:
                return
        elif now >= deadline:
            left = _describe_replicas(status.replicas)
            fail(f"still running after {timeout_s:g} s: {left}", EXIT_FAILURE)
        time.sleep(POLL_INTERVAL_S)


def _print_changes(replicas: Sequence[ReplicaRecord], shown: dict[str, str]) -> None:
    """Print a line for each replica whose phase has changed."""
    for record in replicas:
        if shown.get(record.name) != record.phase:
            shown[record.name] = record.phase
            reason = f" ({record.reason})" if record.reason else ""
            typer.echo(f"{record.name}: {record.phase}{reason}", err=True)


def _find_hopeless(status: FleetStatus, waited_s: float) -> list[ReplicaRecord]:
    """Return the replicas of versions of which none can start, once all starts have ended since the command began.

    Those that do not exist yet wait for others to exit or to become ready. If none of these does, they count as well.
    """
    now = time.time()
    left = [each for each in status.replicas if each.phase != "ready"]
    failed = [
        each
        for each in left
        if each.phase == "failed" and each.ready_at is None and each.phase_since >= now - waited_s
    ]
    waiting = [each for each in left if not each.launcher and now - each.phase_since > SETTLED_S]
    if len({each.name for each in (*failed, *waiting)}) < len(left):
        return []
    serving = {(each.pool, each.generation) for each in status.replicas if each.phase == "ready"}
    return [each for each in failed if (each.pool, each.generation) not in serving]


def _fail_unready(status: FleetStatus) -> None:
    waiting = [
        _describe_replicas([each for each in status.replicas if each.phase != "ready"]),
        _describe_rollouts(status.pools),
    ]
    unobserved = "no controller has carried out the revision yet; `argosy up` starts one"
    fail("; ".join(filter(None, waiting)) or unobserved, EXIT_FAILURE)


def _fail_superseded(target: FleetTarget, revision: int) -> NoReturn:
    latest = target.require_latest()
    fail(
        f"{latest.author} applied revision {latest.number} meanwhile, so revision {revision} is not in force any more;"
        " see `argosy history`",
        EXIT_FAILURE,
    )


def _describe_replicas(records: Sequence[ReplicaRecord]) -> str:
    """Describe replicas, those first that failed, and count those beyond `MAX_DESCRIBED`."""
    ordered = sorted(records, key=lambda each: each.phase != "failed")
    described = [f"{each.name} is {each.phase}: {each.reason}" for each in ordered[:MAX_DESCRIBED]]
    if len(records) > MAX_DESCRIBED:
        described.append(f"and {len(records) - MAX_DESCRIBED} more, see `argosy status`")
    return "; ".join(described)


def _describe_rollouts(pools: Sequence[PoolStatus]) -> str:
    return "; ".join(
        f"pool {pool.pool}: {shorten_digests(pool.rollout.summary)}"
        for pool in pools
        if pool.rollout is not None and (pool.rollout.is_running or pool.rollout.can_retry)
    )
