"""`argosy keys`: make, list, rotate and revoke API keys."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.account_lookup import (
    Flags,
    Networks,
    ProjectName,
    RoleName,
    ScopeName,
    StoreUrl,
    actor,
    find_key,
    find_project,
    find_user,
    home_project,
    opened,
    opened_or_made,
    show_scope,
)
from argosy.cli.output import AsJson, show, show_json, tell
from argosy.cli.timestamps import parse_duration, parse_future, show_moment

app = typer.Typer(help="API keys: make, list, rotate, revoke.", no_args_is_help=True)

if TYPE_CHECKING:
    from argosy.store import Store

DAY_S = 86400.0

KeyName = Annotated[str, typer.Argument(metavar="KEY", help="Its id, name or beginning.")]


@app.command("create")
def create(
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
    network: Networks = None,
    flag: Flags = None,
    expires: Annotated[
        float | None,
        typer.Option(
            parser=parse_future, metavar="WHEN", help="A date (UTC), or a duration like 90d."
        ),
    ] = None,
    store: StoreUrl = None,
    json: AsJson = False,
) -> None:
    """Make a key. It is shown this once; without --project it is the default project's."""
    with opened_or_made(store) as opened_store:
        home = home_project(opened_store, project)
        made, plain = opened_store.accounts.create_key(
            home.id,
            _free_name(opened_store, home.id) if name is None else name,
            user=None if user is None else find_user(opened_store, user).id,
            role=role,
            scope=scope or _usual_scope(role, project),
            models=model or (),
            networks=network or (),
            flags=flag or (),
            expires_at=expires,
            actor=actor(),
        )
    if json:
        show_json(made, key=plain)
        return
    typer.echo(f"A key of the project {home.name!r}; it is not shown again:", err=True)
    typer.echo(plain)


@app.command("list")
def list_(
    *,
    project: ProjectName = None,
    all_: Annotated[bool, typer.Option("--all", help="Revoked ones too.")] = False,
    store: StoreUrl = None,
    json: AsJson = False,
) -> None:
    """List keys by their beginnings."""
    with opened(store) as opened_store:
        of = None if project is None else find_project(opened_store, project).id
        keys = [
            key for key in opened_store.accounts.list_keys(of) if all_ or key.revoked_at is None
        ]
        projects = {item.id: item.name for item in opened_store.accounts.list_projects()}
    show(
        keys,
        ("Key", "Name", "Project", "Role", "Of", "Models", "Made", "Expires", "Revoked", "Id"),
        lambda key: (
            f"{key.prefix}-...",
            key.name,
            projects[key.project],
            key.role,
            show_scope(key),
            ", ".join(key.models) or "all",
            show_moment(key.created_at),
            show_moment(key.expires_at),
            show_moment(key.revoked_at),
            key.id,
        ),
        "There are no keys. Make one: argosy keys create",
        json=json,
    )


@app.command("rotate")
def rotate(
    key: KeyName,
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
    json: AsJson = False,
) -> None:
    """Make a key in the place of another, which works on for a while."""
    with opened(store) as opened_store:
        old = find_key(opened_store, key)
        made, plain = opened_store.accounts.rotate_key(
            old.id, DAY_S if overlap is None else overlap, actor=actor()
        )
        ends = opened_store.accounts.get_key(old.id).expires_at
    if json:
        show_json(made, key=plain)
        return
    typer.echo(f"{old.prefix}-... works until {show_moment(ends)} UTC. The new key:", err=True)
    typer.echo(plain)


@app.command("revoke")
def revoke(key: KeyName, *, store: StoreUrl = None, json: AsJson = False) -> None:
    """End a key at once."""
    with opened(store) as opened_store:
        ended = opened_store.accounts.revoke_key(find_key(opened_store, key).id, actor=actor())
    tell(ended, f"{ended.prefix}-... ({ended.name}) is revoked.", json=json)


def _usual_scope(role: RoleName, project: str | None) -> ScopeName:
    """Whoever runs the machine runs the gateway; what they give to a project holds in its organisation."""
    return "organisation" if role == "caller" or project is not None else "gateway"


def _free_name(store: Store, project: str) -> str:
    """A name that no key of the project has had."""
    taken = {key.name for key in store.accounts.list_keys(project)}
    return next(name for n in count(1) if (name := f"key-{n}") not in taken)
