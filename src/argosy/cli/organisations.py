"""`argosy tenants organisations`: who pays."""

from __future__ import annotations

from typing import Annotated

import typer

from argosy.cli.account_lookup import StoreUrl, actor, find_organisation, opened, opened_or_made
from argosy.cli.output import AsJson, show, tell
from argosy.cli.timestamps import show_moment

app = typer.Typer(help="Organisations, which own projects and users.", no_args_is_help=True)

Organisation = Annotated[str, typer.Argument(metavar="ORGANISATION", help="Its id or name.")]


@app.command("list")
def list_(*, store: StoreUrl = None, json: AsJson = False) -> None:
    """List organisations."""
    with opened(store) as opened_store:
        found = opened_store.accounts.list_organisations()
    show(
        found,
        ("Organisation", "Made", "Archived", "Id"),
        lambda one: (one.name, show_moment(one.created_at), show_moment(one.archived_at), one.id),
        "There are no organisations.",
        json=json,
    )


@app.command("create")
def create(
    name: Annotated[str, typer.Argument()], *, store: StoreUrl = None, json: AsJson = False
) -> None:
    """Make an organisation."""
    with opened_or_made(store) as opened_store:
        made = opened_store.accounts.create_organisation(name, actor=actor())
    tell(made, f"{made.name} is made ({made.id}).", json=json)


@app.command("rename")
def rename(
    organisation: Organisation,
    name: Annotated[str, typer.Argument(help="The new one.")],
    *,
    store: StoreUrl = None,
) -> None:
    """Give an organisation another name."""
    with opened(store) as opened_store:
        found = find_organisation(opened_store, organisation)
        opened_store.accounts.change_organisation(found.id, name=name, actor=actor())
    typer.echo(f"{found.name} is {name} now.")


@app.command("archive")
def archive(organisation: Organisation, *, store: StoreUrl = None) -> None:
    """End an organisation, with its projects and users."""
    with opened(store) as opened_store:
        found = find_organisation(opened_store, organisation)
        opened_store.accounts.archive_organisation(found.id, actor=actor())
    typer.echo(f"{found.name} is archived.")
