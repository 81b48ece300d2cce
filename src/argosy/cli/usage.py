"""`argosy usage`: tokens and costs from the ledger, as sums or as rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

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
from argosy.cli.quantities import format_dollars, parse_past_time

DEFAULT_GROUPS = "project,model"

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


def usage(
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
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Show the used tokens and their cost."""
    from argosy.store import UsageFilter, parse_report_groups

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
            _write_csv(opened_store.ledger.export_csv(usage_filter), csv)
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
