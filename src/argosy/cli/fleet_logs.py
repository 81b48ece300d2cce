"""`argosy logs`: logs of replicas, gateways and the controller, from their files, launchers, the store or a gateway."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from argosy.cli.account_lookup import StoreUrl
from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.fleet_status import (
    FOLLOW_INTERVAL_S,
    FleetGatewayUrl,
    GatewayFleetReader,
    StoredFleetReader,
    open_fleet_reader,
)
from argosy.cli.fleet_target import FleetOption, FleetTarget, complete_logs, parse_revision
from argosy.cli.output import strip_control_characters
from argosy.cli.quantities import parse_past_time
from argosy.cli.server_client import GatewayApiKey

if TYPE_CHECKING:
    from argosy.deployment import FleetStatus
    from argosy.fleet.launchers import Launcher
    from argosy.telemetry import LogLine, LogSelection

DEFAULT_LINES = 50
WINDOW_BYTES = 256 * 1024
"""Bytes of a log that are read at first, and again each second by `--follow`."""
MAX_READ_BYTES = 64 * 1024 * 1024
_NUMBERS = re.compile(r"-\d+-\d+$")
"""End of the name of a replica, after that of its pool."""


def logs(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A pool, a replica, a model, `gateway` or `controller`. Default: all of the fleet.",
            autocompletion=complete_logs,
        ),
    ] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for further lines.")] = False,
    since: Annotated[
        float | None,
        typer.Option(
            parser=parse_past_time,
            metavar="TIME",
            help="Only lines since a time or within a duration such as 15m, also of removed replicas.",
        ),
    ] = None,
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Only lines of this level or a higher one, and those that name none."),
    ] = "debug",
    request: Annotated[
        str, typer.Option(metavar="ID", help="Only lines with this request id.")
    ] = "",
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines",
            "-n",
            min=1,
            help="Last lines of each log.",
            show_default=f"{DEFAULT_LINES}, or all with --since",
        ),
    ] = None,
    json: Annotated[
        bool | None,
        typer.Option(
            "--json/--text",
            help="Whether each line is JSON.",
            show_default="text at a terminal, JSON elsewhere",
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", help="Declaration, or an overlay of it. May be repeated."),
    ] = None,
    fleet: FleetOption = None,
    store: StoreUrl = None,
    url: FleetGatewayUrl = None,
    api_key: GatewayApiKey = None,
) -> None:
    """Print the last lines of the logs of replicas, gateways and the controller, in the order of their times.

    Logs outlive their processes: they can be read after `argosy down`, and those of removed replicas by name until
    newer ones need their space. The log of the controller is on its machine. Without access to the store, --url reads
    the last 64 KiB of each run through a gateway, with a key that has the role operator.
    """
    from argosy.telemetry import LogSelection

    selection = LogSelection(since=since or 0.0, level=level, request=request)
    wanted = DEFAULT_LINES if lines is None and since is None else lines
    output = _Output(is_json=not sys.stdout.isatty() if json is None else json)
    with open_fleet_reader(files, fleet, store, url, api_key) as opened:
        reader = (
            StoredLogs(opened) if isinstance(opened, StoredFleetReader) else GatewayLogs(opened)
        )
        try:
            with_removed = True if since is not None or request else None
            names = reader.find_logs(name, with_removed=with_removed)
            if not names:
                wanted_name = "the fleet" if name is None else repr(name)
                fail(f"no log belongs to {wanted_name} ({reader.describe_known()})", EXIT_FAILURE)
            seen = output.print_ends(reader, names, selection, wanted)
            while follow:
                time.sleep(FOLLOW_INTERVAL_S)
                names = [*dict.fromkeys((*names, *reader.find_logs(name, with_removed=False)))]
                output.print_gains(reader, names, selection, seen)
        finally:
            reader.close()


class StoredLogs:
    """Logs of a fleet whose store this machine can reach.

    The store has the ends of logs, which suffice for replicas whose launcher knows them no more.
    """

    def __init__(self, reader: StoredFleetReader) -> None:
        self._reader = reader
        self._target: FleetTarget = reader.target
        self._runner = asyncio.Runner()
        self._launchers: dict[str, Launcher] = {}
        self._unusable: set[str] = set()
        """Launchers that cannot be used from here."""
        self._places: dict[str, str] = {}
        """Launcher of each replica that exists."""

    def find_logs(self, wanted: str | None, *, with_removed: bool | None) -> list[str]:
        """Return the names of the logs of a replica, a pool, a model or, with None, of all.

        Those of removed replicas count if this is asked for, or with None if there are no others.
        """
        from argosy.store import CONTROLLER_LOG

        shown = self._reader.read_fleet()
        self._places = {record.name: record.launcher for record in shown.replicas}
        pools = _find_pools(wanted, shown)
        replicas = _select_names(wanted, pools, self._places)
        is_controller = self._controller_log.exists() and wanted in {None, CONTROLLER_LOG}
        present = [*replicas, CONTROLLER_LOG] if is_controller else replicas
        if with_removed is False or (replicas and not with_removed):
            return present
        kept = _select_names(wanted, pools, self._list_kept())
        if not kept and wanted is not None:  # the models of a fleet that is down
            kept = _select_names(wanted, self._find_earlier_pools(wanted), self._list_kept())
        return [*dict.fromkeys((*present, *kept))]

    def describe_known(self) -> str:
        """Return the pools that have logs, and where the controller logs."""
        leader = self._reader.read_fleet().leader.partition("/")[0]
        where = f"; its controller last ran on {leader}" if leader else ""
        return _describe_pools((*self._places, *self._list_kept())) + where

    def read_log(
        self, name: str, max_bytes: int, selection: LogSelection
    ) -> tuple[list[str], bool]:
        """Return the last lines of a log, and whether these are all that it has."""
        del selection  # the caller applies it
        log = self._read_log(name, max_bytes)
        text = log.decode(errors="replace").removesuffix("\n")
        is_whole = len(log) < max_bytes
        lines = text.split("\n") if text else []
        return lines if is_whole else lines[1:], is_whole

    def close(self) -> None:
        """Close the launchers."""
        for launcher in self._launchers.values():
            self._runner.run(launcher.close())
        self._runner.close()

    @property
    def _controller_log(self) -> Path:
        from argosy.controller_keeper import LOG_NAME

        return self._target.folder / LOG_NAME

    def _read_log(self, name: str, max_bytes: int) -> bytes:
        from argosy.fleet.launchers import LaunchError
        from argosy.process_monitor import read_log_end
        from argosy.store import CONTROLLER_LOG

        if name == CONTROLLER_LOG and self._controller_log.exists():
            return read_log_end(self._controller_log, max_bytes)
        place, log = self._places.get(name) or "local", b""
        try:
            launcher = None if place in self._unusable else self._open_launcher(place)
            if launcher is not None:
                log = self._runner.run(launcher.read_log(name, max_bytes))
        except LaunchError as error:
            self._unusable.add(place)
            typer.echo(f"Logs are from the store, because {error}", err=True)
        if log:
            return log
        store, fleet = self._target.store.replica_logs, self._target.name
        runs = reversed(store.list_runs(fleet, name))
        return b"".join(store.read_log(fleet, name, run.started_at) for run in runs)

    def _open_launcher(self, name: str) -> Launcher | None:
        """Return a launcher, or None for the local one of a fleet of which this machine has nothing."""
        from argosy.fleet.control import open_launcher

        folder = self._target.folder
        if name == "local" and not folder.exists():
            return None
        if name not in self._launchers:
            config = None if name == "local" else parse_revision(self._target.require_latest())
            self._launchers[name] = open_launcher(name, folder, config)
        return self._launchers[name]

    def _list_kept(self) -> list[str]:
        from argosy.fleet.launchers import LocalProcessLauncher

        local = self._open_launcher("local")
        names = local.list_logs() if isinstance(local, LocalProcessLauncher) else []
        return [*names, *self._target.store.replica_logs.list_replicas(self._target.name)]

    def _find_earlier_pools(self, model: str) -> set[str]:
        """Return the pools of a model in the latest revision that has pools."""
        from argosy.deployment import parse_declaration

        for revision in self._target.store.fleets.list_revisions(self._target.name):
            try:
                config = parse_declaration(revision)
            except ValueError:  # of another version of Argosy
                continue
            if config.pools:
                return {pool.name for pool in config.pools if pool.model == model}
        return set()


class GatewayLogs:
    """Logs of the fleet of a running gateway, as its controller recorded their ends."""

    def __init__(self, reader: GatewayFleetReader) -> None:
        self._reader = reader
        self._known: list[str] = []

    def find_logs(self, wanted: str | None, *, with_removed: bool | None) -> list[str]:
        """Return names like `StoredLogs`. A replica that is removed must be named."""
        del with_removed
        shown: FleetStatus = self._reader.read_fleet()
        self._known = [record.name for record in shown.replicas]
        names = _select_names(wanted, _find_pools(wanted, shown), self._known)
        if names or wanted is None:
            return names
        return [wanted] if self._reader.get("/admin/replicas/log", replica=wanted)["runs"] else []

    def describe_known(self) -> str:
        """Return the pools that have logs."""
        return _describe_pools(self._known)

    def read_log(
        self, name: str, max_bytes: int, selection: LogSelection
    ) -> tuple[list[str], bool]:
        """Return the lines of the kept runs that the gateway selects, the last ones of each."""
        read, convert = self._reader.get, self._reader.convert
        wanted: dict[str, object] = {"since": selection.since, "level": selection.level}
        wanted |= {"request": selection.request or None, "replica": name}
        latest = read("/admin/replicas/log", **wanted)
        lines, num_bytes = convert(latest["lines"], list[str]), 0
        for run in latest["runs"][1:]:
            num_bytes = sum(map(len, lines))
            if num_bytes >= max_bytes or (run["exited_at"] or selection.since) < selection.since:
                break
            earlier = read("/admin/replicas/log", **wanted, started_at=run["started_at"])
            lines = convert(earlier["lines"], list[str]) + lines
        return lines, True

    def close(self) -> None:
        """Do nothing: nothing is open."""


class _Output:
    """Prints lines of several logs in the order of their times."""

    def __init__(self, *, is_json: bool) -> None:
        from argosy.telemetry import LogFormatter

        self._is_json = is_json
        colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._formatter = LogFormatter(colors=colors, zone=None)

    def print_ends(
        self,
        reader: StoredLogs | GatewayLogs,
        names: Sequence[str],
        selection: LogSelection,
        wanted: int | None,
    ) -> dict[str, Sequence[str]]:
        """Print the selected lines, at most a number of each log, and return the lines at the end of each."""
        printed: list[tuple[str, LogLine]] = []
        seen: dict[str, Sequence[str]] = {}
        for name in names:
            found, seen[name] = _read_end(reader, name, selection, wanted)
            if not found:
                typer.echo(f"{name} has logged nothing that is selected.", err=True)
            printed += [(name, line) for line in found]
        self._print(printed)
        return seen

    def print_gains(
        self,
        reader: StoredLogs | GatewayLogs,
        names: Sequence[str],
        selection: LogSelection,
        seen: dict[str, Sequence[str]],
    ) -> None:
        """Print what logs have gained since they were seen."""
        from argosy.telemetry import find_new_lines, parse_log

        printed: list[tuple[str, LogLine]] = []
        for name in names:
            lines, _ = reader.read_log(name, WINDOW_BYTES, selection)
            gained, is_missing = find_new_lines(seen.get(name, []), lines)
            seen[name] = lines
            if is_missing:
                typer.echo(f"{name}: lines are left out, because it logs too fast", err=True)
            printed += [
                (name, line) for line in parse_log(gained, time.time()) if selection.matches(line)
            ]
        self._print(printed)

    def _print(self, lines: Iterable[tuple[str, LogLine]]) -> None:
        import msgspec

        texts = []
        ordered = sorted(lines, key=lambda each: each[1].at)
        width = max((len(name) for name, _ in ordered), default=0)
        for name, line in ordered:
            if not self._is_json:
                formatted = self._formatter.format(line).split("\n")
                texts += [f"{name:{width}}  {text}" for text in formatted]
            elif line.is_event:
                texts.append(strip_control_characters(f'{{"source":"{name}",{line.text[1:]}'))
            else:
                event = {"source": name, "event": line.text}
                texts.append(msgspec.json.encode(event).decode())
        if texts:
            typer.echo("\n".join(texts))


def _read_end(
    reader: StoredLogs | GatewayLogs, name: str, selection: LogSelection, wanted: int | None
) -> tuple[list[LogLine], Sequence[str]]:
    """Return the last lines that are selected, and all lines of the last `WINDOW_BYTES`.

    It reads from the end of a log: no more than four times of what is needed.
    """
    from argosy.telemetry import parse_log

    max_bytes = WINDOW_BYTES
    while True:
        lines, is_whole = reader.read_log(name, max_bytes, selection)
        found = [line for line in parse_log(lines) if selection.matches(line)]
        is_enough = wanted is not None and len(found) >= wanted
        starts_before = any(0 < line.at < selection.since for line in parse_log(lines[:1]))
        if is_whole or is_enough or starts_before or max_bytes >= MAX_READ_BYTES:
            return found[-wanted:] if wanted else found, _last_lines(lines, WINDOW_BYTES)
        max_bytes *= 4


def _last_lines(lines: Sequence[str], max_bytes: int) -> Sequence[str]:
    start = len(lines)
    while start > 0 and max_bytes >= 0:
        start -= 1
        max_bytes -= len(lines[start].encode()) + 1
    return lines[start:]


def _find_pools(name: str | None, shown: FleetStatus) -> set[str]:
    """Return the pools of a model, and one that has the name itself."""
    return {each.pool for each in shown.pools if each.model == name} | ({name} if name else set())


def _select_names(wanted: str | None, pools: Collection[str], names: Iterable[str]) -> list[str]:
    """Return those of the names that are wanted, or belong to one of the pools; all for None."""
    return [
        name
        for name in names
        if wanted is None or name == wanted or _NUMBERS.sub("", name) in pools
    ]


def _describe_pools(names: Iterable[str]) -> str:
    pools = dict.fromkeys(_NUMBERS.sub("", name) for name in names)
    return f"pools with logs: {', '.join(pools) or 'none'}"
