"""Reading of a fleet: from the store that its controller writes to, or from a running gateway's admin API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer

from argosy.cli.failure import fail
from argosy.cli.fleet_target import FleetTarget, find_fleet, parse_revision
from argosy.cli.server_client import DEFAULT_URL, call_admin_api

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


class FleetReader(Protocol):
    """Source of what a fleet does. Failures end the command."""

    def read_fleet(self) -> FleetStatus:
        """Return the fleet as its controller recorded it."""

    def list_events(self, *, after: int, limit: int, replica: str | None) -> list[FleetEvent]:
        """Return what its controllers did, oldest first; with `after` 0 the latest events."""

    def read_logs(self, replicas: Sequence[ReplicaRecord], num_lines: int) -> list[list[str]]:
        """Return the last lines of the logs of replicas."""


class StoredFleetReader:
    """Reads the store. Logs come from the launchers of the replicas.

    Args:
        target: The fleet.
    """

    def __init__(self, target: FleetTarget) -> None:
        from argosy.deployment import FleetControl

        self._target = target
        self._control = FleetControl(target.name, target.store.fleets)

    def read_fleet(self) -> FleetStatus:
        """Return the fleet. See `FleetReader`."""
        try:
            return self._control.read_fleet()
        except ValueError as error:
            fail(str(error))

    def list_events(self, *, after: int, limit: int, replica: str | None) -> list[FleetEvent]:
        """Return events. See `FleetReader`."""
        return self._target.store.fleets.list_events(
            self._target.name, after=after, limit=limit, replica=replica
        )

    def read_logs(self, replicas: Sequence[ReplicaRecord], num_lines: int) -> list[list[str]]:
        """Return logs. See `FleetReader`."""
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
        """Return the fleet. See `FleetReader`."""
        from argosy.deployment import FleetStatus

        return self._convert(self._get("/admin/fleet"), FleetStatus)

    def list_events(self, *, after: int, limit: int, replica: str | None) -> list[FleetEvent]:
        """Return events. See `FleetReader`."""
        from argosy.store import FleetEvent

        answer = self._get("/admin/events", after=after, limit=limit, replica=replica)
        return self._convert(answer["data"], list[FleetEvent])

    def read_logs(self, replicas: Sequence[ReplicaRecord], num_lines: int) -> list[list[str]]:
        """Return logs. See `FleetReader`. A gateway sends at most 500 lines of each run."""
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
) -> Iterator[FleetReader]:
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
