"""`argosy tenants users`: list, create, change and disable users."""

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
    typer.Option(help="Where the role applies: in the organisation, or for the whole gateway."),
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
        ("Email", "Organisation", "Project", "Role", "Scope", "Created", "Disabled", "Id"),
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
    role: Annotated[RoleName, typer.Option(help="Role of the user.")] = "user",
    scope: ScopeOption = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Create a user. Requests whose token names no project count for --project."""
    with open_existing_store(store) as opened_store:
        created = opened_store.accounts.create_user(
            find_organisation(opened_store, organisation).id,
            email,
            role=role,
            scope=scope or "organisation",
            project=None if project is None else find_project(opened_store, project).id,
            actor=audit_actor(),
        )
    print_result(created, f"{created.email} is created ({created.id}).", json=json)


@app.command("change")
def change_user(
    user: UserArgument,
    *,
    email: Annotated[str | None, typer.Option(help="New email address.")] = None,
    project: ProjectName = None,
    role: Annotated[RoleName | None, typer.Option(help="Role of the user.")] = None,
    scope: ScopeOption = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Change the properties that are given as options."""
    with open_existing_store(store) as opened_store:
        changes = given_changes(
            email=email,
            role=role,
            scope=scope,
            project=None if project is None else find_project(opened_store, project).id,
        )
        found = find_user(opened_store, user)
        changed = opened_store.accounts.change_user(found.id, **changes, actor=audit_actor())
    print_result(changed, f"{changed.email} is changed.", json=json)


@app.command("disable")
def disable_user(user: UserArgument, *, store: StoreUrl = None) -> None:
    """Disable a user. Requests with their tokens and keys fail from then on."""
    with open_existing_store(store) as opened_store:
        found = find_user(opened_store, user)
        opened_store.accounts.disable_user(found.id, actor=audit_actor())
    typer.echo(f"{found.email} is disabled.")
