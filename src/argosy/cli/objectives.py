"""`argosy objectives`: service level objectives of a fleet, their error budgets, and rules for other systems."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import typer

from argosy.cli.failure import fail
from argosy.cli.fleet_target import FilesArgument, FilesOption, load_declaration
from argosy.cli.output import JsonOutput, print_records
from argosy.cli.server_client import DEFAULT_URL, GatewayApiKey, GatewayUrl, call_admin_api
from argosy.policy.objectives import (
    BURN_WINDOWS,
    OUTAGE_WINDOW,
    RULE_FORMATS,
    Objective,
    format_duration,
)

app = typer.Typer(help="Service level objectives and error budgets.", no_args_is_help=True)


@app.command("list")
def list_objectives(
    *, url: GatewayUrl = DEFAULT_URL, api_key: GatewayApiKey = None, json: JsonOutput = False
) -> None:
    """Show the budgets of all objectives and how fast they burn."""
    print_records(
        call_admin_api(url, api_key, "GET", "/admin/objectives")["data"],
        ("Objective", "Target", "Budget left", "Burn", "Explanation"),
        lambda row: (
            row["name"],
            row["target"],
            "unknown" if row["remaining"] is None else f"{row['remaining']:.0%}",
            f"{row['burn_rate']:.3g}x",
            row["explanation"] + (f" Not complete: {row['problem']}." if row["problem"] else ""),
        ),
        "No objective is declared. Add `objectives.slos` to the settings.",
        json=json,
    )


@app.command()
def check(
    files: FilesArgument = None, *, overlays: FilesOption = None, json: JsonOutput = False
) -> None:
    """Show for each objective of a declaration when its alerts fire, and the least traffic at which they can."""
    rows: list[dict[str, Any]] = [
        {
            "objective": objective.name,
            "severity": "outage" if window is OUTAGE_WINDOW else window.severity,
            "windows": f"{format_duration(window.long_s)} / {format_duration(window.short_s)}",
            "miss_rate": window.max_miss_rate(objective.budget_share),
            "fires_after_s": window.fires_after_s(objective.budget_share),
            "min_requests_per_hour": window.min_requests_per_s(objective.budget_share) * 3600,
            "is_capped": window.is_capped(objective.budget_share),
        }
        for objective in _load_objectives(files, overlays)
        for window in (*BURN_WINDOWS, OUTAGE_WINDOW)
    ]
    print_records(
        rows,
        ("Objective", "Alert", "Windows", "Misses above", "All fail: after", "Least requests"),
        lambda row: (
            row["objective"],
            row["severity"],
            row["windows"],
            f"{row['miss_rate']:.3g} of 1" + (" (capped)" if row["is_capped"] else ""),
            f"{row['fires_after_s']:.0f} s",
            f"{math.ceil(row['min_requests_per_hour']):,} an hour",
        ),
        "",
        json=json,
    )


@app.command()
def render(
    files: FilesArgument = None,
    *,
    overlays: FilesOption = None,
    output_format: Annotated[
        Literal["prometheus", "sloth", "pyrra", "openslo"],
        typer.Option("--format", help="System that reads the objectives."),
    ] = "prometheus",
) -> None:
    """Write the objectives of a declaration as rules for Prometheus, or for sloth, Pyrra or OpenSLO."""
    from argosy.settings import dump_yaml

    documents = RULE_FORMATS[output_format](_load_objectives(files, overlays))
    typer.echo("---\n".join(map(dump_yaml, documents)), nl=False)


def _load_objectives(files: FilesArgument, overlays: FilesOption) -> list[Objective]:
    objectives = load_declaration(files, overlays).objectives.build_objectives()
    if not objectives:
        fail("the declaration has no objectives; add `objectives.slos`")
    return objectives
