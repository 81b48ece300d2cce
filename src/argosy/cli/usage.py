"""`argosy usage`: tokens and costs from the ledger, as sums, as rows, or for other programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from argosy.cli.account_lookup import (
    OrganisationFilterOption,
    ProjectName,
    StoreUrl,
    account_names,
    find_id,
    find_key,
    find_organisation,
    find_project,
    find_user,
    open_existing_store,
)
from argosy.cli.failure import fail
from argosy.cli.output import JsonOutput, print_records
from argosy.cli.quantities import format_dollars, format_timestamp, parse_past_time
from argosy.cli.server_client import DEFAULT_URL, GatewayApiKey, GatewayUrl, call_admin_api

DEFAULT_GROUPS = "project,model"
DEFAULT_COST_PERIOD_S = 6 * 86_400
"""Time before now in which a comparison of costs begins: 7 days with that of today."""

app = typer.Typer()

SinceOption = Annotated[
    float | None,
    typer.Option(
        parser=parse_past_time,
        metavar="WHEN",
        help="Start, inclusive: a date (UTC), or a duration before now, like 30d.",
    ),
]
UntilOption = Annotated[
    float | None,
    typer.Option(
        parser=parse_past_time,
        metavar="WHEN",
        help="End, exclusive: a date (UTC), or a duration before now.",
    ),
]


@app.callback(invoke_without_command=True)
def usage(
    context: typer.Context,
    *,
    by: Annotated[
        str | None,
        typer.Option(
            help="Columns to group by, with commas: day, organisation, project, key, user, model, asked, route,"
            " replica.",
            show_default=DEFAULT_GROUPS,
        ),
    ] = None,
    since: SinceOption = None,
    until: UntilOption = None,
    organisation: OrganisationFilterOption = None,
    project: ProjectName = None,
    key: Annotated[str | None, typer.Option(help="Id, name or prefix.")] = None,
    user: Annotated[str | None, typer.Option(help="Id or email.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Public name of the model that answered.")
    ] = None,
    asked: Annotated[str | None, typer.Option(help="Model name that clients requested.")] = None,
    route: Annotated[
        str | None, typer.Option(help="Name of the route that was applied; '' for no route.")
    ] = None,
    replica: Annotated[str | None, typer.Option(help="Name of the replica that answered.")] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            help="Write every row of the ledger to this file, or the sums with --by; - is standard output."
        ),
    ] = None,
    archive: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET", help="With --csv, also the rows that `usage archive` moved there."
        ),
    ] = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Show the used tokens and their cost."""
    from argosy.store import UsageFilter, parse_report_groups
    from argosy.usage_archive import UsageArchive

    if context.invoked_subcommand is not None:
        return
    if json and csv is not None:
        fail("give one of --json and --csv")
    with open_existing_store(store) as opened_store:
        usage_filter = UsageFilter(
            since=since,
            until=until,
            organisation=find_id(find_organisation, opened_store, organisation),
            project=find_id(find_project, opened_store, project),
            key=find_id(find_key, opened_store, key),
            user=find_id(find_user, opened_store, user),
            model=model,
            asked=asked,
            route=route,
            replica=replica,
        )
        if csv is not None and by is None:
            ledger = opened_store.ledger
            if archive is None and ledger.list_parts(usage_filter):
                fail("rows of this time were moved to an archive; give it by --archive")
            pages = (
                None
                if archive is None
                else UsageArchive(ledger, archive).iter_records(usage_filter)
            )
            _write_csv(ledger.export_csv(usage_filter, pages), csv)
            return
        groups = parse_report_groups(DEFAULT_GROUPS if by is None else by)
        if csv is not None:
            _write_csv([opened_store.ledger.export_report_csv(groups, usage_filter)], csv)
            return
        rows = opened_store.ledger.report(groups, usage_filter)
        names = account_names(opened_store)
    print_records(
        rows,
        (
            *(group.capitalize() for group in groups),
            *("Requests", "Input", "Cached", "Output", "Cost"),
        ),
        lambda row: (
            *(_format_name(getattr(row, group), names) for group in groups),
            f"{row.requests:,}",
            f"{row.input_tokens:,}",
            f"{row.cached_tokens:,}",
            f"{row.output_tokens:,}",
            format_dollars(row.nano_dollars),
        ),
        "There is no usage.",
        json=json,
    )


@app.command()
def export(
    *,
    output_format: Annotated[  # noqa: ARG001 - the only one
        Literal["focus"],
        typer.Option("--format", help="Format of the export."),
    ] = "focus",
    version: Annotated[Literal["1.2", "1.3"], typer.Option(help="Version of FOCUS.")] = "1.2",
    file_format: Annotated[
        Literal["csv", "parquet"],
        typer.Option(help="Format of the file. Parquet needs the extra `cold`."),
    ] = "csv",
    output: Annotated[Path, typer.Option(help="File to write; - is standard output.")] = Path("-"),
    since: SinceOption = None,
    until: UntilOption = None,
    organisation: OrganisationFilterOption = None,
    project: ProjectName = None,
    store: StoreUrl = None,
) -> None:
    """Export the cost of whole days in the FOCUS format of the FinOps Foundation."""
    from argosy.store import FocusExport, UsageFilter
    from argosy.usage_archive import write_focus_parquet

    if file_format == "parquet" and str(output) == "-":
        fail("Parquet is written to a file. Add --output FILE.parquet.")
    with open_existing_store(store) as opened_store:
        usage_filter = UsageFilter(
            since=since,
            until=until,
            organisation=find_id(find_organisation, opened_store, organisation),
            project=find_id(find_project, opened_store, project),
        )
        charges = FocusExport(
            opened_store.ledger,
            opened_store.accounts,
            opened_store.limits_and_prices,
            version,
            usage_filter,
            hardware=opened_store.hardware_costs,
        )
        if file_format == "parquet":
            write_focus_parquet(charges, output)
        else:
            _write_csv(charges.iter_csv(), output)


@app.command("archive")
def archive_usage(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="Folder, or URL of an object store like s3://bucket/name."
        ),
    ],
    *,
    before: Annotated[
        float,
        typer.Option(
            parser=parse_past_time,
            metavar="WHEN",
            help="Move days that ended before a date (UTC), or a duration before now.",
        ),
    ],
    store: StoreUrl = None,
) -> None:
    """Move single rows of whole days from the ledger into Parquet files. Sums stay, to the nano-dollar."""
    from argosy.usage_archive import UsageArchive

    with open_existing_store(store) as opened_store:
        moved = UsageArchive(opened_store.ledger, target).move(before)
    typer.echo(f"{moved:,} rows were moved to {target}.")


@app.command()
def cost(
    *,
    since: SinceOption = None,
    until: UntilOption = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Compare what projects were billed with the hardware that they used, by default of the last 7 days.

    Pools need `dollars_per_hour` in the fleet file. Idle time has rows of its own.
    """
    from argosy.store import compare_costs

    now = time.time()
    with open_existing_store(store) as opened_store:
        rows = compare_costs(
            opened_store.ledger,
            opened_store.hardware_costs,
            now - DEFAULT_COST_PERIOD_S if since is None else since,
            now if until is None else until,
        )
        names = account_names(opened_store)
    print_records(
        rows,
        ("Model", "Project", "Billed", "Caused"),
        lambda row: (
            row.model,
            "(idle)" if row.is_idle else _format_name(row.project, names),
            format_dollars(row.billed),
            format_dollars(row.caused),
        ),
        "There is no usage and no cost of hardware.",
        json=json,
    )


@app.command()
def budgets(*, store: StoreUrl = None, json: JsonOutput = False) -> None:
    """Show the use of the limits for a day or a month, and when they are used up at the present rate."""
    from argosy.store import list_budgets

    with open_existing_store(store) as opened_store:
        limits = opened_store.limits_and_prices.list_limits()
        rows = list_budgets(opened_store.ledger, limits, time.time())
        names = account_names(opened_store)
    print_records(
        rows,
        ("Owner", "Model", "Unit", "Window", "Used", "Limit", "Share", "Used up"),
        lambda row: (
            f"{row.limit.owner_kind} {_format_name(row.limit.owner, names)}",
            row.limit.model or "all",
            "dollars" if row.limit.unit == "nano_dollars" else row.limit.unit,
            row.limit.window,
            _format_amount(row.limit.unit, row.forecast.used),
            _format_amount(row.limit.unit, row.limit.amount),
            f"{row.used_fraction:.0%}",
            format_timestamp(row.forecast.exhausted_at),
        ),
        "There is no limit for a day or a month.",
        json=json,
    )


@app.command()
def outliers(*, store: StoreUrl = None, json: JsonOutput = False) -> None:
    """List requests of the last 7 days that cost 10 times the 99th percentile of their project and model, or more."""
    from argosy.store import list_outliers

    with open_existing_store(store) as opened_store:
        rows = list_outliers(
            opened_store.ledger,
            opened_store.accounts,
            opened_store.limits_and_prices,
            time.time(),
        )
        names = account_names(opened_store)
    print_records(
        rows,
        ("Ended", "Request", "Project", "Model", "Cost", "p99", "Reason"),
        lambda row: (
            format_timestamp(row.record.ended_at),
            row.record.request,
            _format_name(row.record.project, names),
            row.record.model,
            format_dollars(row.record.nano_dollars),
            format_dollars(row.p99_nano_dollars),
            row.reason,
        ),
        "No request of the last 7 days is an outlier.",
        json=json,
    )


@app.command()
def advice(
    *, url: GatewayUrl = DEFAULT_URL, api_key: GatewayApiKey = None, json: JsonOutput = False
) -> None:
    """Show which models have idle or too many replicas, by their requests of the last 14 days, and what fewer save."""
    answer = call_admin_api(url, api_key, "GET", "/admin/costs/advice")
    print_records(
        answer["data"],
        ("Model", "Owner", "Replicas", "Advice", "Mean use", "Busiest", "Saves a month", "Reason"),
        lambda row: (
            row["model"],
            ", ".join(row["owners"]),
            row["replicas"],
            _describe_advice(row),
            _format_ratio(row["mean_ratio"]),
            _format_ratio(row["peak_ratio"]),
            format_dollars(row["saved_nano_dollars"]),
            row["reason"],
        ),
        "No replica serves a model.",
        json=json,
    )


def _describe_advice(row: dict[str, Any]) -> str:
    if row["advised_replicas"] == row["replicas"]:
        return str(row["verdict"])
    return f"{row['verdict']}: {row['advised_replicas']}"


def _format_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0%}"


def _format_amount(unit: str, amount: int) -> str:
    return format_dollars(amount) if unit == "nano_dollars" else f"{amount:,}"


def _format_name(value: str | None, account_names: dict[str, str]) -> str:
    return account_names.get(value or "", value or "(none)")


def _write_csv(rows: Iterable[str], path: Path) -> None:
    if str(path) == "-":
        sys.stdout.writelines(rows)
        return
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            file.writelines(rows)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
