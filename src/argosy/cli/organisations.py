"""`argosy tenants organisations`: who pays."""

from __future__ import annotations

from typing import Annotated

import typer

from argosy.cli.account_lookup import (
    StoreUrl,
    audit_actor,
    find_organisation,
    open_existing_store,
    open_or_create_store,
)
from argosy.cli.output import JsonOutput, print_records, print_result
from argosy.cli.timestamps import format_timestamp

app = typer.Typer(help="Organisations, which own projects and users.", no_args_is_help=True)

OrganisationArgument = Annotated[
    str, typer.Argument(metavar="ORGANISATION", help="Its id or name.")
]


@app.command("list")
def list_organisations(*, store: StoreUrl = None, json: JsonOutput = False) -> None:
    """List organisations."""
    with open_existing_store(store) as opened_store:
        found = opened_store.accounts.list_organisations()
    print_records(
        found,
        ("Organisation", "Made", "Archived", "Id"),
        lambda one: (
            one.name,
            format_timestamp(one.created_at),
            format_timestamp(one.archived_at),
            one.id,
        ),
        "There are no organisations.",
        json=json,
    )


@app.command("create")
def create_organisation(
    name: Annotated[str, typer.Argument()], *, store: StoreUrl = None, json: JsonOutput = False
) -> None:
    """Make an organisation."""
    with open_or_create_store(store) as opened_store:
        made = opened_store.accounts.create_organisation(name, actor=audit_actor())
    print_result(made, f"{made.name} is made ({made.id}).", json=json)


@app.command("rename")
def rename_organisation(
    organisation: OrganisationArgument,
    name: Annotated[str, typer.Argument(help="The new one.")],
    *,
    store: StoreUrl = None,
) -> None:
    """Give an organisation another name."""
    with open_existing_store(store) as opened_store:
        found = find_organisation(opened_store, organisation)
        opened_store.accounts.change_organisation(found.id, name=name, actor=audit_actor())
    typer.echo(f"{found.name} is {name} now.")


@app.command("archive")
def archive_organisation(organisation: OrganisationArgument, *, store: StoreUrl = None) -> None:
    """End an organisation, with its projects and users."""
    with open_existing_store(store) as opened_store:
        found = find_organisation(opened_store, organisation)
        opened_store.accounts.archive_organisation(found.id, actor=audit_actor())
    typer.echo(f"{found.name} is archived.")
