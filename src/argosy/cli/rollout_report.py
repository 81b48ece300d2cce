"""Output of the rollouts of a pool: one line, or all measurements and transitions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import typer

from argosy.cli.output import print_records, strip_control_characters
from argosy.cli.quantities import format_timestamp

if TYPE_CHECKING:
    from argosy.deployment import RolloutReport
    from argosy.policy.rollout import RolloutRecord

MAX_SHOWN_TRANSITIONS = 20
SHOWN_DIGEST_CHARS = 12
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")


def shorten_digests(text: str) -> str:
    """Return a text with the digests of versions shortened to their beginnings."""
    return _DIGEST.sub(lambda match: match[0][:SHOWN_DIGEST_CHARS], text)


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


def print_rollout(report: RolloutReport, now: float) -> None:
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
            _show(f"  pinned prompts: {status.check}, {status.check_reason}")
        if status.error_budget is not None:
            _show(f"  error budget: {status.error_budget:.0%} left")
    for command in report.commands:
        _show(f"  waits for a controller: {command.kind} by {command.by}")
    for verdict in report.rollouts.verdicts:
        _show(f"  rolled back: version {verdict.digest} ({verdict.reason})")
    _print_measurements(report)
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


def _print_measurements(report: RolloutReport) -> None:
    current, status = report.rollouts.running, report.status
    if current is None or status is None or not status.metrics:
        return
    threshold = 1.0 / current.plan.gate.max_false_rollbacks
    _show(
        f"  gate: {status.result}, {status.reason} (regression {status.regression:.3g} of {threshold:g})"
    )
    print_records(
        status.metrics,
        ("metric", "ratio", "regression", "no worse", "passed"),
        lambda each: (
            each.metric,
            "" if each.ratio is None else f"{each.ratio:.2f}",
            f"{each.regression:.3g}",
            f"{each.equivalence:.3g}",
            "yes" if each.has_passed else "no",
        ),
        "",
        json=False,
    )


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
