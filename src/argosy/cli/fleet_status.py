"""`argosy status`, `events` and `logs`: what a fleet does, as its controller recorded it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.account_lookup import StoreUrl
from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.fleet_progress import read_status
from argosy.cli.fleet_target import FilesOption, FleetOption, open_fleet, parse_revision
from argosy.cli.output import JsonOutput, print_json, print_records, strip_control_characters
from argosy.cli.rollout_report import shorten_digests
from argosy.cli.timestamps import format_timestamp

if TYPE_CHECKING:
    from argosy.fleet.control import FleetStatus

FOLLOW_INTERVAL_S = 1.0


def status(
    *,
    files: FilesOption = None,
    fleet: FleetOption = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with status 1 unless all is as declared.")
    ] = False,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Show the pools and replicas of a fleet, each with its phase and the reason."""
    with open_fleet(files, fleet, store) as target:
        shown = read_status(target)
    if json:
        print_json(shown)
    else:
        typer.echo(f"Fleet {shown.fleet}, revision {shown.revision}, {_describe_leader(shown)}")
        for pool in shown.pools:
            typer.echo(f"  {pool.name}: {pool.ready} of {pool.desired} replicas are ready")
            if pool.scaling is not None:
                typer.echo(f"    autoscaler: {pool.scaling.reason}")
            if pool.rollout:
                typer.echo(f"    rollout: {shorten_digests(pool.rollout)}")
        now = time.time()
        print_records(
            shown.replicas,
            ("replica", "phase", "for", "requests", "node", "reason"),
            lambda record: (
                record.name,
                record.phase,
                f"{max(0, now - record.phase_since):.0f} s",
                record.running,
                record.node,
                record.reason,
            ),
            "No replicas exist.",
            json=False,
        )
    if exit_code and not shown.is_as_declared:
        raise typer.Exit(EXIT_FAILURE)


def _describe_leader(shown: FleetStatus) -> str:
    if shown.has_leader:
        host, _, process = shown.leader.partition("/")
        return f"led by process {process.partition('/')[0]} of {host} (epoch {shown.epoch})"
    since = "" if shown.lease_age_s is None else f" for {shown.lease_age_s:.0f} s"
    return f"without a controller{since}; start one with `argosy up`"


def events(
    *,
    files: FilesOption = None,
    fleet: FleetOption = None,
    replica: Annotated[str | None, typer.Option(help="Only events of this replica.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for further events.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Number of past events.")] = 50,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """List what controllers did with a fleet, and why. With --json, one event per line."""
    import msgspec

    from argosy.fleet.control import SCALING_DECISION

    with open_fleet(files, fleet, store) as target:
        fleets, last = target.store.fleets, 0
        while True:
            for event in fleets.list_events(target.name, after=last, limit=limit, replica=replica):
                last = event.number
                if json:
                    typer.echo(msgspec.json.encode(event).decode())
                    continue
                at = format_timestamp(event.at, "seconds")
                is_shown = event.outcome not in {"", "ok"} and event.kind != SCALING_DECISION
                outcome = f" -> {event.outcome}" if is_shown else ""
                line = f"{at}  {event.kind}  {event.replica or event.pool}  {event.reason}{outcome}"
                typer.echo(strip_control_characters(line))
            if not follow:
                return
            time.sleep(FOLLOW_INTERVAL_S)


def logs(
    pool: Annotated[str, typer.Argument(help="Name of a pool or a replica.")],
    *,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Lines per replica.")] = 50,
    files: FilesOption = None,
    fleet: FleetOption = None,
    store: StoreUrl = None,
) -> None:
    """Print the end of the logs of a pool's replicas. They outlive their processes."""
    from argosy.fleet.control import open_launcher
    from argosy.fleet.launchers import LaunchError

    with open_fleet(files, fleet, store) as target:
        replicas = [
            record for record in read_status(target).replicas if pool in {record.pool, record.name}
        ]
        if not replicas:
            fail(f"there is no pool or replica {pool!r}; see `argosy status`", EXIT_FAILURE)

        config = parse_revision(target.require_latest())

        async def read_logs() -> list[bytes]:
            launchers = {
                name: open_launcher(name, target.folder, config)
                for name in {record.launcher for record in replicas}
            }
            try:
                return [
                    await launchers[record.launcher].read_log(record.name, lines * 2000)
                    for record in replicas
                ]
            finally:
                for launcher in launchers.values():
                    await launcher.close()

        try:
            logs = asyncio.run(read_logs())
        except LaunchError as error:
            fail(str(error))
        for record, log in zip(replicas, logs, strict=True):
            text = log.decode(errors="replace")
            for line in text.splitlines()[-lines:]:
                typer.echo(strip_control_characters(f"{record.name}  {line}"))
