"""`argosy replicas`: the replicas of a running gateway, and the decisions of operators about them."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from typer import Argument, Option

from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.fleet_target import complete_replicas
from argosy.cli.output import JsonOutput, print_json, print_records
from argosy.cli.quantities import format_timestamp
from argosy.cli.server_client import DEFAULT_URL, GatewayApiKey, GatewayUrl, call_admin_api

app = typer.Typer(
    no_args_is_help=True,
    help="List, drain, cordon, weigh and put to sleep the replicas of a gateway.",
)

POLL_INTERVAL_S = 0.5

ReplicaArgument = Annotated[
    str,
    Argument(
        metavar="REPLICA",
        help="Name of the replica, as `argosy replicas list` prints it.",
        autocompletion=complete_replicas,
    ),
]
ModelOption = Annotated[
    str | None,
    Option("--model", help="Model, if replicas of several models have this name and one is meant."),
]
ModelFilter = Annotated[str | None, Option("--model", help="Only replicas of this model.")]
Reason = Annotated[str, Option(help="Why, for other operators and the audit log.")]


@app.command("list")
def list_replicas(
    *,
    model: ModelFilter = None,
    status: Annotated[str | None, Option(help="Only replicas with this status.")] = None,
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """List the replicas with their status and its reason, as this gateway sees them."""
    replicas = call_admin_api(
        url, api_key, "GET", "/admin/replicas", parameters={"model": model, "status": status}
    )["data"]
    columns = ("model", "replica", "status", "since", "weight", "running", "waiting")
    print_records(
        replicas,
        (*columns, "arithmetic", "build", "zone", "proxy", "reason"),
        lambda view: (
            *(view["model"], view["replica"], view["status"]),
            format_timestamp(view["since"], "seconds"),
            f"{view['weight']:g}",
            *(view["running"], view["waiting"]),
            view["arithmetic_id"][:8] + ("" if view["exact"] else " (not exact)"),
            *(view["build"], view["zone"], view.get("proxy", ""), view["reason"]),
        ),
        "No replicas match.",
        json=json,
    )


@app.command()
def drain(
    replica: ReplicaArgument,
    *,
    model: ModelOption = None,
    grace: Annotated[
        float, Option(min=0, help="Seconds that running streams may continue before they move.")
    ] = 0.0,
    wait: Annotated[
        bool, Option("--wait", help="Wait until no request is left on the replica.")
    ] = False,
    timeout: Annotated[
        float, Option(min=0, help="With --wait: seconds after which to fail with status 1.")
    ] = 600.0,
    reason: Reason = "",
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Stop new requests to a replica, and move its streams to others of the same arithmetic.

    Streams that no other replica can take finish where they are.
    """
    fields = {"replica": replica, "model": model, "grace_s": grace, "reason": reason}
    change = call_admin_api(url, api_key, "POST", "/admin/replicas/drain", fields)
    if wait:
        change["replicas"] = _wait_until_drained(url, api_key, change["replicas"], timeout)
    _print_change(change, "is drained" if wait else "drains", json=json)


def _add_change(verb: str, what: str, summary: str, *aliases: str) -> None:
    """Add a command that changes the state of a replica, and says `what` it does then."""

    def change_state(
        replica: ReplicaArgument,
        *,
        model: ModelOption = None,
        reason: Reason = "",
        url: GatewayUrl = DEFAULT_URL,
        api_key: GatewayApiKey = None,
        json: JsonOutput = False,
    ) -> None:
        fields = {"replica": replica, "model": model, "reason": reason}
        change = call_admin_api(url, api_key, "POST", f"/admin/replicas/{verb}", fields)
        _print_change(change, what, json=json)

    for name in (verb, *aliases):
        app.command(name, help=summary)(change_state)


_add_change("cordon", "is cordoned", "Stop new requests to a replica. Running ones continue there.")
_add_change(
    "undrain",
    "gets requests again",
    "Let a replica get requests again, after a drain or a cordon.",
    "uncordon",
)


@app.command()
def sleep(
    replica: ReplicaArgument,
    *,
    model: ModelOption = None,
    level: Annotated[int, Option(min=1, max=2, help="1 keeps the weights, 2 drops them too.")] = 1,
    grace: Annotated[float, Option(min=0, help="Seconds after which running requests end.")] = 30.0,
    reason: Reason = "",
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Free the memory of a native replica, which keeps its process and its hits in host memory.

    Requests for a model that may sleep wake it up, and so does `argosy replicas wake`.
    """
    fields = {
        "replica": replica,
        "model": model,
        "level": level,
        "grace_s": grace,
        "reason": reason,
    }
    change = call_admin_api(url, api_key, "POST", "/admin/replicas/sleep", fields)
    _print_change(change, "sleeps", json=json)


_add_change("wake", "is awake", "Wake a native replica up that sleeps.")


@app.command()
def weight(
    replica: ReplicaArgument,
    value: Annotated[
        float, Argument(metavar="WEIGHT", min=0.001, max=1000, help="For example 0.5 for half.")
    ],
    *,
    model: ModelOption = None,
    reason: Reason = "",
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Set a replica's share of the requests relative to others, which have weight 1."""
    fields = {"replica": replica, "model": model, "weight": value, "reason": reason}
    change = call_admin_api(url, api_key, "POST", "/admin/replicas/weight", fields)
    _print_change(change, f"has weight {value:g}", json=json)


@app.command()
def events(
    *,
    model: ModelFilter = None,
    replica: Annotated[str | None, Option(help="Only this replica.")] = None,
    limit: Annotated[int, Option(min=1, max=1000, help="Maximum number of events.")] = 100,
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """List recent status changes that this gateway saw and the decisions of operators, newest first."""
    wanted = {"model": model, "replica": replica, "limit": limit}
    found = call_admin_api(url, api_key, "GET", "/admin/replicas/events", parameters=wanted)["data"]
    print_records(
        found,
        ("at", "model", "replica", "event", "by", "reason"),
        lambda event: (
            format_timestamp(event["at"], "seconds"),
            *(event["model"], event["replica"], _describe_event(event)),
            *(event["actor"], event["reason"]),
        ),
        "No events.",
        json=json,
    )


def _describe_event(event: dict[str, Any]) -> str:
    if event["action"] is None:
        return f"{event['previous']} -> {event['status']}"
    return f"weight {event['weight']:g}" if event["weight"] is not None else str(event["action"])


def _wait_until_drained(
    url: str, api_key: str | None, replicas: list[dict[str, Any]], timeout_s: float
) -> list[dict[str, Any]]:
    """Wait until no request is left on the replicas, and return their final views."""
    names = {(view["model"], view["replica"]) for view in replicas}
    give_up_at = time.monotonic() + timeout_s
    while True:
        listed = call_admin_api(url, api_key, "GET", "/admin/replicas")["data"]
        current = [view for view in listed if (view["model"], view["replica"]) in names]
        if all(view["is_drained"] for view in current):
            return current
        if any(view["state"] != "draining" for view in current):
            fail("another operator ended the drain; see `argosy replicas events`", EXIT_FAILURE)
        if time.monotonic() > give_up_at:
            left = sum(max(view["in_flight"], view["running"]) for view in current)
            fail(
                f"{left} requests are left after {timeout_s:g} s; wait longer with --timeout",
                EXIT_FAILURE,
            )
        time.sleep(POLL_INTERVAL_S)


def _print_change(change: dict[str, Any], what: str, *, json: bool) -> None:
    if json:
        print_json(change)
        return
    for view in change["replicas"]:
        typer.echo(f"{view['replica']} of {view['model']} {what}.")
    if not change["persistent"]:
        typer.echo("The gateway has no store: it forgets this when it stops.", err=True)
