"""`argosy status`, `events` and `logs`: what a fleet does, as its controller recorded it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.account_lookup import StoreUrl
from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.fleet_reader import FleetGatewayUrl, open_fleet_reader
from argosy.cli.fleet_target import FilesOption, FleetOption
from argosy.cli.output import JsonOutput, print_json, print_records, strip_control_characters
from argosy.cli.quantities import format_timestamp
from argosy.cli.rollout_report import shorten_digests
from argosy.cli.server_client import GatewayApiKey

if TYPE_CHECKING:
    from argosy.deployment import FleetStatus

FOLLOW_INTERVAL_S = 1.0


def status(
    *,
    files: FilesOption = None,
    fleet: FleetOption = None,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="Exit with status 1 unless a controller keeps all as declared."
        ),
    ] = False,
    store: StoreUrl = None,
    url: FleetGatewayUrl = None,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Show the pools and replicas of a fleet, each with its phase and the reason.

    It shows the fleet of `argosy serve` too. With --json, the output is that of GET /admin/fleet.
    """
    with open_fleet_reader(files, fleet, store, url, api_key) as reader:
        shown = reader.read_fleet()
    if json:
        print_json(shown)
    else:
        _print_fleet(shown)
    is_kept = shown.has_leader or not _declares_replicas(shown)
    if exit_code and not (shown.is_as_declared and is_kept):
        raise typer.Exit(EXIT_FAILURE)


def _declares_replicas(shown: FleetStatus) -> bool:
    return bool(shown.pools) or shown.gateways is not None


def _print_fleet(shown: FleetStatus) -> None:
    typer.echo(f"Fleet {shown.fleet}, revision {shown.revision}, {_describe_leader(shown)}")
    for pool in shown.pools:
        typer.echo(
            f"  {pool.pool}: {pool.ready} of {pool.desired} replicas of {pool.model} are ready"
        )
        if pool.decision is not None:
            typer.echo(f"    autoscaler: {pool.decision.reason}")
        if pool.rollout is not None and (pool.rollout.is_running or pool.rollout.can_retry):
            typer.echo(f"    rollout: {shorten_digests(pool.rollout.summary)}")
    if shown.gateways is not None:
        at = f", the first at {shown.url}" if shown.url else ""
        typer.echo(f"  {shown.gateways.ready} of {shown.gateways.desired} gateways are ready{at}")
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


def _describe_leader(shown: FleetStatus) -> str:
    if shown.has_leader:
        host, _, process = shown.leader.partition("/")
        return f"led by process {process.partition('/')[0]} of {host} (epoch {shown.epoch})"
    if not _declares_replicas(shown):
        return "down; start it with `argosy up` or `argosy rollback`"
    since = "" if shown.lease_age_s is None else f" for {shown.lease_age_s:.0f} s"
    return f"without a controller{since}, as it last was; start one with `argosy up`"


def events(
    *,
    files: FilesOption = None,
    fleet: FleetOption = None,
    replica: Annotated[str | None, typer.Option(help="Only events of this replica.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for further events.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Number of past events.")] = 50,
    store: StoreUrl = None,
    url: FleetGatewayUrl = None,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """List what controllers did with a fleet, and why. With --json, one event per line."""
    import msgspec

    from argosy.deployment import SCALING_DECISION

    last = 0
    with open_fleet_reader(files, fleet, store, url, api_key) as reader:
        while True:
            for event in reader.list_events(after=last, limit=limit, replica=replica):
                last = event.number
                if json:
                    typer.echo(msgspec.json.encode(event).decode())
                    continue
                at = format_timestamp(event.at, "seconds")
                is_shown = event.outcome not in {"", "ok"} and event.kind != SCALING_DECISION
                what = ": ".join(filter(None, (event.outcome if is_shown else "", event.reason)))
                line = f"{at}  {event.kind}  {event.replica or event.pool}  {what}"
                typer.echo(strip_control_characters(line))
            if not (last or follow or json):
                typer.echo("No events.")
            if not follow:
                return
            time.sleep(FOLLOW_INTERVAL_S)


def logs(
    pool: Annotated[str, typer.Argument(help="Name of a pool, a replica or a model.")],
    *,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Lines per replica.")] = 50,
    files: FilesOption = None,
    fleet: FleetOption = None,
    store: StoreUrl = None,
    url: FleetGatewayUrl = None,
    api_key: GatewayApiKey = None,
) -> None:
    """Print the end of the logs of a pool's replicas. They outlive their processes.

    A gateway sends at most 500 lines of each run, to keys with the role operator.
    """
    with open_fleet_reader(files, fleet, store, url, api_key) as reader:
        shown = reader.read_fleet()
        pools = {pool} | {each.pool for each in shown.pools if each.model == pool}
        replicas = [each for each in shown.replicas if each.pool in pools or each.name == pool]
        if not replicas:
            known = ", ".join(dict.fromkeys(each.pool for each in shown.replicas)) or "none"
            fail(f"no replica belongs to {pool!r} (pools: {known})", EXIT_FAILURE)
        for record, log in zip(replicas, reader.read_logs(replicas, lines), strict=True):
            if not log:
                typer.echo(f"{record.name} has logged nothing.", err=True)
            for line in log:
                typer.echo(strip_control_characters(f"{record.name}  {line}"))
