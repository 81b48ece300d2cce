"""`argosy incidents`: incidents of a running fleet, and `argosy drift`: what has changed in its traffic."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from argosy.cli.output import JsonOutput, print_json, print_records, strip_control_characters
from argosy.cli.quantities import format_dollars, format_timestamp
from argosy.cli.server_client import DEFAULT_URL, GatewayApiKey, GatewayUrl, call_admin_api

MAX_SHOWN = 8

app = typer.Typer(
    help="Incidents: what is wrong, since when, and after what.", no_args_is_help=True
)
NumberArgument = Annotated[
    str, typer.Argument(metavar="INCIDENT", help="Number, such as 17 or INC-17.")
]


@app.command("list")
def list_incidents(
    *,
    open_only: Annotated[bool, typer.Option("--open", help="Only those that go on.")] = False,
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """List incidents, the latest first."""
    parameters = {"open": "true" if open_only else None}
    found = call_admin_api(url, api_key, "GET", "/admin/incidents", parameters=parameters)["data"]
    print_records(
        found,
        ("Incident", "State", "Severity", "Since", "Title", "Scope", "Alerts", "Cause"),
        lambda each: (
            each["name"],
            _state(each["closed_at"], is_firing=each["is_firing"]),
            each["severity"],
            format_timestamp(each["onset"], "seconds"),
            each["title"],
            _scope(each["scope"]),
            str(each["num_alerts"]),
            each["cause"],
        ),
        "No incidents.",
        json=json,
    )


@app.command()
def show(
    incident: NumberArgument,
    *,
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Show an incident in five steps: detect, correlate, isolate, root cause, fix."""
    found = call_admin_api(url, api_key, "GET", f"/admin/incidents/{_number(incident)}")
    if json:
        print_json(found)
        return
    for line in _describe(found):
        typer.echo(strip_control_characters(line))


@app.command("open")
def open_incident(
    title: Annotated[str, typer.Argument(help="What is wrong, in one line.")],
    *,
    model: Annotated[str, typer.Option(help="Model that it concerns.")] = "",
    pool: Annotated[str, typer.Option(help="Pool that it concerns.")] = "",
    replica: Annotated[str, typer.Option(help="Replica that it concerns.")] = "",
    tenant: Annotated[str, typer.Option(help="Project or organisation that it concerns.")] = "",
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
) -> None:
    """Open an incident. Alerts of the same model, pool, replica or tenant join it."""
    body = {"title": title, "model": model, "pool": pool, "replica": replica, "tenant": tenant}
    found = call_admin_api(url, api_key, "POST", "/admin/incidents", body=body)
    typer.echo(f"{found['display_name']} is open.")


@app.command()
def close(
    incident: NumberArgument,
    *,
    reason: Annotated[str, typer.Option(help="Why, for the timeline.")] = "",
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
) -> None:
    """Close an incident. One with alerts closes by itself, 15 minutes after the last one has ended."""
    body = {"incident": _number(incident), "reason": reason}
    found = call_admin_api(url, api_key, "POST", "/admin/incidents/close", body=body)
    typer.echo(f"{found['display_name']} is closed.")


@app.command()
def comment(
    incident: NumberArgument,
    text: Annotated[str, typer.Argument(help="Text for the timeline.")],
    *,
    cause: Annotated[
        bool, typer.Option("--cause", help="The text is the cause, which you confirm.")
    ] = False,
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
) -> None:
    """Append a comment to the timeline, or confirm the cause."""
    body = {"incident": _number(incident), "text": text, "is_cause": cause}
    found = call_admin_api(url, api_key, "POST", "/admin/incidents/comment", body=body)
    typer.echo(f"{found['display_name']} has {len(found['entries'])} entries.")


@app.command()
def postmortem(
    incident: NumberArgument,
    *,
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
) -> None:
    """Print the draft of a report in Markdown, from the record of the incident."""
    found = call_admin_api(url, api_key, "GET", f"/admin/incidents/{_number(incident)}/postmortem")
    typer.echo(strip_control_characters(found["markdown"]), nl=False)


def drift(
    *,
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Show how the traffic of the last day differs from what was expected."""
    status = call_admin_api(url, api_key, "GET", "/admin/drift")
    if json:
        print_json(status)
        return
    print_records(
        status["streams"],
        ("Model", "Tenant", "Requests that", "Last day", "Interval", "Expected", "Ratio", "Of"),
        lambda each: (
            each["model"],
            each["tenant"],
            each["description"],
            f"{each['share']:.1%}",
            f"{each['low']:.1%} to {each['high']:.1%}",
            f"{each['expected']:.1%}",
            f"{each['share'] / each['expected']:.1f}",
            f"{each['requests']:,}",
        ),
        "No baseline is known yet. It needs traffic of seven days.",
        json=False,
    )
    if status["learning"]:
        typer.echo(f"Learning, for the first seven days: {', '.join(status['learning'])}.")
    for each in status["accepted"]:
        ratios = ", ".join(f"{name} x{ratio:.1f}" for name, ratio in each["ratios"].items())
        line = (
            f"{each['model']}: version {each['version'][:12]} passed its gate at"
            f" {format_timestamp(each['at'], 'seconds')}; expected since: {ratios or 'no change'}."
        )
        typer.echo(strip_control_characters(line))


def _describe(found: dict[str, Any]) -> list[str]:
    now = time.time()
    state = _state(found["closed_at"], is_firing=found["firing"])
    minutes = ((found["closed_at"] or now) - found["onset"]) / 60
    since = f"since {format_timestamp(found['onset'], 'seconds')} ({minutes:.0f} min)"
    lines = [
        f"{found['display_name']}  {found['title']}",
        f"{state}, {found['severity']}, {_scope(found['scope'])}, {since}",
        "",
        "1 Detect",
    ]
    for each in found["alerts"].values():
        end = "fires" if each["ended_at"] is None else "ended"
        lines.append(
            f"  {each['name']} ({each['severity']}, {end}): {each['description'] or each['summary']}"
        )
    lines.append(f"  {found['requests']:,} requests since, {found['failed']:,} failed")
    if found["request_nano_dollars"]:
        lost = format_dollars(found["request_nano_dollars"] * found["failed"])
        lines.append(f"  {lost} for the failed ones, at the mean price of the day before")
    for each in found["budgets"]:
        spent = "" if each["spent"] is None else f", {each['spent']:.0%} of the error budget"
        left = "" if each["remaining"] is None else f"; {each['remaining']:.0%} are left"
        lines.append(f"  objective {each['objective']}: {each['misses']:,} misses{spent}{left}")
    lines += ["", "2 Correlate: what changed before (not necessarily because)"]
    lines += [
        f"  {format_timestamp(each['change']['at'], 'seconds')}  {each['change']['text']}  {each['score']:.2f}"
        for each in found["changes"][:MAX_SHOWN]
    ] or ["  no recorded change explains this"]
    lines += ["", "3 Isolate"]
    lines += [
        f"  {each['dimension']} {each['value'] or '-'}: {each['excess_share']:.0%} of the excess of requests that "
        f"{found['sliced_event']}, {each['request_share']:.0%} of the requests; elsewhere {each['share_elsewhere']:.1%}"
        for each in found["slices"][:MAX_SHOWN]
    ] or ["  no part of the traffic carries an excess"]
    if found["healthy"]:
        lines.append(f"  healthy: {', '.join(found['healthy'][:MAX_SHOWN])}")
    lines += [
        "",
        "4 Root cause",
        f"  {found['cause'] or 'not confirmed; see `argosy incidents comment --cause`'}",
    ]
    lines += ["", "5 Fix and prevent", *_describe_rollback(found["rollback"])]
    lines += [
        f"  runbook: {name}"
        for name in sorted({each["runbook"] for each in found["alerts"].values()})
    ]
    lines += ["", "Timeline"]
    lines += [
        f"  {format_timestamp(each['at'], 'seconds')}  {each['source']:8} {each.get('actor', '')} {each['text']}"
        for each in sorted(found["entries"], key=lambda each: each["at"])
    ]
    return lines


def _describe_rollback(advice: dict[str, Any] | None) -> list[str]:
    if advice is None:
        return []
    reasons = " ".join(advice["reasons"])
    if advice["is_done"]:
        return [f"  rolled back {advice['pool']} without a person. {reasons}"]
    against = " ".join(advice["obstacles"])
    return [
        f"  `argosy rollout abort {advice['pool']}`: {reasons} Not done without a person: {against}"
    ]


def _state(closed_at: float | None, *, is_firing: bool) -> str:
    if closed_at is not None:
        return "closed"
    return "firing" if is_firing else "open"


def _scope(scope: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in scope.items()) or "the fleet"


def _number(text: str) -> int:
    digits = text.upper().removeprefix("INC-")
    if not (digits.isascii() and digits.isdigit()):
        raise typer.BadParameter(f"{text!r} is no incident; write a number such as 17")
    return int(digits)
