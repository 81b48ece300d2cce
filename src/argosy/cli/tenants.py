"""`argosy tenants`: projects, and what belongs to them."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import Annotated, Literal

import typer

from argosy.cli import limits_and_prices, organisations, users
from argosy.cli.account_lookup import (
    DEFAULT,
    Flags,
    Networks,
    OrganisationName,
    StoreUrl,
    TierName,
    actor,
    call_project,
    changes,
    find_project,
    home_organisation,
    opened,
    opened_or_made,
)
from argosy.cli.output import AsJson, show, tell
from argosy.cli.timestamps import show_moment

app = typer.Typer(
    help="Tenants: organisations, projects, users, limits, prices.", no_args_is_help=True
)
app.add_typer(organisations.app, name="organisations")
app.add_typer(users.app, name="users")
app.add_typer(limits_and_prices.limits, name="limits")
app.add_typer(limits_and_prices.prices, name="prices")

Project = Annotated[str, typer.Argument(metavar="PROJECT", help="Id or name.")]
Weight = Annotated[float | None, typer.Option(help="Its share, beside others of its tier.")]
Tier = Annotated[TierName | None, typer.Option(help="Premium before standard before free.")]
ShareCache = Annotated[
    bool | None,
    typer.Option(
        "--share-cache/--own-cache",
        help="Whether it shares cached prompts with its organisation's others that do.",
    ),
]
WhenUnsure = Annotated[
    Literal["open", "closed"] | None,
    typer.Option(help="What its limits do while gateways cannot share their state."),
]


@app.command("list")
def list_(*, store: StoreUrl = None, json: AsJson = False) -> None:
    """List projects."""
    with opened(store) as opened_store:
        projects = opened_store.accounts.list_projects()
        owners = {item.id: item.name for item in opened_store.accounts.list_organisations()}
        keys = Counter(
            key.project for key in opened_store.accounts.list_keys() if key.revoked_at is None
        )
    show(
        projects,
        ("Organisation", "Project", "Tier", "Weight", "Keys", "Made", "Archived", "Id"),
        lambda project: (
            owners[project.organisation],
            project.name,
            project.tier,
            f"{project.weight:g}",
            keys[project.id],
            show_moment(project.created_at),
            show_moment(project.archived_at),
            project.id,
        ),
        "There are no tenants. Make a key, and its project: argosy keys create",
        json=json,
    )


@app.command("create")
def create(
    name: Annotated[str, typer.Argument()],
    *,
    organisation: OrganisationName = DEFAULT,
    tier: Tier = None,
    weight: Weight = None,
    share_cache: ShareCache = None,
    when_unsure: WhenUnsure = None,
    network: Networks = None,
    flag: Flags = None,
    store: StoreUrl = None,
    json: AsJson = False,
) -> None:
    """Make a project; the default organisation too, when it is meant and there is none."""
    with opened_or_made(store) as opened_store:
        made = opened_store.accounts.create_project(
            home_organisation(opened_store, organisation).id,
            name,
            tier=tier or "standard",
            weight=1.0 if weight is None else weight,
            share_cache=bool(share_cache),
            when_unsure=when_unsure or "open",
            networks=network or (),
            flags=flag or (),
            actor=actor(),
        )
        called = call_project(opened_store, made)
    command = shlex.join(("argosy", "keys", "create", "-p", called))
    sentence = f"{made.name} is made ({made.id}). Make a key: {command}"
    tell(made, sentence, json=json)


@app.command("change")
def change(
    project: Project,
    *,
    name: Annotated[str | None, typer.Option(help="Another one.")] = None,
    tier: Tier = None,
    weight: Weight = None,
    share_cache: ShareCache = None,
    when_unsure: WhenUnsure = None,
    network: Networks = None,
    anywhere: Annotated[bool, typer.Option("--anywhere", help="Forget its networks.")] = False,
    flag: Flags = None,
    no_flags: Annotated[bool, typer.Option("--no-flags", help="Forget its flags.")] = False,
    store: StoreUrl = None,
    json: AsJson = False,
) -> None:
    """Change what is given."""
    with opened(store) as opened_store:
        if anywhere and network:
            raise ValueError("give --network or --anywhere, not both")
        if no_flags and flag:
            raise ValueError("give --flag or --no-flags, not both")
        given = changes(
            name=name,
            tier=tier,
            weight=weight,
            share_cache=share_cache,
            when_unsure=when_unsure,
            networks=() if anywhere else network or None,
            flags=() if no_flags else flag or None,
        )
        found = find_project(opened_store, project)
        changed = opened_store.accounts.change_project(found.id, **given, actor=actor())
    tell(changed, f"{changed.name} is changed.", json=json)


@app.command("archive")
def archive(project: Project, *, store: StoreUrl = None) -> None:
    """End a project: its keys are refused from now on."""
    with opened(store) as opened_store:
        found = find_project(opened_store, project)
        opened_store.accounts.archive_project(found.id, actor=actor())
    typer.echo(f"{found.name} is archived.")
