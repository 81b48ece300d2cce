"""`argosy tenants users`: the people who sign in with tokens, or own keys."""

from __future__ import annotations

from typing import Annotated

import typer

from argosy.cli.account_lookup import (
    DEFAULT_NAME,
    OrganisationName,
    ProjectName,
    RoleName,
    ScopeName,
    StoreUrl,
    audit_actor,
    find_organisation,
    find_project,
    find_user,
    format_scope,
    given_changes,
    open_existing_store,
)
from argosy.cli.output import JsonOutput, print_records, print_result
from argosy.cli.timestamps import format_timestamp

app = typer.Typer(help="Users, who sign in with tokens.", no_args_is_help=True)

UserArgument = Annotated[str, typer.Argument(metavar="USER", help="Id or email.")]
ScopeOption = Annotated[
    ScopeName | None,
    typer.Option(help="Where the role is held: in the organisation, or for the whole gateway."),
]


@app.command("list")
def list_users(*, store: StoreUrl = None, json: JsonOutput = False) -> None:
    """List users."""
    with open_existing_store(store) as opened_store:
        users = opened_store.accounts.list_users()
        projects = {item.id: item.name for item in opened_store.accounts.list_projects()}
        owners = {item.id: item.name for item in opened_store.accounts.list_organisations()}
    print_records(
        users,
        ("Email", "Organisation", "Project", "Role", "Of", "Made", "Disabled", "Id"),
        lambda user: (
            user.email,
            owners[user.organisation],
            projects.get(user.project or ""),
            user.role,
            format_scope(user),
            format_timestamp(user.created_at),
            format_timestamp(user.disabled_at),
            user.id,
        ),
        "There are no users.",
        json=json,
    )


@app.command("create")
def create_user(
    email: Annotated[str, typer.Argument()],
    *,
    organisation: OrganisationName = DEFAULT_NAME,
    project: ProjectName = None,
    role: Annotated[RoleName, typer.Option(help="What they may do.")] = "caller",
    scope: ScopeOption = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Make a user. Their requests count for --project when their token names none."""
    with open_existing_store(store) as opened_store:
        made = opened_store.accounts.create_user(
            find_organisation(opened_store, organisation).id,
            email,
            role=role,
            scope=scope or "organisation",
            project=None if project is None else find_project(opened_store, project).id,
            actor=audit_actor(),
        )
    print_result(made, f"{made.email} is made ({made.id}).", json=json)


@app.command("change")
def change_user(
    user: UserArgument,
    *,
    email: Annotated[str | None, typer.Option(help="Another one.")] = None,
    project: ProjectName = None,
    role: Annotated[RoleName | None, typer.Option(help="What they may do.")] = None,
    scope: ScopeOption = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Change what is given."""
    with open_existing_store(store) as opened_store:
        given = given_changes(
            email=email,
            role=role,
            scope=scope,
            project=None if project is None else find_project(opened_store, project).id,
        )
        found = find_user(opened_store, user)
        changed = opened_store.accounts.change_user(found.id, **given, actor=audit_actor())
    print_result(changed, f"{changed.email} is changed.", json=json)


@app.command("disable")
def disable_user(user: UserArgument, *, store: StoreUrl = None) -> None:
    """End a user: their tokens and keys are refused from now on."""
    with open_existing_store(store) as opened_store:
        found = find_user(opened_store, user)
        opened_store.accounts.disable_user(found.id, actor=audit_actor())
    typer.echo(f"{found.email} is disabled.")
