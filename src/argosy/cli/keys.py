"""`argosy keys`: create, list, rotate and revoke API keys."""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.account_lookup import (
    AllowedNetworks,
    ProjectName,
    RoleName,
    RouteFlags,
    ScopeName,
    StoreUrl,
    audit_actor,
    find_id,
    find_key,
    find_project,
    find_user,
    format_scope,
    open_existing_store,
    open_or_create_store,
    resolve_project,
)
from argosy.cli.output import JsonOutput, print_json, print_records, print_result
from argosy.cli.quantities import format_timestamp, parse_duration, parse_future_time

app = typer.Typer(help="API keys: create, list, rotate, revoke.", no_args_is_help=True)

if TYPE_CHECKING:
    from argosy.store import Key, Project

DEFAULT_OVERLAP_S = 86400.0

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="Id, name or prefix of the key.")]


@app.command("create")
def create_key(
    name: Annotated[str | None, typer.Argument(help="Name that describes its purpose.")] = None,
    *,
    project: ProjectName = None,
    role: Annotated[
        RoleName,
        typer.Option(
            help="user sends requests to models; viewer, operator and admin run the fleet."
        ),
    ] = "user",
    scope: Annotated[
        ScopeName | None,
        typer.Option(
            help="Where the role applies: in the project's organisation, or for the whole gateway; "
            "by default the gateway without --project."
        ),
    ] = None,
    user: Annotated[str | None, typer.Option(help="Id or email of its owner.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model that the key may use; by default all. May be repeated."),
    ] = None,
    network: AllowedNetworks = None,
    flag: RouteFlags = None,
    expires: Annotated[
        float | None,
        typer.Option(
            parser=parse_future_time, metavar="WHEN", help="A date (UTC), or a duration like 90d."
        ),
    ] = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Create a key and show it once. Without --project it belongs to the default project."""
    with open_or_create_store(store) as opened_store:
        owner = resolve_project(opened_store, project)
        if name is None:
            taken = {key.name for key in opened_store.accounts.list_keys(owner.id)}
            name = next(unused for n in count(1) if (unused := f"key-{n}") not in taken)
        # The operator of the machine creates a role without a project.
        default_scope: ScopeName = (
            "organisation" if role == "user" or project is not None else "gateway"
        )
        organisations = opened_store.accounts.list_organisations()
        created, secret = opened_store.accounts.create_key(
            owner.id,
            name,
            user=find_id(find_user, opened_store, user),
            role=role,
            scope=scope or default_scope,
            models=model or (),
            networks=network or (),
            flags=flag or (),
            expires_at=expires,
            actor=audit_actor(),
        )
    if json:
        print_json(created, key=secret)
        return
    reach = _describe_reach(created, owner, {item.id: item.name for item in organisations})
    typer.echo(f"API key {reach}. It is not shown again:", err=True)
    typer.echo(secret)


@app.command("list")
def list_keys(
    *,
    project: ProjectName = None,
    all_: Annotated[bool, typer.Option("--all", help="Include revoked keys.")] = False,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """List keys by their prefixes."""
    with open_existing_store(store) as opened_store:
        project_id = find_id(find_project, opened_store, project)
        keys = [
            key
            for key in opened_store.accounts.list_keys(project_id)
            if all_ or key.revoked_at is None
        ]
        projects = {item.id: item.name for item in opened_store.accounts.list_projects()}
    print_records(
        keys,
        (
            "Key",
            "Name",
            "Project",
            "Role",
            "Scope",
            "Models",
            "Created",
            "Expires",
            "Revoked",
            "Id",
        ),
        lambda key: (
            f"{key.prefix}-...",
            key.name,
            projects[key.project],
            key.role,
            format_scope(key),
            ", ".join(key.models) or "all",
            format_timestamp(key.created_at),
            format_timestamp(key.expires_at),
            format_timestamp(key.revoked_at),
            key.id,
        ),
        "There are no keys. Create one: argosy keys create",
        json=json,
    )


@app.command("rotate")
def rotate_key(
    key: KeyArgument,
    *,
    overlap: Annotated[
        float | None,
        typer.Option(
            parser=parse_duration,
            metavar="DURATION",
            help="How long the old key stays valid; by default a day.",
        ),
    ] = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Replace a key by a new one. The old key stays valid for a while."""
    with open_existing_store(store) as opened_store:
        old = find_key(opened_store, key)
        created, secret = opened_store.accounts.rotate_key(
            old.id, DEFAULT_OVERLAP_S if overlap is None else overlap, actor=audit_actor()
        )
        expires_at = opened_store.accounts.get_key(old.id).expires_at
    if json:
        print_json(created, key=secret)
        return
    typer.echo(
        f"{old.prefix}-... is valid until {format_timestamp(expires_at)}. The new key:",
        err=True,
    )
    typer.echo(secret)


@app.command("revoke")
def revoke_key(key: KeyArgument, *, store: StoreUrl = None, json: JsonOutput = False) -> None:
    """Revoke a key. Requests with it fail from then on. The keys that it replaced are named if they are still valid."""
    from argosy.store import is_key_valid

    with open_existing_store(store) as opened_store:
        revoked = opened_store.accounts.revoke_key(
            find_key(opened_store, key).id, actor=audit_actor()
        )
        older = [
            each
            for each in opened_store.accounts.list_keys(revoked.project)
            if each.name == revoked.name and each.replaced_by and is_key_valid(each, time.time())
        ]
    print_result(revoked, f"{revoked.prefix}-... ({revoked.name}) is revoked.", json=json)
    for each in older:
        typer.echo(
            f"An older key of this name is valid until {format_timestamp(each.expires_at)}. To revoke it too: "
            f"argosy keys revoke {each.id}",
            err=True,
        )


def _describe_reach(key: Key, project: Project, organisation_names: dict[str, str]) -> str:
    """Describe what a key is for. A role above `user` applies to more than the project that the key belongs to."""
    if key.role == "user":
        return f"of the project {project.name!r}"
    if key.scope == "gateway":
        return f"with the role {key.role} of the whole gateway"
    organisation = organisation_names[project.organisation]
    return f"with the role {key.role} of the organisation {organisation!r}"
