"""`argosy status` and `events`: what a fleet does, read from its store or from the API of a running gateway."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from argosy.cli.account_lookup import StoreUrl, open_existing_store
from argosy.cli.adapters import describe_adapters
from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.fleet_target import (
    FilesOption,
    FleetOption,
    FleetTarget,
    find_fleet,
)
from argosy.cli.output import (
    JsonOutput,
    color_state,
    print_json,
    print_records,
    shorten_digests,
    strip_control_characters,
)
from argosy.cli.quantities import format_timestamp
from argosy.cli.server_client import DEFAULT_URL, GatewayApiKey, call_admin_api

if TYPE_CHECKING:
    from argosy.deployment import FleetStatus
    from argosy.store import FleetEvent

T = TypeVar("T")

URL_VARIABLE = "ARGOSY_URL"

FleetGatewayUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Read from this gateway, or unix:PATH, instead of the store. Without a fleet in the store, it is the"
        f" gateway at ${URL_VARIABLE}, or the one that runs with the store, such as that of `argosy serve`.",
    ),
]
FOLLOW_INTERVAL_S = 1.0
MAX_SHOWN_ADAPTERS = 10
"""Adapters with a rollout that `argosy status` shows."""


class StoredFleetReader:
    """Reads what a fleet does from the store. Failures end the command."""

    def __init__(self, target: FleetTarget) -> None:
        from argosy.deployment import FleetControl

        self.target = target
        self._control = FleetControl(target.name, target.store.fleets)

    def read_fleet(self) -> FleetStatus:
        try:
            return self._control.read_fleet()
        except ValueError as error:
            fail(str(error))

    def list_adapters(self) -> list[dict[str, Any]]:
        """Return the adapters of the registry, with the states of their rollouts."""
        store = self.target.store
        return describe_adapters(store, store.adapters.list_adapters())

    def list_events(
        self, *, after: int, limit: int, replica: str | None
    ) -> tuple[list[FleetEvent], str]:
        """Return events, and why none are recorded at present."""
        from argosy.deployment import find_store_problem

        store, fleet = self.target.store.fleets, self.target.name
        events = store.list_events(fleet, after=after, limit=limit, replica=replica)
        return events, find_store_problem(store, fleet)


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

        return self.convert(self.get("/admin/fleet"), FleetStatus)

    def list_adapters(self) -> list[dict[str, Any]]:
        answer = call_admin_api(
            self._url,
            self._api_key,
            "GET",
            "/admin/adapters",
            connect_remedy=self._connect_remedy,
            parameters={"limit": 1000},
            is_optional=True,
        )
        return self.convert(answer.get("data", []), list[dict[str, Any]])

    def list_events(
        self, *, after: int, limit: int, replica: str | None
    ) -> tuple[list[FleetEvent], str]:
        from argosy.store import FleetEvent

        answer = self.get("/admin/events", after=after, limit=limit, replica=replica)
        problem = self.convert(answer.get("problem", ""), str)
        return self.convert(answer["data"], list[FleetEvent]), problem

    def get(self, path: str, **parameters: object) -> dict[str, Any]:
        """Call the admin API. Parameters that are None are not sent."""
        return call_admin_api(
            self._url,
            self._api_key,
            "GET",
            path,
            connect_remedy=self._connect_remedy,
            parameters=parameters,
        )

    def convert(self, answer: object, answer_type: type[T]) -> T:
        """Return an answer as this type."""
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
    the only gateway that uses the store, or else of the one at the default URL.
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
    url = os.environ.get(URL_VARIABLE)
    if not url:
        with open_existing_store(store_url) as store:
            urls = [record.url for record in store.gateways.list_running()]
        if len(urls) > 1:
            fail(f"several gateways run; choose one with --url: {', '.join(urls)}")
        url = urls[0] if urls else DEFAULT_URL
    yield GatewayFleetReader(url, api_key, remedy)


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
        adapters = [] if json else reader.list_adapters()
    if json:
        print_json(shown)
    else:
        _print_fleet(shown, adapters)
    is_kept = shown.has_leader or not _declares_replicas(shown)
    if exit_code and not (shown.is_as_declared and is_kept):
        raise typer.Exit(EXIT_FAILURE)


def _declares_replicas(shown: FleetStatus) -> bool:
    return bool(shown.pools) or shown.gateways is not None


def _print_fleet(shown: FleetStatus, adapters: Sequence[Mapping[str, Any]]) -> None:
    from argosy.deployment import count_gateways, count_replicas

    typer.echo(f"Fleet {shown.fleet}, revision {shown.revision}, {_describe_leader(shown)}")
    for problem in shown.problems:
        severity = color_state(problem.severity, f"{problem.severity.upper():6}")
        typer.echo(f"  {severity}  {strip_control_characters(shorten_digests(problem.text))}")
    for pool in shown.pools:
        typer.echo(f"  {pool.pool} of {pool.model}: {count_replicas(pool)}")
        if pool.decision is not None:
            typer.echo(f"    autoscaler: {pool.decision.reason}")
        if pool.rollout is not None and (pool.rollout.is_running or pool.rollout.can_retry):
            typer.echo(f"    rollout: {shorten_digests(pool.rollout.summary)}")
    changing = [each for each in adapters if each["rollout_status"]]
    for adapter in changing[:MAX_SHOWN_ADAPTERS]:
        text = f"adapter {adapter['name']} of {adapter['base_model']}: {adapter['rollout_status']}"
        typer.echo(f"  {strip_control_characters(shorten_digests(text))}")
    if len(changing) > MAX_SHOWN_ADAPTERS:
        typer.echo(f"  {len(changing)} adapters have rollouts; see `argosy adapters list`")
    if shown.gateways is not None:
        at = f", the first at {shown.url}" if shown.url else ""
        counts = count_gateways(shown.replicas, shown.gateways.desired)
        typer.echo(f"  gateways: {counts}{at}")
    now = time.time()
    versions = {record.version for record in shown.replicas if record.version}
    shows_version = len(versions) > 1 or bool(versions - {shown.version})
    print_records(
        shown.replicas,
        ("replica", "phase", "for", "requests", *["version"] * shows_version, "node", "reason"),
        lambda record: (
            record.name,
            record.phase,
            f"{max(0, now - record.phase_since):.0f} s",
            record.running,
            *[record.version] * shows_version,
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
    remedy = "start one with `argosy up`"
    if any(replica.launcher == "kubernetes" for replica in shown.replicas):
        remedy += ", or see `kubectl get pods` if the cluster runs it"
    return f"without a controller{since}, as it last was; {remedy}"


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
                typer.echo(color_state(event.outcome, strip_control_characters(line)))
            if not (last or follow or json):
                typer.echo("No events.")
            if not follow:
                return
            time.sleep(FOLLOW_INTERVAL_S)
