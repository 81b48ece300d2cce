"""`argosy tenants organisations`: list, create, rename and archive organisations."""

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
    str, typer.Argument(metavar="ORGANISATION", help="Id or name of the organisation.")
]


@app.command("list")
def list_organisations(*, store: StoreUrl = None, json: JsonOutput = False) -> None:
    """List organisations."""
    with open_existing_store(store) as opened_store:
        found = opened_store.accounts.list_organisations()
    print_records(
        found,
        ("Organisation", "Created", "Archived", "Id"),
        lambda organisation: (
            organisation.name,
            format_timestamp(organisation.created_at),
            format_timestamp(organisation.archived_at),
            organisation.id,
        ),
        "There are no organisations.",
        json=json,
    )


@app.command("create")
def create_organisation(
    name: Annotated[str, typer.Argument()], *, store: StoreUrl = None, json: JsonOutput = False
) -> None:
    """Create an organisation."""
    with open_or_create_store(store) as opened_store:
        created = opened_store.accounts.create_organisation(name, actor=audit_actor())
    print_result(created, f"{created.name} is created ({created.id}).", json=json)


@app.command("rename")
def rename_organisation(
    organisation: OrganisationArgument,
    name: Annotated[str, typer.Argument(help="New name.")],
    *,
    store: StoreUrl = None,
) -> None:
    """Rename an organisation."""
    with open_existing_store(store) as opened_store:
        found = find_organisation(opened_store, organisation)
        opened_store.accounts.change_organisation(found.id, name=name, actor=audit_actor())
    typer.echo(f"{found.name} is renamed to {name}.")


@app.command("archive")
def archive_organisation(organisation: OrganisationArgument, *, store: StoreUrl = None) -> None:
    """Archive an organisation, with its projects and users."""
    with open_existing_store(store) as opened_store:
        found = find_organisation(opened_store, organisation)
        opened_store.accounts.archive_organisation(found.id, actor=audit_actor())
    typer.echo(f"{found.name} is archived.")
