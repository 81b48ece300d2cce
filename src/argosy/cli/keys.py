"""`argosy keys`: make, list, rotate and revoke API keys."""

from __future__ import annotations

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
    find_key,
    find_project,
    find_user,
    format_scope,
    open_existing_store,
    open_or_create_store,
    resolve_project,
)
from argosy.cli.output import JsonOutput, print_json, print_records, print_result
from argosy.cli.timestamps import format_timestamp, parse_duration, parse_future_time

app = typer.Typer(help="API keys: make, list, rotate, revoke.", no_args_is_help=True)

if TYPE_CHECKING:
    from argosy.store import Store

DEFAULT_OVERLAP_S = 86400.0

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="Its id, name or beginning.")]


@app.command("create")
def create_key(
    name: Annotated[str | None, typer.Argument(help="What it is for.")] = None,
    *,
    project: ProjectName = None,
    role: Annotated[
        RoleName, typer.Option(help="caller asks models; viewer, operator and admin run the fleet.")
    ] = "caller",
    scope: Annotated[
        ScopeName | None,
        typer.Option(
            help="Where the role is held: in the project's organisation, or for the whole gateway; "
            "by default the gateway without --project."
        ),
    ] = None,
    user: Annotated[str | None, typer.Option(help="Id or email of its owner.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model it may use; by default all. May be repeated.")
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
    """Make a key. It is shown this once; without --project it is the default project's."""
    with open_or_create_store(store) as opened_store:
        home = resolve_project(opened_store, project)
        made, plain = opened_store.accounts.create_key(
            home.id,
            _unused_key_name(opened_store, home.id) if name is None else name,
            user=None if user is None else find_user(opened_store, user).id,
            role=role,
            scope=scope or _default_scope(role, project),
            models=model or (),
            networks=network or (),
            flags=flag or (),
            expires_at=expires,
            actor=audit_actor(),
        )
    if json:
        print_json(made, key=plain)
        return
    typer.echo(f"A key of the project {home.name!r}; it is not shown again:", err=True)
    typer.echo(plain)


@app.command("list")
def list_keys(
    *,
    project: ProjectName = None,
    all_: Annotated[bool, typer.Option("--all", help="Revoked ones too.")] = False,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """List keys by their beginnings."""
    with open_existing_store(store) as opened_store:
        of = None if project is None else find_project(opened_store, project).id
        keys = [
            key for key in opened_store.accounts.list_keys(of) if all_ or key.revoked_at is None
        ]
        projects = {item.id: item.name for item in opened_store.accounts.list_projects()}
    print_records(
        keys,
        ("Key", "Name", "Project", "Role", "Of", "Models", "Made", "Expires", "Revoked", "Id"),
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
        "There are no keys. Make one: argosy keys create",
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
            help="How long the old one still works; by default a day.",
        ),
    ] = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Make a key in the place of another, which works on for a while."""
    with open_existing_store(store) as opened_store:
        old = find_key(opened_store, key)
        made, plain = opened_store.accounts.rotate_key(
            old.id, DEFAULT_OVERLAP_S if overlap is None else overlap, actor=audit_actor()
        )
        ends = opened_store.accounts.get_key(old.id).expires_at
    if json:
        print_json(made, key=plain)
        return
    typer.echo(f"{old.prefix}-... works until {format_timestamp(ends)} UTC. The new key:", err=True)
    typer.echo(plain)


@app.command("revoke")
def revoke_key(key: KeyArgument, *, store: StoreUrl = None, json: JsonOutput = False) -> None:
    """End a key at once."""
    with open_existing_store(store) as opened_store:
        ended = opened_store.accounts.revoke_key(
            find_key(opened_store, key).id, actor=audit_actor()
        )
    print_result(ended, f"{ended.prefix}-... ({ended.name}) is revoked.", json=json)


def _default_scope(role: RoleName, project: str | None) -> ScopeName:
    """Whoever runs the machine runs the gateway; what they give to a project holds in its organisation."""
    return "organisation" if role == "caller" or project is not None else "gateway"


def _unused_key_name(store: Store, project: str) -> str:
    """A name that no key of the project has had."""
    taken = {key.name for key in store.accounts.list_keys(project)}
    return next(name for n in count(1) if (name := f"key-{n}") not in taken)
