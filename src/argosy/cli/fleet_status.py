"""`argosy status`, `events` and `logs`: what a fleet does, read from its store or from the API of a running gateway."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from argosy.cli.account_lookup import StoreUrl
from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.fleet_target import (
    FilesOption,
    FleetOption,
    FleetTarget,
    find_fleet,
    parse_revision,
)
from argosy.cli.output import (
    JsonOutput,
    print_json,
    print_records,
    shorten_digests,
    strip_control_characters,
)
from argosy.cli.quantities import format_timestamp
from argosy.cli.server_client import DEFAULT_URL, GatewayApiKey, call_admin_api

if TYPE_CHECKING:
    from argosy.deployment import FleetStatus, ReplicaRecord
    from argosy.store import FleetEvent

T = TypeVar("T")

URL_VARIABLE = "ARGOSY_URL"
MAX_LINE_BYTES = 2000
"""Expected length of a line of a log."""

FleetGatewayUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Read from this gateway, or unix:PATH, instead of the store. Without a fleet in the store, it is the"
        f" gateway at ${URL_VARIABLE}, or at {DEFAULT_URL}.",
    ),
]
FOLLOW_INTERVAL_S = 1.0


class StoredFleetReader:
    """Reads what a fleet does from the store, and logs from the launchers. Failures end the command."""

    def __init__(self, target: FleetTarget) -> None:
        from argosy.deployment import FleetControl

        self._target = target
        self._control = FleetControl(target.name, target.store.fleets)

    def read_fleet(self) -> FleetStatus:
        try:
            return self._control.read_fleet()
        except ValueError as error:
            fail(str(error))

    def list_events(
        self, *, after: int, limit: int, replica: str | None
    ) -> tuple[list[FleetEvent], str]:
        """Return events, and why none are recorded at present."""
        from argosy.deployment import find_store_problem

        store, fleet = self._target.store.fleets, self._target.name
        events = store.list_events(fleet, after=after, limit=limit, replica=replica)
        return events, find_store_problem(store, fleet)

    def read_logs(self, replicas: Sequence[ReplicaRecord], num_lines: int) -> list[list[str]]:
        from argosy.fleet.launchers import LaunchError

        try:
            logs = asyncio.run(self._read_logs(replicas, num_lines * MAX_LINE_BYTES))
        except LaunchError as error:
            fail(str(error))
        return [log.decode(errors="replace").splitlines()[-num_lines:] for log in logs]

    async def _read_logs(self, replicas: Sequence[ReplicaRecord], max_bytes: int) -> list[bytes]:
        from argosy.fleet.control import open_launcher

        config = parse_revision(self._target.require_latest())
        launchers = {
            name: open_launcher(name, self._target.folder, config)
            for name in {replica.launcher for replica in replicas}
        }
        try:
            return [
                await launchers[replica.launcher].read_log(replica.name, max_bytes)
                for replica in replicas
            ]
        finally:
            for launcher in launchers.values():
                await launcher.close()


class GatewayFleetReader:
    """Reads the admin API of a gateway of the fleet.

    Args:
        url: URL of the gateway, or `unix:PATH`.
        api_key: API key with a role for the whole gateway; None without.
        connect_remedy: What to do if no gateway answers.
    """

    def __init__(self, url: str, api_key: str | None, connect_remedy: str) -> None:
        self._url = url
        self._api_key = api_key
        self._connect_remedy = connect_remedy

    def read_fleet(self) -> FleetStatus:
        from argosy.deployment import FleetStatus

        return self._convert(self._get("/admin/fleet"), FleetStatus)

    def list_events(
        self, *, after: int, limit: int, replica: str | None
    ) -> tuple[list[FleetEvent], str]:
        from argosy.store import FleetEvent

        answer = self._get("/admin/events", after=after, limit=limit, replica=replica)
        problem = self._convert(answer.get("problem", ""), str)
        return self._convert(answer["data"], list[FleetEvent]), problem

    def read_logs(self, replicas: Sequence[ReplicaRecord], num_lines: int) -> list[list[str]]:
        """A gateway sends at most 500 lines of each run."""
        return [self._read_log(each.name, num_lines)[-num_lines:] for each in replicas]

    def _read_log(self, replica: str, num_lines: int) -> list[str]:
        """Return the log of the latest run, after those of earlier ones if it is shorter than wanted."""
        latest = self._get("/admin/replicas/log", replica=replica)
        lines = self._convert(latest["lines"], list[str])
        for run in latest["runs"][1:]:
            if len(lines) >= num_lines:
                break
            earlier = self._get(
                "/admin/replicas/log", replica=replica, started_at=run["started_at"]
            )
            lines = self._convert(earlier["lines"], list[str]) + lines
        return lines

    def _get(self, path: str, **parameters: object) -> dict[str, Any]:
        return call_admin_api(
            self._url,
            self._api_key,
            "GET",
            path,
            connect_remedy=self._connect_remedy,
            parameters=parameters,
        )

    def _convert(self, answer: object, answer_type: type[T]) -> T:
        import msgspec

        try:
            return msgspec.convert(answer, answer_type)
        except msgspec.ValidationError as error:
            fail(
                f"the gateway at {self._url} is of another version of Argosy; use its command: {error}"
            )


@contextmanager
def open_fleet_reader(
    files: Sequence[Path] | None,
    fleet: str | None,
    store_url: str | None,
    url: str | None,
    api_key: str | None,
) -> Iterator[StoredFleetReader | GatewayFleetReader]:
    """Open a fleet by its declaration, by name or by a gateway.

    Without all three, it is the only fleet of the store. If the store has none, as beside `argosy serve`, it is that of
    the gateway at the default URL.
    """
    if url is not None:
        if files or fleet:
            fail("give either --url, or -f and --fleet for a fleet in the store")
        yield GatewayFleetReader(url, api_key, "check --url")
        return
    with find_fleet(files, fleet, store_url) as target:
        if target is not None:
            yield StoredFleetReader(target)
            return
    remedy = (
        "the store has no fleet either. Start one with `argosy serve` or `argosy up FILE`, or name"
        " the gateway with --url"
    )
    yield GatewayFleetReader(os.environ.get(URL_VARIABLE) or DEFAULT_URL, api_key, remedy)


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
    from argosy.deployment import count_gateways, count_replicas

    typer.echo(f"Fleet {shown.fleet}, revision {shown.revision}, {_describe_leader(shown)}")
    for problem in shown.problems:
        line = f"  {problem.severity.upper():6}  {shorten_digests(problem.text)}"
        typer.echo(strip_control_characters(line))
    for pool in shown.pools:
        typer.echo(f"  {pool.pool} of {pool.model}: {count_replicas(pool)}")
        if pool.decision is not None:
            typer.echo(f"    autoscaler: {pool.decision.reason}")
        if pool.rollout is not None and (pool.rollout.is_running or pool.rollout.can_retry):
            typer.echo(f"    rollout: {shorten_digests(pool.rollout.summary)}")
    if shown.gateways is not None:
        at = f", the first at {shown.url}" if shown.url else ""
        counts = count_gateways(shown.replicas, shown.gateways.desired)
        typer.echo(f"  gateways: {counts}{at}")
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
    if any(problem.kind == "store" for problem in shown.problems):
        return f"as it was {since.removeprefix(' for ')} ago"
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

    last, shown_problem = 0, ""
    with open_fleet_reader(files, fleet, store, url, api_key) as reader:
        while True:
            found, problem = reader.list_events(after=last, limit=limit, replica=replica)
            if problem and not shown_problem:
                typer.echo(f"No events are recorded at present. {problem}", err=True)
            shown_problem = problem
            for event in found:
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
