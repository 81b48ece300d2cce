"""`argosy alerts`: what fires, silences, and test notices."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from argosy.cli.failure import fail
from argosy.cli.output import JsonOutput, print_json, print_records
from argosy.cli.quantities import format_timestamp, parse_duration
from argosy.cli.server_client import DEFAULT_URL, GatewayApiKey, GatewayUrl, call_admin_api

TEST_TIMEOUT_S = 45.0
MAX_EVALUATION_AGE_S = 60.0

app = typer.Typer(help="Alerts: what fires, who was notified, and silences.", no_args_is_help=True)


@app.command("list")
def list_alerts(
    *,
    ended: Annotated[
        bool, typer.Option("--ended", help="Also those that ended in the last day.")
    ] = False,
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """List the alerts, pages first, then the silences in force."""
    report = call_admin_api(url, api_key, "GET", "/admin/alerts")
    if json:
        print_json(report)
        return
    alerts = [each for each in report["alerts"] if ended or each["state"] != "ended"]
    print_records(
        alerts,
        ("Severity", "State", "Since", "Alert", "Summary", "Notified", "Runbook"),
        lambda view: (
            view["severity"],
            _describe_state(view),
            format_timestamp(view["started_at"], "seconds"),
            view["name"],
            view["summary"],
            ", ".join(view["notified"]) or "none",
            f"docs/how-to/runbooks.md#{view['runbook']}",
        ),
        "Nothing fires.",
        json=False,
    )
    for view in alerts:
        if view["state"] != "ended":
            typer.echo(f"{view['name']}: {view['description']}")
    for silence in report["silences"]:
        typer.echo(
            f"Silence {silence['id']} until {format_timestamp(silence['ends_at'], 'seconds')} by {silence['author']}: "
            f"{' '.join(f'{name}={value}' for name, value in silence['matchers'].items())}: {silence['reason']}"
        )
    for receiver in report["receivers"]:
        if receiver["failing_since"] is not None:
            typer.echo(f"Notices do not reach {receiver['name']}: {receiver['error']}")
    evaluated_at = report["evaluated_at"]
    if evaluated_at is None or time.time() - evaluated_at > MAX_EVALUATION_AGE_S:
        typer.echo("No process evaluates alerts now. Start the gateway or the controller.")


@app.command()
def silence(
    matchers: Annotated[
        list[str],
        typer.Argument(
            metavar="LABEL=PATTERN...",
            help="Labels that an alert must have, such as alertname=NoReplica or model=chat-*. "
            "A pattern that begins with ! excludes what follows.",
        ),
    ],
    *,
    duration: Annotated[
        str, typer.Option("--for", help="How long, such as 90s, 15m, 12h or 7d; at most 30d.")
    ],
    reason: Annotated[str, typer.Option(help="Why, for others and for the audit log.")],
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
) -> None:
    """Send no notices of matching alerts for some time. They are evaluated and shown nevertheless."""
    pairs: dict[str, str] = {}
    for matcher in matchers:
        name, separator, pattern = matcher.partition("=")
        if not separator:
            fail(f"{matcher!r} is no LABEL=PATTERN; write it like alertname=NoReplica")
        pairs[name] = pattern
    body: dict[str, Any] = {
        "matchers": pairs,
        "duration_s": parse_duration(duration),
        "reason": reason,
    }
    view = call_admin_api(url, api_key, "POST", "/admin/alerts/silences", body=body)
    typer.echo(
        f"{view['id']} lasts until {format_timestamp(view['ends_at'], 'seconds')}. "
        f"`argosy alerts unsilence {view['id']}` ends it."
    )


@app.command()
def unsilence(
    silence_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the silence.")],
    *,
    reason: Annotated[str, typer.Option(help="Why, for the audit log.")] = "",
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
) -> None:
    """End a silence."""
    path = f"/admin/alerts/silences/{quote(silence_id, safe='')}"
    call_admin_api(url, api_key, "DELETE", path, parameters={"reason": reason or None})
    typer.echo(f"{silence_id} is over.")


@app.command("test")
def send_test(
    receiver: Annotated[
        str, typer.Argument(metavar="RECEIVER", help="Name in `alerting.receivers`.")
    ],
    *,
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
) -> None:
    """Send a notice that is marked as a test, and wait for its result."""
    body = {"receiver": receiver}
    order = call_admin_api(url, api_key, "POST", "/admin/alerts/tests", body=body)
    end = time.monotonic() + TEST_TIMEOUT_S
    while time.monotonic() < end:
        time.sleep(1)
        report = call_admin_api(url, api_key, "GET", "/admin/alerts")
        result = next((each for each in report["tests"] if each["id"] == order["id"]), None)
        if result is not None and result["sent_at"] is not None:
            if result["error"]:
                fail(f"the test notice did not reach {receiver}: {result['error']}")
            typer.echo(f"The test notice was delivered to {receiver}.")
            return
    fail("the test notice waits; `argosy alerts list` shows whether a process evaluates alerts")


def _describe_state(view: dict[str, Any]) -> str:
    if view["explained_by"]:
        return f"explained by {view['explained_by']}"
    return str(view["state"])
