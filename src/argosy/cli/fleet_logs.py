"""`argosy logs`: logs of replicas, gateways and the controller, from their files, launchers, the store or a gateway."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
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
    from argosy.telemetry import LogFormatter, LogLine, LogSelection

DEFAULT_LINES = 50
WINDOW_BYTES = 256 * 1024
"""Bytes of a log that are read at first, and again each second by `--follow`."""
MAX_READ_BYTES = 64 * 1024 * 1024

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Wait for further lines.")]
Since = Annotated[
    float | None,
    typer.Option(
        parser=parse_past_time,
        metavar="TIME",
        help="Only lines since a time or within a duration such as 15m, also of removed replicas.",
    ),
]
Level = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(help="Only lines of this level or a higher one, and those that name none."),
]
Lines = Annotated[
    int | None,
    typer.Option(
        "--lines",
        "-n",
        min=1,
        help="Last lines of each log.",
        show_default=f"{DEFAULT_LINES}, or all with --since",
    ),
]
JsonLines = Annotated[
    bool | None,
    typer.Option(
        "--json/--text",
        help="Whether each line is JSON.",
        show_default="text at a terminal, JSON elsewhere",
    ),
]


def logs(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A pool, a replica, a model, `gateway` or `controller`. Default: all of the fleet.",
            autocompletion=complete_logs,
        ),
    ] = None,
    *,
    follow: Follow = False,
    since: Since = None,
    level: Level = "debug",
    request: Annotated[
        str, typer.Option(metavar="ID", help="Only lines with this request id.")
    ] = "",
    lines: Lines = None,
    json: JsonLines = None,
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
    from argosy.telemetry import LogFormatter, LogSelection

    selection = LogSelection(since=since or 0.0, level=level, request=request)
    wanted = DEFAULT_LINES if lines is None and since is None else lines
    is_json = not sys.stdout.isatty() if json is None else json
    colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    formatter = None if is_json else LogFormatter(colors=colors, zone=None)
    with (
        open_fleet_reader(files, fleet, store, url, api_key) as opened,
        closing(_open_logs(opened, selection)) as reader,
    ):
        with_removed = True if since is not None or request else None
        names = reader.find_logs(name, with_removed=with_removed)
        if not names:
            wanted_name = "the fleet" if name is None else repr(name)
            fail(f"no log belongs to {wanted_name} ({reader.describe_known()})", EXIT_FAILURE)
        seen: SeenLines = {}
        ends = {each: _read_new_lines(reader, each, seen, wanted) for each in names}
        for each in names:
            if not ends[each] and selection == LogSelection():
                typer.echo(f"{each} has logged nothing.", err=True)
        if not any(ends.values()) and selection != LogSelection():
            typer.echo("No line matches the options.", err=True)
        _print_lines(ends, formatter)
        while follow:
            time.sleep(FOLLOW_INTERVAL_S)
            names = [*dict.fromkeys((*names, *reader.find_logs(name, with_removed=False)))]
            _print_lines(
                {each: _read_new_lines(reader, each, seen, 0) for each in names}, formatter
            )


SeenLines = dict[tuple[str, float], Sequence[str]]
"""Lines at the end of each log when it was last read, by name and start of the run."""


class StoredLogs:
    """Logs of a fleet whose store this machine can reach.

    The store has the ends of logs, which suffice for replicas whose launcher knows them no more.
    """

    is_selected = False
    """Whether `read_runs` yields only lines that are selected."""

    def __init__(self, reader: StoredFleetReader, selection: LogSelection) -> None:
        self.selection = selection
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

    def read_runs(self, name: str, num_lines: int | None) -> Iterator[tuple[float, list[str]]]:
        """Yield the start of each run that is kept apart, the latest first, with the lines at the end of its log.

        They have the selected lines of this number, or all for None. With 0, only `WINDOW_BYTES` are read. It reads
        from the end of a log: no more than four times of what is needed.
        """
        from argosy.telemetry import parse_log

        max_bytes = WINDOW_BYTES
        while log := self._read_log(name, max_bytes):
            lines = _split_lines(log)
            is_whole = len(log) < max_bytes
            if not is_whole:
                del lines[0]
            num_found = sum(map(self.selection.matches, parse_log(lines)))
            is_enough = num_lines is not None and num_found >= num_lines
            starts_before = any(0 < each.at < self.selection.since for each in parse_log(lines[:1]))
            if is_whole or is_enough or starts_before or max_bytes >= MAX_READ_BYTES:
                yield 0.0, lines
                return
            max_bytes *= 4
        store, fleet = self._target.store.replica_logs, self._target.name
        for run in store.list_runs(fleet, name):
            yield run.started_at, _split_lines(store.read_log(fleet, name, run.started_at))

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
        """Return the end of a log as this machine or its launcher has it; empty if neither does."""
        from argosy.fleet.launchers import LaunchError
        from argosy.process_monitor import read_log_end
        from argosy.store import CONTROLLER_LOG

        if name == CONTROLLER_LOG and self._controller_log.exists():
            return read_log_end(self._controller_log, max_bytes)
        place = self._places.get(name) or "local"
        try:
            launcher = None if place in self._unusable else self._open_launcher(place)
            if launcher is not None:
                return self._runner.run(launcher.read_log(name, max_bytes))
        except LaunchError as error:
            self._unusable.add(place)
            typer.echo(f"Logs are from the store, because {error}", err=True)
        return b""

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

    is_selected = True

    def __init__(self, reader: GatewayFleetReader, selection: LogSelection) -> None:
        self.selection = selection
        self._reader = reader

    def find_logs(self, wanted: str | None, *, with_removed: bool | None) -> list[str]:
        """Return names like `StoredLogs`. A replica that is removed must be named."""
        del with_removed
        shown = self._reader.read_fleet()
        known = [record.name for record in shown.replicas]
        names = _select_names(wanted, _find_pools(wanted, shown), known)
        if names or wanted is None:
            return names
        return [wanted] if self._reader.get("/admin/replicas/log", replica=wanted)["runs"] else []

    def describe_known(self) -> str:
        """Return the pools that have logs."""
        return _describe_pools(record.name for record in self._reader.read_fleet().replicas)

    def read_runs(self, name: str, num_lines: int | None) -> Iterator[tuple[float, list[str]]]:
        """Yield the runs like `StoredLogs`, each with the last lines that the gateway selects."""
        del num_lines
        since = self.selection.since
        wanted: dict[str, object] = {"since": since, "level": self.selection.level}
        wanted |= {"request": self.selection.request or None, "replica": name}
        latest = answer = self._reader.get("/admin/replicas/log", **wanted)
        for run in latest["runs"]:
            started_at = run["started_at"]
            if run is not latest["runs"][0]:
                if (run["exited_at"] or since) < since:
                    return
                answer = self._reader.get("/admin/replicas/log", **wanted, started_at=started_at)
            yield started_at, self._reader.convert(answer["lines"], list[str])

    def close(self) -> None:
        """Do nothing: nothing is open."""


def _open_logs(
    reader: StoredFleetReader | GatewayFleetReader, selection: LogSelection
) -> StoredLogs | GatewayLogs:
    if isinstance(reader, StoredFleetReader):
        return StoredLogs(reader, selection)
    return GatewayLogs(reader, selection)


def _read_new_lines(
    reader: StoredLogs | GatewayLogs, name: str, seen: SeenLines, num_lines: int | None
) -> list[LogLine]:
    """Return the selected lines that a log has gained since they were `seen`, which is updated.

    At most the last `num_lines` are returned; all for None, and for 0, which is for logs that are followed.
    """
    from argosy.telemetry import find_new_lines, parse_log

    # Lines without a time at the beginning: a gateway has found that they are not older than what is selected.
    at = time.time() if num_lines == 0 else reader.selection.since if reader.is_selected else 0.0
    found: list[LogLine] = []
    for run, lines in reader.read_runs(name, num_lines):
        known = seen.get((name, run))
        seen[name, run] = lines
        gained, is_missing = find_new_lines(known or [], lines)
        if is_missing:
            typer.echo(f"{name}: lines are left out, because it logs too fast", err=True)
        found[:0] = [line for line in parse_log(gained, at) if reader.selection.matches(line)]
        if known is not None or (num_lines and len(found) >= num_lines):
            break
    return found[-num_lines:] if num_lines else found


def _print_lines(lines: Mapping[str, Iterable[LogLine]], formatter: LogFormatter | None) -> None:
    """Print lines of several logs in the order of their times, as JSON without a formatter."""
    import msgspec

    texts = []
    named = [(name, line) for name, found in lines.items() for line in found]
    width = max((len(name) for name, _ in named), default=0)
    for name, line in sorted(named, key=lambda each: each[1].at):
        if formatter is not None:
            texts += [f"{name:{width}}  {text}" for text in formatter.format(line).split("\n")]
        elif line.is_event:
            texts.append(strip_control_characters(f'{{"source":"{name}",{line.text[1:]}'))
        else:
            texts.append(msgspec.json.encode({"source": name, "event": line.text}).decode())
    if texts:
        typer.echo("\n".join(texts))


def _split_lines(log: bytes) -> list[str]:
    text = log.decode(errors="replace").removesuffix("\n")
    return text.split("\n") if text else []


def _find_pools(name: str | None, shown: FleetStatus) -> set[str]:
    """Return the pools of a model, and one that has the name itself."""
    return {each.pool for each in shown.pools if each.model == name} | ({name} if name else set())


def _select_names(wanted: str | None, pools: Collection[str], names: Iterable[str]) -> list[str]:
    """Return those of the names that are wanted, or belong to one of the pools; all for None."""
    return [name for name in names if wanted is None or name == wanted or _pool_of(name) in pools]


def _describe_pools(names: Iterable[str]) -> str:
    pools = dict.fromkeys(map(_pool_of, names))
    return f"pools with logs: {', '.join(pools) or 'none'}"


def _pool_of(name: str) -> str:
    """Return the pool of a replica, or the name itself if it is not that of a replica."""
    from argosy.policy.reconciliation import parse_replica_name

    replica = parse_replica_name(name)
    return name if replica is None else replica[0]
