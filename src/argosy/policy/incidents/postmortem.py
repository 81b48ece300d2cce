"""Draft of a report about an incident, in Markdown, from its record alone."""

from __future__ import annotations

from datetime import UTC, datetime

from argosy.policy.incidents.incident import Incident
from argosy.policy.objectives import BudgetImpact

MAX_CHANGES = 5
MAX_SLICES = 6


def write_postmortem(incident: Incident, now: float) -> str:
    """Return the draft. People complete what no record has: the cause, what went well, and the actions."""
    sections = [
        f"# {incident.name}: {_escape(incident.title)}",
        _summarise(incident, now),
        "## Impact\n\n" + _describe_impact(incident),
        "## Times (UTC)\n\n" + _describe_times(incident),
        "## Where\n\n" + _describe_slices(incident),
        "## What changed before\n\n" + _describe_changes(incident),
        "## Cause\n\n" + (_escape(incident.cause) or "Not confirmed yet."),
        "## Timeline (UTC)\n\n" + _describe_timeline(incident),
        "## Went well\n\n-",
        "## Went badly\n\n-",
        "## Actions\n\n| action | owner | due |\n| --- | --- | --- |\n| | | |",
    ]
    return "\n\n".join(sections) + "\n"


def _summarise(incident: Incident, now: float) -> str:
    end = now if incident.closed_at is None else incident.closed_at
    state = "It goes on." if incident.is_open else f"Closed by {_escape(incident.closed_by)}."
    scope = ", ".join(f"{name} {value}" for name, value in incident.scope.items()) or "the fleet"
    minutes = max(0.0, end - incident.onset) / 60
    return f"Scope: {_escape(scope)}. Severity: {incident.severity}. Duration: {minutes:.0f} min. {state}"


def _describe_impact(incident: Incident) -> str:
    share = f" ({incident.failed / incident.requests:.1%})" if incident.requests else ""
    lines = [
        f"- {incident.requests:,} requests in its scope, {incident.failed:,} of them failed{share}",
        f"- tenants with failed requests: {_escape(', '.join(incident.tenants)) or 'none'}",
    ]
    lost = incident.lost_nano_dollars
    if lost is not None:
        lines.append(
            f"- money: ${lost / 1e9:,.2f} for the failed requests at the mean price of the day before"
        )
    lines += [f"- {_describe_budget(each)}" for each in incident.budgets]
    lines += [f"- {each.name}: {_escape(each.description)}" for each in incident.alerts.values()]
    if incident.missing:
        lines.append(f"- not read: {', '.join(incident.missing)}")
    return "\n".join(lines)


def _describe_budget(impact: BudgetImpact) -> str:
    if impact.spent is None or impact.remaining is None:
        return f"objective {_escape(impact.objective)}: {impact.misses:,} misses"
    return (
        f"objective {_escape(impact.objective)}: {impact.misses:,} misses, {impact.spent:.0%} of the error budget; "
        f"{impact.remaining:.0%} are left"
    )


def _describe_times(incident: Incident) -> str:
    starts = [each.started_at for each in incident.alerts.values()]
    actions = [each.at for each in incident.entries if each.source == "rollback"]
    rows = [
        ("onset", incident.onset),
        ("detection", min(starts) if starts else incident.opened_at),
        ("mitigation", min(actions) if actions else None),
        ("recovery", incident.quiet_since),
        ("closed", incident.closed_at),
    ]
    return "\n".join(
        f"- {name}: "
        + (
            "-"
            if at is None
            else f"{format_utc(at)}, {max(0.0, at - incident.onset) / 60:.0f} min after the onset"
        )
        for name, at in rows
    )


def _describe_slices(incident: Incident) -> str:
    if not incident.slices:
        return "No part of the traffic carries an excess."
    rows = [
        f"| {each.dimension} | {_escape(each.value) or '-'} | {each.excess_share:.0%} | {each.request_share:.0%} "
        f"| {each.share:.1%} | {each.share_before:.1%} | {each.share_elsewhere:.1%} |"
        for each in incident.slices[:MAX_SLICES]
    ]
    return (
        f"Requests that {incident.sliced_event}:\n\n"
        "| by | value | of the excess | of the requests | share | before | elsewhere |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows)
    )


def _describe_changes(incident: Incident) -> str:
    if not incident.changes:
        return "No recorded change explains this."
    lines = [
        f"{rank}. {format_utc(each.change.at)} {_escape(each.change.text)} (score {each.score:.2f})"
        for rank, each in enumerate(incident.changes[:MAX_CHANGES], 1)
    ]
    return "Before, which does not mean because:\n\n" + "\n".join(lines)


def _describe_timeline(incident: Incident) -> str:
    rows = [
        f"| {format_utc(each.at)} | {each.source} | {_escape(each.actor)} | {_escape(each.text)} |"
        for each in sorted(incident.entries, key=lambda each: each.at)
    ]
    return "| time | source | by | what |\n| --- | --- | --- | --- |\n" + "\n".join(rows)


def format_utc(at: float) -> str:
    """Return a time with its date, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _escape(text: str) -> str:
    """Return text that is no markup within a line or a cell of a table."""
    one_line = " ".join(text.split())
    for character in "\\`*_[]<>|":
        one_line = one_line.replace(character, f"\\{character}")
    return one_line
