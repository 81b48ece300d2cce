"""Commands for rollouts: `argosy rollout status`, `pause`, `resume`, `abort`, `promote`."""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from argosy.cli.account_lookup import StoreUrl
from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.fleet_progress import POLL_INTERVAL_S
from argosy.cli.fleet_target import (
    FilesOption,
    FleetOption,
    FleetTarget,
    Timeout,
    complete_pools,
    open_fleet,
    operator_name,
)
from argosy.cli.output import (
    JsonOutput,
    print_json,
    print_records,
    shorten_digests,
    strip_control_characters,
)
from argosy.cli.quantities import format_timestamp

if TYPE_CHECKING:
    from argosy.deployment import RolloutReport
    from argosy.policy.rollout import MetricVerdict, RolloutCommand, RolloutRecord


DEFAULT_TIMEOUT_S = 30.0
CommandName = Literal["pause", "resume", "promote", "abort"]

app = typer.Typer(
    help="Follow and steer the rollout of a new version of a pool.", no_args_is_help=True
)

PoolArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[POOL]",
        help="Name of the pool. Default: the one with a rollout.",
        autocompletion=complete_pools,
    ),
]
Reason = Annotated[str, typer.Option("--reason", "-m", help="Why, for the record.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Go on without evidence, or with a spent error budget. Needs --reason."
    ),
]
Wait = Annotated[bool, typer.Option(help="Wait until the controller has followed the command.")]
MAX_SHOWN_TRANSITIONS = 20


@app.command()
def status(
    pool: Annotated[str | None, typer.Argument(metavar="[POOL]", help="Only this pool.")] = None,
    *,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the e-values of the gate, too.")
    ] = False,
    files: FilesOption = None,
    fleet: FleetOption = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Show the rollouts of a fleet: state, share, measurements, and what they wait for."""
    with open_fleet(files, fleet, store) as target:
        reports = [each for each in _read_reports(target) if pool in {None, each.pool}]
        if pool is not None and not reports:
            _fail_unknown(target, pool)
    if json:
        print_json(reports)
        return
    if not reports:
        typer.echo("No pool of the fleet has had a rollout.")
    now = time.time()
    for report in reports:
        print_rollout(report, now, verbose=verbose)


def _add_command(kind: CommandName, summary: str, *, has_force: bool = False) -> None:
    """Add a command for the controller, with an option to go on without evidence if it has one."""

    def send(
        pool: PoolArgument = None,
        *,
        force: Force = False,
        reason: Reason = "",
        wait: Wait = True,
        timeout: Timeout = DEFAULT_TIMEOUT_S,
        files: FilesOption = None,
        fleet: FleetOption = None,
        store: StoreUrl = None,
        json: JsonOutput = False,
    ) -> None:
        with open_fleet(files, fleet, store) as target:
            name, command = _store_command(target, pool, kind, reason, force=force)
            if kind == "abort":
                wait = _route_back(target, name, command, quiet=json) and wait
            _finish(target, name, command, wait_s=timeout if wait else None, json=json)

    signature = inspect.signature(send, eval_str=True)
    options = [each for each in signature.parameters.values() if has_force or each.name != "force"]
    send.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    app.command(kind, help=summary)(send)


_add_command(
    "pause",
    "Stop a rollout at its step. The new version keeps its share, and is still rolled back if it is worse.",
)
_add_command(
    "resume",
    "Continue a paused rollout, or try a version again that was rolled back.",
    has_force=True,
)
_add_command(
    "promote",
    "Go to the next step now. Without enough evidence it needs --force and --reason.",
    has_force=True,
)
_add_command(
    "abort",
    "Send all users back to the old version. The gateways follow within seconds, also without a controller.",
)


# --- shared --------------------------------------------------------------------------------------


def _read_reports(target: FleetTarget) -> list[RolloutReport]:
    import msgspec

    from argosy.deployment import read_rollouts

    try:
        return read_rollouts(target.store.fleets, target.name)
    except msgspec.MsgspecError as error:
        fail(
            f"the rollouts in the store are of another version of Argosy; use its command: {error}"
        )


def _read_report(target: FleetTarget, pool: str) -> RolloutReport:
    return next(each for each in _read_reports(target) if each.pool == pool)


def _store_command(
    target: FleetTarget, pool: str | None, kind: CommandName, reason: str, *, force: bool = False
) -> tuple[str, RolloutCommand]:
    """Store a command for the controller, and return it with its pool. Ends the command if it cannot be followed."""
    from argosy.deployment import send_command
    from argosy.policy.rollout import CommandKind, RolloutCommand
    from argosy.store import ConflictError

    report = _find_rollout(target, pool, permits_retry=kind == "resume")
    try:
        command = RolloutCommand(
            kind=CommandKind(kind), by=operator_name(), reason=reason, force=force
        )
    except ValueError as error:
        fail(f"{error} with --reason")
    try:
        sent = send_command(target.store.fleets, target.name, report, command)
    except ConflictError as error:
        fail(shorten_digests(str(error)), EXIT_FAILURE)
    return report.pool, sent


def _route_back(target: FleetTarget, pool: str, command: RolloutCommand, *, quiet: bool) -> bool:
    """Send all users of a pool back, after the abort is stored, so that a controller that sees the route knows why.

    Returns whether a controller leads the fleet.
    """
    from argosy.deployment import abort_route

    route = abort_route(target.store.fleets, target.name, pool, command)
    has_leader = target.read_status().has_leader
    if not quiet:
        routed = (
            f"version {route.version} of the route sends all users to version {shorten_digests(route.stable)}"
            if route is not None
            else "no user has the new version yet"
        )
        typer.echo(f"Pool {pool}: {routed}.", err=True)
        if not has_leader:
            typer.echo(
                "No controller leads the fleet. Its gateways follow the route, and the replicas of the new version"
                " stay until a controller runs; start one with `argosy up`.",
                err=True,
            )
    return has_leader


def _find_rollout(target: FleetTarget, pool: str | None, *, permits_retry: bool) -> RolloutReport:
    """Return the pool that a command is for. Without a rollout the command fails."""
    reports = _read_reports(target)
    running = [each for each in reports if each.is_running or (permits_retry and each.can_retry)]
    if pool is None:
        if len(running) != 1:
            names = ", ".join(each.pool for each in running) or "none"
            fail(f"name the pool; pools with a rollout: {names}", EXIT_FAILURE)
        return running[0]
    if all(each.pool != pool for each in reports):
        _fail_unknown(target, pool)
    found = next((each for each in running if each.pool == pool), None)
    if found is None:
        fail(f"no rollout of the pool {pool} is running; see `argosy rollout status`", EXIT_FAILURE)
    return found


def _fail_unknown(target: FleetTarget, pool: str) -> None:
    fail(
        f"the pool {pool!r} of the fleet {target.name} has had no rollout; declare `rollout` for it, and see"
        " `argosy status` for the names of pools",
        EXIT_FAILURE,
    )


def _finish(
    target: FleetTarget, pool: str, command: RolloutCommand, *, wait_s: float | None, json: bool
) -> None:
    """Wait until a controller has followed a stored command, if `wait_s` is given, and show the result."""
    if wait_s is None:
        report = _read_report(target, pool)
    else:
        report = _wait_until_followed(target, pool, command, wait_s, quiet=json)
    if json:
        print_json(report)
    elif command in report.commands:
        typer.echo(f"Pool {pool}: {command.kind} is stored for the controller.", err=True)
    else:
        typer.echo(summarise_rollout(report, time.time()), err=True)


def _wait_until_followed(
    target: FleetTarget, pool: str, command: RolloutCommand, timeout_s: float, *, quiet: bool
) -> RolloutReport:
    """Return the rollout after a controller has followed the command. If it is refused, or none answers, it fails."""
    deadline = time.monotonic() + timeout_s
    shown = ""
    while True:
        report = _read_report(target, pool)
        if command not in report.commands:
            break
        if not quiet and report.summary != shown:
            shown = report.summary
            typer.echo(summarise_rollout(report, time.time()), err=True)
        if time.monotonic() >= deadline:
            remedy = (
                "see `argosy events`"
                if target.read_status().has_leader
                else "start one with `argosy up`"
            )
            fail(
                f"no controller has answered within {timeout_s:g} s, so that {command.kind} remains stored until one"
                f" does; {remedy}",
                EXIT_FAILURE,
            )
        time.sleep(POLL_INTERVAL_S)
    prefix = f"{command.kind} by {command.by}: "
    if report.status is not None:
        for refusal in report.status.refusals:
            if refusal.startswith(prefix):
                fail(f"{command.kind} is refused: {refusal.removeprefix(prefix)}", EXIT_FAILURE)
    return report


def _show(line: str) -> None:
    typer.echo(strip_control_characters(shorten_digests(line)))


def summarise_rollout(report: RolloutReport, now: float) -> str:
    """Return the state of a pool's rollout in one line."""
    current, status = report.rollouts.running, shorten_digests(report.summary)
    if current is None:
        return f"Pool {report.pool}: {status or 'no rollout'}"
    share = report.shares.get(current.candidate, 0.0)
    step = _describe_step(current)
    since = f"for {max(0.0, now - current.state_since):.0f} s"
    return f"Pool {report.pool}: {status} ({step}, {share:.0%} of the users, {since})"


def print_rollout(report: RolloutReport, now: float, *, verbose: bool = False) -> None:
    """Print what is known about the rollouts of a pool."""
    _show(summarise_rollout(report, now))
    current, route, status = report.rollouts.current, report.route, report.status
    if current is not None:
        _show(
            f"  rollout {current.id}: {current.plan.strategy} from {current.stable} to {current.candidate}"
            f" since {format_timestamp(current.started_at, 'seconds')}"
        )
    if route is not None:
        _show(f"  route: {_describe_route(report)}")
    if status is not None:
        for digest, replicas in status.versions.items():
            _show(
                f"  version {digest}: {replicas.ready} of {replicas.desired} replicas are ready"
                + (f", {replicas.existing} exist" if replicas.existing != replicas.ready else "")
            )
        if status.check_reason:
            _show(f"  checks: {status.check}, {status.check_reason}")
        if status.error_budget is not None:
            _show(f"  error budget: {status.error_budget:.0%} left")
    for command in report.commands:
        _show(f"  waits for a controller: {command.kind} by {command.by}")
    for verdict in report.rollouts.verdicts:
        _show(f"  rolled back: version {verdict.digest} ({verdict.reason})")
    _print_measurements(report, verbose=verbose)
    if current is not None and current.transitions:
        print_records(
            current.transitions[-MAX_SHOWN_TRANSITIONS:],
            ("at", "state", "step", "reason"),
            lambda each: (
                format_timestamp(each.at, "seconds"),
                each.state,
                each.step + 1,
                shorten_digests(each.reason),
            ),
            "",
            json=False,
        )


def _print_measurements(report: RolloutReport, *, verbose: bool) -> None:
    """Print the evidence of the gate, also after the rollout has ended."""
    current, status = report.rollouts.current, report.status
    if current is None or status is None or not status.metrics:
        return
    _show(f"  gate: {status.result}, {status.reason}")
    evidence = ("evidence: worse", "evidence: no worse") if verbose else ()

    def describe(metric: MetricVerdict) -> tuple[object, ...]:
        needed = "no events yet" if metric.requests_needed is None else metric.requests_needed
        return (
            metric.metric,
            _format_rate(metric.candidate_events, status.candidate_requests),
            _format_rate(metric.stable_events, status.stable_requests),
            "passed" if metric.has_passed else needed,
            *((f"{metric.regression:.3g}", f"{metric.equivalence:.3g}") if verbose else ()),
        )

    print_records(
        status.metrics,
        ("metric", "new version", "old version", "requests needed", *evidence),
        describe,
        "",
        json=False,
    )
    if verbose:
        gate = current.plan.gate
        _show(
            f"  evidence (e-values) of a worse version {status.regression:.3g} of {1.0 / gate.max_false_rollbacks:g}, "
            f"and each metric passes with {1.0 / gate.max_false_promotions:g} for no worse"
        )


def _format_rate(events: int, requests: int) -> str:
    """Format how many requests of a version were bad by a metric."""
    return f"{events} of {requests} ({events / requests:.1%})" if requests else "no requests"


def _describe_step(current: RolloutRecord) -> str:
    steps = current.plan.steps
    if current.step >= len(steps):
        return "all users"
    step = steps[current.step]
    kind = "shadow " if step.is_shadow else ""
    return f"step {current.step + 1} of {len(steps)}: {kind}{step.share:.0%}"


def _describe_route(report: RolloutReport) -> str:
    route = report.route
    if route is None:
        return "none"
    parts = [f"{each.share:.0%} to {each.digest}" for each in route.variants]
    parts.append(f"{route.share_of(route.stable):.0%} to {route.stable}")
    if route.shadow is not None:
        parts.append(f"copies of {route.shadow.fraction:.0%} to {route.shadow.digest}")
    if route.rollback is not None:
        parts.append(f"rolled back from {route.rollback.digest}: {route.rollback.reason}")
    return f"version {route.version}, {', '.join(parts)}"
