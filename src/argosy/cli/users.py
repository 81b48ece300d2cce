"""`argosy tenants users`: the people who sign in with tokens, or own keys."""

from __future__ import annotations

from typing import Annotated

import typer

from argosy.cli.account_lookup import (
    DEFAULT,
    OrganisationName,
    ProjectName,
    RoleName,
    ScopeName,
    StoreUrl,
    actor,
    changes,
    find_organisation,
    find_project,
    find_user,
    opened,
    show_scope,
)
from argosy.cli.output import AsJson, show, tell
from argosy.cli.timestamps import show_moment

app = typer.Typer(help="Users, who sign in with tokens.", no_args_is_help=True)

User = Annotated[str, typer.Argument(metavar="USER", help="Id or email.")]
Scope = Annotated[
    ScopeName | None,
    typer.Option(help="Where the role is held: in the organisation, or for the whole gateway."),
]


@app.command("list")
def list_(*, store: StoreUrl = None, json: AsJson = False) -> None:
    """List users."""
    with opened(store) as opened_store:
        users = opened_store.accounts.list_users()
        projects = {item.id: item.name for item in opened_store.accounts.list_projects()}
        owners = {item.id: item.name for item in opened_store.accounts.list_organisations()}
    show(
        users,
        ("Email", "Organisation", "Project", "Role", "Of", "Made", "Disabled", "Id"),
        lambda user: (
            user.email,
            owners[user.organisation],
            projects.get(user.project or ""),
            user.role,
            show_scope(user),
            show_moment(user.created_at),
            show_moment(user.disabled_at),
            user.id,
        ),
        "There are no users.",
        json=json,
    )


@app.command("create")
def create(
    email: Annotated[str, typer.Argument()],
    *,
    organisation: OrganisationName = DEFAULT,
    project: ProjectName = None,
    role: Annotated[RoleName, typer.Option(help="What they may do.")] = "caller",
    scope: Scope = None,
    store: StoreUrl = None,
    json: AsJson = False,
) -> None:
    """Make a user. Their requests count for --project when their token names none."""
    with opened(store) as opened_store:
        made = opened_store.accounts.create_user(
            find_organisation(opened_store, organisation).id,
            email,
            role=role,
            scope=scope or "organisation",
            project=None if project is None else find_project(opened_store, project).id,
            actor=actor(),
        )
    tell(made, f"{made.email} is made ({made.id}).", json=json)


@app.command("change")
def change(
    user: User,
    *,
    email: Annotated[str | None, typer.Option(help="Another one.")] = None,
    project: ProjectName = None,
    role: Annotated[RoleName | None, typer.Option(help="What they may do.")] = None,
    scope: Scope = None,
    store: StoreUrl = None,
    json: AsJson = False,
) -> None:
    """Change what is given."""
    with opened(store) as opened_store:
        given = changes(
            email=email,
            role=role,
            scope=scope,
            project=None if project is None else find_project(opened_store, project).id,
        )
        found = find_user(opened_store, user)
        changed = opened_store.accounts.change_user(found.id, **given, actor=actor())
    tell(changed, f"{changed.email} is changed.", json=json)


@app.command("disable")
def disable(user: User, *, store: StoreUrl = None) -> None:
    """End a user: their tokens and keys are refused from now on."""
    with opened(store) as opened_store:
        found = find_user(opened_store, user)
        opened_store.accounts.disable_user(found.id, actor=actor())
    typer.echo(f"{found.email} is disabled.")
