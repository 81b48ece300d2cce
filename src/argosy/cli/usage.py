"""`argosy usage`: what was used and what it cost, summed or row by row."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.account_lookup import (
    OfOrganisation,
    ProjectName,
    StoreUrl,
    find_key,
    find_project,
    find_user,
    id_of_organisation,
    names,
    opened,
)
from argosy.cli.failure import fail
from argosy.cli.money import show_dollars
from argosy.cli.output import AsJson, show
from argosy.cli.timestamps import parse_past

if TYPE_CHECKING:
    from argosy.store import Group, ReportRow

DEFAULT_BY = "project,model"

Since = Annotated[
    float | None,
    typer.Option(
        parser=parse_past,
        metavar="WHEN",
        help="From then on: a date (UTC), or so long ago, like 30d.",
    ),
]
Until = Annotated[
    float | None,
    typer.Option(
        parser=parse_past, metavar="WHEN", help="Before then: the date itself is left out."
    ),
]


def usage(
    *,
    by: Annotated[
        str | None,
        typer.Option(
            help="Of day, organisation, project, key, user, model, asked, route, replica; with commas.",
            show_default=DEFAULT_BY,
        ),
    ] = None,
    since: Since = None,
    until: Until = None,
    organisation: OfOrganisation = None,
    project: ProjectName = None,
    key: Annotated[str | None, typer.Option(help="Id, name or beginning.")] = None,
    user: Annotated[str | None, typer.Option(help="Id or email.")] = None,
    model: Annotated[str | None, typer.Option(help="Public name of the one that answered.")] = None,
    asked: Annotated[str | None, typer.Option(help="What clients called it.")] = None,
    route: Annotated[
        str | None, typer.Option(help="Name of the route that decided; '' for none.")
    ] = None,
    replica: Annotated[str | None, typer.Option(help="The one that answered.")] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            help="Write every row of the ledger here, with --by the sums; - is the terminal."
        ),
    ] = None,
    store: StoreUrl = None,
    json: AsJson = False,
) -> None:
    """Say what was used and what it cost."""
    from argosy.store import UsageFilter, read_groups

    if json and csv is not None:
        fail("give one of --json and --csv")
    with opened(store) as opened_store:
        where = UsageFilter(
            since=since,
            until=until,
            organisation=id_of_organisation(opened_store, organisation),
            project=None if project is None else find_project(opened_store, project).id,
            key=None if key is None else find_key(opened_store, key).id,
            user=None if user is None else find_user(opened_store, user).id,
            model=model,
            asked=asked,
            route=route,
            replica=replica,
        )
        if csv is not None and by is None:
            _write(opened_store.usage.csv(where), csv)
            return
        groups = read_groups(DEFAULT_BY if by is None else by)
        if csv is not None:
            _write([opened_store.usage.csv_report(groups, where)], csv)
            return
        rows = opened_store.usage.report(groups, where)
        known = names(opened_store)
    _show(rows, groups, known, json=json)


def _show(rows: list[ReportRow], groups: list[Group], known: dict[str, str], *, json: bool) -> None:
    show(
        rows,
        (
            *(group.capitalize() for group in groups),
            *("Requests", "Input", "Cached", "Output", "Cost"),
        ),
        lambda row: (
            *(_named(getattr(row, group), known) for group in groups),
            f"{row.requests:,}",
            f"{row.input_tokens:,}",
            f"{row.cached_tokens:,}",
            f"{row.output_tokens:,}",
            show_dollars(row.nano_dollars),
        ),
        "Nothing was used.",
        json=json,
    )


def _named(value: str | None, known: dict[str, str]) -> str:
    return known.get(value or "", value or "(none)")


def _write(pieces: Iterable[str], path: Path) -> None:
    if str(path) == "-":
        sys.stdout.writelines(pieces)
        return
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            file.writelines(pieces)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
