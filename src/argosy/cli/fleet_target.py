"""The fleet that a command is about: its declaration, its store and its folder, and checks before a change."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.account_lookup import open_or_create_store
from argosy.cli.failure import fail

if TYPE_CHECKING:
    from argosy.deployment import FleetConfig, FleetStatus
    from argosy.store import FleetRevision, Store


DEFAULT_FILE = Path("fleet.yaml")

FilesArgument = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[FILE]...", help="Declaration and its overlays. Default: fleet.yaml."),
]
FilesOption = Annotated[
    list[Path] | None,
    typer.Option("--file", "-f", help="Declaration, or an overlay of it. May be repeated."),
]
FleetOption = Annotated[
    str | None, typer.Option("--fleet", help="Name of the fleet, if no file is given.")
]
Reason = Annotated[str, typer.Option("--reason", "-m", help="Why, for the history.")]
Wait = Annotated[
    bool, typer.Option(help="Wait until every replica is ready, and show what happens.")
]
Timeout = Annotated[
    float, typer.Option(min=0, help="Seconds to wait before the command fails with status 1.")
]


@dataclass(frozen=True, slots=True)
class FleetTarget:
    """A fleet in its open store."""

    name: str
    store: Store
    store_url: str

    @property
    def folder(self) -> Path:
        """Folder of the fleet's state on this machine."""
        from argosy.fleet.control import fleet_folder

        return fleet_folder(self.name)

    def latest(self) -> FleetRevision | None:
        """Return the revision in force."""
        return self.store.fleets.latest_revision(self.name)

    def require_latest(self) -> FleetRevision:
        """Return the revision in force. Without one the command fails."""
        revision = self.latest()
        if revision is None:
            fail(f"the fleet {self.name!r} was never applied; use `argosy up FILE`")
        return revision

    def read_status(self) -> FleetStatus:
        """Return the status of the fleet as its controller last recorded it."""
        from argosy.deployment import read_fleet_status

        return read_fleet_status(self.store.fleets, self.name)


def complete_pools(context: typer.Context, incomplete: str) -> list[str]:
    """Return the pools of the store's fleets that a shell may complete a word to; none if that fails."""
    return _complete(context, incomplete, {"pool"})


def complete_replicas(context: typer.Context, incomplete: str) -> list[str]:
    """Return the replicas, like `complete_pools`."""
    return _complete(context, incomplete, {"replica"})


def complete_logs(context: typer.Context, incomplete: str) -> list[str]:
    """Return all that has a log, like `complete_pools`."""
    return _complete(context, incomplete, {"pool", "model", "replica", "log"})


def _complete(context: typer.Context, incomplete: str, kinds: set[str]) -> list[str]:
    from argosy.deployment import read_fleet_status
    from argosy.store import default_store_url, open_existing_store

    names = {"gateway", "controller"} if "log" in kinds else set[str]()
    with (
        contextlib.suppress(Exception),  # there is no place for an error
        contextlib.closing(
            open_existing_store(context.params.get("store") or default_store_url())
        ) as store,
    ):
        for fleet in store.fleets.list_fleets():
            shown = read_fleet_status(store.fleets, fleet)
            if "pool" in kinds:
                names |= {pool.pool for pool in shown.pools}
            if "model" in kinds:
                names |= {pool.model for pool in shown.pools}
            if "replica" in kinds:
                names |= {replica.name for replica in shown.replicas}
    return sorted(name for name in names if name.startswith(incomplete))


def operator_name() -> str:
    """Return the user and machine that a change is recorded with."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def load_declaration(
    arguments: Sequence[Path] | None, options: Sequence[Path] | None
) -> FleetConfig:
    """Read the declaration from the given files, or from fleet.yaml. An invalid one ends the command."""
    from argosy.deployment import load_fleet

    try:
        return load_fleet(list_files(arguments, options))
    except ValueError as error:
        fail(str(error))


def list_files(arguments: Sequence[Path] | None, options: Sequence[Path] | None) -> list[Path]:
    """Return the given files, or fleet.yaml. Without any the command ends."""
    files = [*(arguments or ()), *(options or ())]
    if not files and not DEFAULT_FILE.exists():
        fail(f"no declaration: give its file, or create {DEFAULT_FILE}")
    return files or [DEFAULT_FILE]


@contextmanager
def open_declared(
    arguments: Sequence[Path] | None, options: Sequence[Path] | None, store_url: str | None
) -> Iterator[tuple[FleetTarget, FleetConfig]]:
    """Open the fleet of a declaration. Its store is created if it does not exist."""
    config = load_declaration(arguments, options)
    declared = None if config.store is None else config.store.url
    with _open(config.fleet or "", store_url or declared) as target:
        yield target, config


@contextmanager
def open_fleet(
    options: Sequence[Path] | None, fleet: str | None, store_url: str | None
) -> Iterator[FleetTarget]:
    """Open a fleet by its declaration or by name. Without both, it is the only one of the store that is not down."""
    with find_fleet(options, fleet, store_url) as target:
        if target is None:
            fail(
                "the store has no fleet; declare one with `argosy up FILE`, or name another --store"
                " (the fleet of `argosy serve` changes with its command line only)"
            )
        yield target


@contextmanager
def find_fleet(
    options: Sequence[Path] | None, fleet: str | None, store_url: str | None
) -> Iterator[FleetTarget | None]:
    """Open a fleet like `open_fleet`, or return None if none is named and the store has none."""
    from argosy.deployment import locate_fleet

    if options or (fleet is None and DEFAULT_FILE.exists()):
        try:
            name, declared_url = locate_fleet(options or [DEFAULT_FILE])
        except ValueError as error:
            fail(f"{error} (or name the fleet with --fleet)")
        if fleet not in {None, name}:
            fail(f"the declaration is of the fleet {name!r}, not {fleet!r}; give one of them")
        with _open(name, store_url or declared_url) as target:
            yield target
        return
    with _open(fleet or "", store_url) as target:
        names = [fleet] if fleet else target.store.fleets.list_fleets()
        if len(names) > 1:
            names = [name for name in names if not _is_down(target.store, name)] or names
        if len(names) > 1:
            known = ", ".join(names)
            fail(f"name the fleet with --fleet, or its declaration with -f (fleets: {known})")
        yield FleetTarget(names[0], target.store, target.store_url) if names else None


def _is_down(store: Store, fleet: str) -> bool:
    """Return whether nothing of a fleet shall run, as after `argosy down`."""
    from argosy.deployment import parse_declaration

    revision = store.fleets.latest_revision(fleet)
    try:
        config = None if revision is None else parse_declaration(revision)
    except ValueError:  # of another version of Argosy
        return False
    return config is None or not (config.pools or config.gateways)


def parse_revision(revision: FleetRevision) -> FleetConfig:
    """Return the declaration of a revision. One of another version that is invalid by now ends the command."""
    from argosy.deployment import parse_declaration

    try:
        return parse_declaration(revision)
    except ValueError as error:
        fail(str(error))


@contextmanager
def _open(fleet: str, store_url: str | None) -> Iterator[FleetTarget]:
    from argosy.store import ConflictError, NotFoundError, StoreError, default_store_url

    try:
        url = _absolute(store_url or default_store_url())
        with open_or_create_store(url, is_expected=True) as store:
            yield FleetTarget(fleet, store, url)
    except (StoreError, ConflictError, NotFoundError) as error:
        fail(str(error))


def _absolute(url: str) -> str:
    """Return a URL that means the same in every working directory."""
    from argosy.store import sqlite_path, sqlite_url

    path = sqlite_path(url)
    return url if path is None else sqlite_url(path.absolute())


def is_controlled_here(target: FleetTarget) -> bool:
    """Return whether the controller of a fleet runs on this machine, or none runs and it would be started here."""
    status = target.read_status()
    return not status.has_leader or status.leader.partition("/")[0] == socket.gethostname()


def check_launchers(target: FleetTarget, config: FleetConfig) -> None:
    """End the command if a launcher of the declaration cannot be used from this machine."""
    from argosy.fleet.control import check_launchers
    from argosy.fleet.launchers import LaunchError

    try:
        asyncio.run(check_launchers(config, target.folder))
    except LaunchError as error:
        fail(str(error))


def check_ports(target: FleetTarget, config: FleetConfig) -> None:
    """End the command if another program listens where a gateway of the fleet shall, on this machine."""
    from argosy.deployment import build_gateway_config, listen_url
    from argosy.http_server import bind_host

    if config.uds is not None:
        return
    own_urls = {replica.url for replica in target.read_status().replicas}
    for ordinal in range(config.gateways if config.port else 0):
        if listen_url(build_gateway_config(config, ordinal)) in own_urls:
            continue
        try:
            for each in bind_host(config.host, config.port + ordinal):
                each.close()
        except OSError as error:
            problem = str(error.strerror).partition(";")[0]
            fail(f"gateway {ordinal} {problem}; stop what listens there, or change `port`")


@contextlib.contextmanager
def created_folder(folder: Path) -> Iterator[None]:
    """Create the folder of a fleet's state, or end the command. If the block fails, it is removed again if empty."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        fail(
            f"{folder} cannot be created: {error.strerror}; set XDG_STATE_HOME to a folder of yours"
        )
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise
