"""Commands for a declared fleet: `argosy up`, `plan`, `apply`, `diff`, `history`, `rollback`, `scale`, `down`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from argosy.cli.account_lookup import StoreUrl
from argosy.cli.failure import EXIT_FAILURE, EXIT_INTERRUPTED, fail
from argosy.cli.fleet_progress import wait_until_gone, wait_until_led, wait_until_ready
from argosy.cli.fleet_target import (
    FilesArgument,
    FilesOption,
    FleetOption,
    FleetTarget,
    Reason,
    Timeout,
    Wait,
    check_launchers,
    check_ports,
    complete_pools,
    created_folder,
    is_controlled_here,
    open_declared,
    open_fleet,
    operator_name,
    parse_revision,
)
from argosy.cli.output import JsonOutput, color_sign, print_json, print_records
from argosy.cli.quantities import format_timestamp

if TYPE_CHECKING:
    from argosy.deployment import FleetAction, FleetConfig, FleetPlan, PlannedChange
    from argosy.store import FleetRevision

EXIT_CHANGES = 3
"""Exit status of `plan --exit-code` if something would change."""
DEFAULT_TIMEOUT_S = 600.0

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Asks = Literal["never", "risk", "always"]
Number = Annotated[int, typer.Argument(min=1, help="Number of a revision, see `argosy history`.")]


def up(
    files: FilesArgument = None,
    *,
    overlays: FilesOption = None,
    fleet: Annotated[
        str | None,
        typer.Option(
            "--fleet", help="Name of a fleet that shall run as last declared, without a file."
        ),
    ] = None,
    reason: Reason = "",
    wait: Wait = True,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Apply a declaration, and run a controller for it in the background on this machine.

    The fleet runs on when the command ends. `argosy down` stops it. If the fleet runs another version of Argosy than
    this command, it replaces the controller, then the gateways, then the replicas. With `--fleet`, as after a restart
    of the machine or a restore, the declaration in force stays as it is, with what `scale` has changed in it.
    """
    with contextlib.ExitStack() as stack:
        if fleet is None:
            target, config = stack.enter_context(open_declared(files, overlays, store))
        elif files or overlays:
            fail("give either files, or --fleet to run what is in force")
        else:
            target = stack.enter_context(open_fleet(None, fleet, store))
            config = parse_revision(target.require_latest())
            if not (config.pools or config.gateways):
                fail(
                    f"the fleet {fleet!r} is down; use `argosy up FILE`, or first `argosy rollback`"
                )
        check_ports(target, config)
        with created_folder(target.folder):
            revision = _apply(target, config, reason, asks="risk", quiet=json, is_up=True)
        target.store.keep_reserve()
        _start_controller(target)
        goes_on = (
            "The fleet goes on starting. `argosy status` shows it, and `argosy down` stops it."
        )
        _finish(target, revision, wait=wait, timeout=timeout, json=json, goes_on=goes_on)


def plan(
    files: FilesArgument = None,
    *,
    overlays: FilesOption = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with status 3 if something would change.")
    ] = False,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Show what `apply` would change, and what it would disturb. Nothing is changed.

    Fails if this machine cannot reach the cluster in which the fleet runs.
    """
    with open_declared(files, overlays, store) as (target, config):
        check_launchers(target, config)
        fleet_plan = _plan(target, target.latest(), config, upgrades=True)
        _show_plan(fleet_plan, json=json)
        if fleet_plan.changes and not json:
            typer.echo("`argosy twin plan` simulates what requests notice of it.", err=True)
    if exit_code and fleet_plan.changes:
        raise typer.Exit(EXIT_CHANGES)


def apply(
    files: FilesArgument = None,
    *,
    overlays: FilesOption = None,
    reason: Reason = "",
    source: Annotated[
        str,
        typer.Option(
            help="Name of the place that keeps the file, such as `manifest`, which is recorded as the author. The "
            "file that was the last one from there changes nothing, so that what people decided since then stays."
        ),
    ] = "",
    yes: Yes = False,
    wait: Wait = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Put a declaration in force as a new revision. The controller carries it out.

    Shows the plan and asks for confirmation on a terminal.
    """
    from argosy.deployment import compare_fleets

    with open_declared(files, overlays, store) as (target, config):
        applied = (
            target.store.fleets.list_revisions(target.name, 1, author=source) if source else []
        )
        if applied and not compare_fleets(parse_revision(applied[0]), config):
            typer.echo(
                f"Nothing changes: revision {applied[0].number} was the last one of the source {source!r}, and has "
                "the same declaration.",
                err=True,
            )
            revision = target.require_latest().number
        else:
            asks: Asks = "never" if yes else "always"
            revision = _apply(target, config, reason, asks=asks, quiet=json, author=source)
        _finish(target, revision, wait=wait, timeout=timeout, json=json)


def diff(
    files: FilesArgument = None,
    *,
    overlays: FilesOption = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Show how a declaration differs from the one in force. Exits with status 1 if it does."""
    from argosy.deployment import compare_fleets

    with open_declared(files, overlays, store) as (target, config):
        latest = target.latest()
        changes = compare_fleets(None if latest is None else parse_revision(latest), config)
        if json:
            print_json(list(changes))
        else:
            _show_changes(changes)
    if changes:
        raise typer.Exit(EXIT_FAILURE)


def history(
    number: Annotated[
        int | None, typer.Argument(min=1, help="Show the changes of this revision.")
    ] = None,
    *,
    files: FilesOption = None,
    fleet: FleetOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of revisions.")] = 20,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """List the revisions of a fleet, or the changes of one."""
    from argosy.deployment import list_revision_changes

    with open_fleet(files, fleet, store) as target:
        fleets = target.store.fleets
        if number is not None:
            fleets.get_revision(target.name, number)  # ends the command if there is none
            (shown,) = list_revision_changes(fleets, target.name, 1, before=number + 1)
            if shown.problem:
                fail(shown.problem)
            if json:
                print_json({"changes": list(shown.changes)})
            elif shown.changes:
                _show_changes(shown.changes)
            else:
                typer.echo("Nothing changes.")
            return
        revisions = list_revision_changes(fleets, target.name, limit)
    print_records(
        revisions,
        ("revision", "applied at", "author", "changes", "rollback of", "reason"),
        lambda row: (
            row.revision,
            format_timestamp(row.applied_at, "seconds"),
            row.author,
            "?" if row.problem else len(row.changes),
            row.rollback_of,
            row.reason,
        ),
        "The fleet was never applied.",
        json=json,
    )


def rollback(
    number: Number,
    *,
    files: FilesOption = None,
    fleet: FleetOption = None,
    reason: Reason = "",
    yes: Yes = False,
    wait: Wait = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Put the declaration of an earlier revision in force again, as a new revision."""
    with open_fleet(files, fleet, store) as target:
        config = parse_revision(target.store.fleets.get_revision(target.name, number))
        asks: Asks = "never" if yes else "always"
        revision = _apply(
            target,
            config,
            reason,
            asks=asks,
            quiet=json,
            action="fleet.rollback",
            rollback_of=number,
        )
        _finish(target, revision, wait=wait, timeout=timeout, json=json)


def scale(
    pool: Annotated[str, typer.Argument(help="Name of the pool.", autocompletion=complete_pools)],
    replicas: Annotated[int | None, typer.Argument(min=0, help="Number of replicas.")] = None,
    *,
    auto: Annotated[
        bool, typer.Option("--auto", help="Let the autoscaler of the pool decide again.")
    ] = False,
    files: FilesOption = None,
    fleet: FleetOption = None,
    reason: Reason = "",
    yes: Yes = False,
    wait: Wait = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Change the number of replicas of a pool, as a new revision.

    Asks for confirmation on a terminal if the number more than doubles, and refuses what cannot fit on the controller's
    machine. The next `apply` of the file puts its own number in force again. A number pauses the pool's autoscaler.
    """
    from argosy.deployment import set_replicas

    if auto == (replicas is not None):
        fail("give either a number of replicas or --auto")
    with open_fleet(files, fleet, store) as target:
        try:
            config = set_replicas(parse_revision(target.require_latest()), pool, replicas)
        except ValueError as error:
            fail(str(error))
        count = "the number that the autoscaler decides" if replicas is None else replicas
        reason = reason or f"scale {pool} to {count}"
        asks: Asks = "never" if yes else "risk"
        revision = _apply(
            target, config, reason, asks=asks, quiet=json, action="pool.scale", pool=pool
        )
        scaled = config.find_pool(pool)
        if not (json or auto or scaled is None or scaled.autoscaling.mode == "off"):
            typer.echo(
                f"The autoscaler of the pool {pool} is paused. `argosy scale {pool} --auto` resumes it.",
                err=True,
            )
        _finish(target, revision, wait=wait, timeout=timeout, json=json)


def down(
    *,
    files: FilesOption = None,
    fleet: FleetOption = None,
    reason: Reason = "down",
    wait: Annotated[bool, typer.Option(help="Wait until everything has stopped.")] = True,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    store: StoreUrl = None,
) -> None:
    """Drain and stop all replicas and gateways of a fleet. `argosy up` or `rollback` starts them again.

    If the disk of an SQLite store is full, this uses the space that `argosy up` reserved beside it.
    """
    from argosy.controller_keeper import has_keeper
    from argosy.deployment import stop_everything
    from argosy.store import StoreError

    with open_fleet(files, fleet, store) as target:
        config = stop_everything(parse_revision(target.require_latest()))
        is_kept = not target.folder.is_dir() or has_keeper(target.folder)
        before = target.require_latest().number
        stop = partial(
            _apply, target, config, reason, asks="never", quiet=True, action="fleet.down"
        )
        try:
            revision = stop()
        except StoreError:
            if not target.store.release_reserve():
                raise
            revision = stop()
        if revision != before or target.read_status().replicas:
            if not is_kept:  # nothing stops without a controller
                _start_controller(target)
            if not wait:
                return
            with _explain_interrupt("The fleet goes on stopping. `argosy up` starts it again."):
                wait_until_gone(target, revision, timeout)
        typer.echo(f"The fleet {target.name} is down.", err=True)


# --- shared --------------------------------------------------------------------------------------


def _apply(
    target: FleetTarget,
    config: FleetConfig,
    reason: str,
    *,
    asks: Asks,
    quiet: bool,
    action: FleetAction = "fleet.apply",
    pool: str = "",
    rollback_of: int | None = None,
    is_up: bool = False,
    author: str = "",
) -> int:
    """Put a declaration in force, unless it is already. Returns the number of the revision in force.

    `asks` says when to ask for confirmation on a terminal: before any change, or before one with risks. `is_up` says
    that a controller is started afterwards.
    """
    from argosy.deployment import apply_declaration
    from argosy.version import VERSION

    check_launchers(target, config)
    latest = target.latest()
    upgrades = is_up or (action == "fleet.apply" and target.read_status().version == VERSION)
    fleet_plan = _plan(target, latest, config, upgrades=upgrades)
    if not fleet_plan.changes and latest is not None:
        if is_up:
            _replace_controller(target, quiet=quiet)
        if not quiet:
            typer.echo(f"Nothing changes: revision {latest.number} is in force.", err=True)
            _warn_without_controller(target, is_up=is_up)
        return latest.number
    if not quiet:
        _show_plan(fleet_plan, json=False)
    is_asked = asks == "always" or (asks == "risk" and bool(fleet_plan.risks))
    question = " ".join((*fleet_plan.risks, "Apply?"))
    if is_asked and sys.stdin.isatty() and not typer.confirm(question):
        raise typer.Exit(EXIT_FAILURE)
    if is_up:
        _replace_controller(target, quiet=quiet)
    if fleet_plan.renewed:
        reason = reason or f"upgrade to version {VERSION}"
    revision = apply_declaration(
        target.store.fleets,
        target.name,
        config,
        latest,
        author=author or operator_name(),
        reason=reason,
        action=action,
        pool=pool,
        rollback_of=rollback_of,
        renewed=fleet_plan.renewed,
    )
    if not quiet:
        typer.echo(f"Revision {revision.number} of the fleet {target.name} is in force.", err=True)
        _warn_without_controller(target, is_up=is_up)
    return revision.number


def _warn_without_controller(target: FleetTarget, *, is_up: bool) -> None:
    if not is_up and not target.read_status().has_leader:
        typer.echo("No controller carries it out. Start one with `argosy up`.", err=True)


def _finish(
    target: FleetTarget,
    revision: int,
    *,
    wait: bool,
    timeout: float,
    json: bool,
    goes_on: str = "The controller goes on with the change. `argosy rollback` takes it back.",
) -> None:
    """Wait for a revision if that is asked for. `goes_on` says what an interrupt of the command does not stop."""
    if wait:
        with _explain_interrupt(goes_on):
            wait_until_ready(target, revision, timeout, quiet=json)
    if json:
        print_json({"fleet": target.name, "revision": revision})


@contextmanager
def _explain_interrupt(message: str) -> Iterator[None]:
    """End the command with a message if Ctrl-C interrupts it."""
    try:
        yield
    except KeyboardInterrupt:
        fail(message, EXIT_INTERRUPTED)


def _start_controller(target: FleetTarget) -> None:
    """Start a controller that runs on, unless one runs for the fleet on this machine."""
    from argosy.controller_keeper import start_keeper

    command = [sys.executable, "-P", "-m", "argosy.cli", "controller", "--until-down"]
    command += ["--fleet", target.name]
    try:  # the URL of the store may have a password
        start_keeper(target.folder, command, {"ARGOSY_STORE": target.store_url})
    except OSError as error:
        fail(f"the controller cannot be started: {error.strerror}")


def _replace_controller(target: FleetTarget, *, quiet: bool) -> None:
    """Replace the controller of this machine if it runs another version than this command.

    It comes first, since it starts all others, and since one that cannot start disturbs nothing that serves.
    """
    from argosy.controller_keeper import has_keeper, stop_keeper
    from argosy.fleet.control import is_gone
    from argosy.version import VERSION

    status = target.read_status()
    if status.version in {None, VERSION}:
        return
    if not is_controlled_here(target):
        if not quiet:
            host = status.leader.partition("/")[0]
            typer.echo(
                f"Run `argosy up` on {host} to upgrade, where the controller runs.", err=True
            )
        return
    if not has_keeper(target.folder):
        if status.has_leader and not is_gone(status.leader):
            fail(
                f"the controller {status.leader} runs another version ({status.version or 'an earlier one'}); restart"
                f" it with version {VERSION}, for example by its systemd unit, and repeat the command"
            )
        return
    if not stop_keeper(target.folder):
        fail(f"the controller {status.leader} does not end; kill it, and repeat the command")
    _start_controller(target)
    wait_until_led(target)
    if not quiet:
        typer.echo(f"The controller runs version {VERSION}.", err=True)


def _plan(
    target: FleetTarget, latest: FleetRevision | None, config: FleetConfig, *, upgrades: bool
) -> FleetPlan:
    """Return the plan of a declaration. `upgrades` says whether what runs another version is replaced too."""
    from argosy.deployment import plan_declaration
    from argosy.fleet.control import check_sources, read_capacity
    from argosy.fleet.launchers import LaunchError
    from argosy.version import VERSION

    machine = None
    try:
        if is_controlled_here(target):
            check_sources(None if latest is None else parse_revision(latest), config)
            machine = read_capacity()
        installed = VERSION if upgrades and machine is not None else None
        return plan_declaration(
            target.store.fleets, target.name, latest, config, machine, installed
        )
    except (ValueError, LaunchError) as error:
        fail(str(error))


def _show_plan(fleet_plan: FleetPlan, *, json: bool) -> None:
    if json:
        print_json(fleet_plan)
        return
    for line in fleet_plan.lines:
        typer.echo(color_sign(line))


def _show_changes(changes: tuple[PlannedChange, ...]) -> None:
    from argosy.deployment import describe_change

    for change in changes:
        typer.echo(color_sign(describe_change(change)))
