"""`argosy tenants`: organisations, projects and users, and the subcommands for limits and prices."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import Annotated, Literal

import typer
from msgspec.structs import asdict

from argosy.cli import limits_and_prices
from argosy.cli.account_lookup import (
    DEFAULT_NAME,
    AllowedNetworks,
    OrganisationName,
    ProjectName,
    RoleName,
    RouteFlags,
    ScopeName,
    StoreUrl,
    TierName,
    audit_actor,
    display_name,
    find_id,
    find_organisation,
    find_project,
    find_user,
    format_scope,
    given_changes,
    open_existing_store,
    open_or_create_store,
    resolve_organisation,
)
from argosy.cli.output import JsonOutput, print_records, print_result
from argosy.cli.quantities import format_timestamp

app = typer.Typer(
    help="Tenants: organisations, projects, users, limits, prices.", no_args_is_help=True
)
organisations_app = typer.Typer(
    help="Organisations, which own projects and users.", no_args_is_help=True
)
users_app = typer.Typer(help="Users, who sign in with tokens.", no_args_is_help=True)
retention_app = typer.Typer(
    help="Retention: how long requests and responses of a project are kept.", no_args_is_help=True
)
app.add_typer(organisations_app, name="organisations")
app.add_typer(retention_app, name="retention")
app.add_typer(users_app, name="users")
app.add_typer(limits_and_prices.limits_app, name="limits")
app.add_typer(limits_and_prices.prices_app, name="prices")

OrganisationArgument = Annotated[
    str, typer.Argument(metavar="ORGANISATION", help="Id or name of the organisation.")
]
ProjectArgument = Annotated[str, typer.Argument(metavar="PROJECT", help="Id or name.")]
RetentionKindOption = Annotated[
    Literal["usage", "responses", "samples", "files"],
    typer.Option(
        help="usage: single requests, which become sums by day. responses: responses and conversations."
        " samples: sampled answers. files: files that no batch or job needs."
    ),
]
WeightOption = Annotated[
    float | None, typer.Option(help="Scheduling weight among projects of the same tier.")
]
TierOption = Annotated[
    TierName | None,
    typer.Option(help="Priority class: premium before standard before free."),
]
ShareCacheOption = Annotated[
    bool | None,
    typer.Option(
        "--share-cache/--own-cache",
        help="Whether it shares cached prompts with other projects of its organisation that share theirs.",
    ),
]
QuotaFailureModeOption = Annotated[
    Literal["open", "closed"] | None,
    typer.Option(
        help="What happens to requests with limits while the quota backend is unreachable:"
        " open admits, closed rejects."
    ),
]
QualityOption = Annotated[
    Literal["off", "automatic", "judged"] | None,
    typer.Option(
        help="Whether gateways may keep samples of its answers, graded by fixed checks or also by a model."
        " off deletes those that there are."
    ),
]
UserArgument = Annotated[str, typer.Argument(metavar="USER", help="Id or email.")]
ScopeOption = Annotated[
    ScopeName | None,
    typer.Option(help="Where the role applies: in the organisation, or for the whole gateway."),
]


@organisations_app.command("list")
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


@organisations_app.command("create")
def create_organisation(
    name: Annotated[str, typer.Argument()], *, store: StoreUrl = None, json: JsonOutput = False
) -> None:
    """Create an organisation."""
    with open_or_create_store(store) as opened_store:
        created = opened_store.accounts.create_organisation(name, actor=audit_actor())
    print_result(created, f"{created.name} is created ({created.id}).", json=json)


@organisations_app.command("rename")
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


@organisations_app.command("archive")
def archive_organisation(organisation: OrganisationArgument, *, store: StoreUrl = None) -> None:
    """Archive an organisation, with its projects and users."""
    with open_existing_store(store) as opened_store:
        found = find_organisation(opened_store, organisation)
        opened_store.accounts.archive_organisation(found.id, actor=audit_actor())
    typer.echo(f"{found.name} is archived.")


@app.command("list")
def list_projects(*, store: StoreUrl = None, json: JsonOutput = False) -> None:
    """List projects."""
    with open_existing_store(store) as opened_store:
        projects = opened_store.accounts.list_projects()
        owners = {item.id: item.name for item in opened_store.accounts.list_organisations()}
        keys = Counter(
            key.project for key in opened_store.accounts.list_keys() if key.revoked_at is None
        )
        use = opened_store.stored_bytes.read_use([project.id for project in projects])
    print_records(
        projects,
        (
            "Organisation",
            "Project",
            "Tier",
            "Weight",
            "Keys",
            "Stored bytes",
            "Created",
            "Archived",
            "Id",
        ),
        lambda project: (
            owners[project.organisation],
            project.name,
            project.tier,
            f"{project.weight:g}",
            keys[project.id],
            f"{use[project.id].stored_bytes:,}",
            format_timestamp(project.created_at),
            format_timestamp(project.archived_at),
            project.id,
        ),
        "There are no tenants. Create a key and its project: argosy keys create",
        json=json,
    )


@app.command("create")
def create_project(
    name: Annotated[str, typer.Argument()],
    *,
    organisation: OrganisationName = DEFAULT_NAME,
    tier: TierOption = None,
    weight: WeightOption = None,
    share_cache: ShareCacheOption = None,
    quota_failure_mode: QuotaFailureModeOption = None,
    network: AllowedNetworks = None,
    flag: RouteFlags = None,
    quality: QualityOption = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Create a project, and the default organisation if it is selected and no organisation exists."""
    with open_or_create_store(store) as opened_store:
        created = opened_store.accounts.create_project(
            resolve_organisation(opened_store, organisation).id,
            name,
            tier=tier or "standard",
            weight=1.0 if weight is None else weight,
            share_cache=bool(share_cache),
            quota_failure_mode=quota_failure_mode or "open",
            networks=network or (),
            flags=flag or (),
            quality=quality or "off",
            actor=audit_actor(),
        )
        reference = display_name(opened_store, created)
    command = shlex.join(("argosy", "keys", "create", "-p", reference))
    message = f"{created.name} is created ({created.id}). Create a key: {command}"
    print_result(created, message, json=json)


@app.command("change")
def change_project(
    project: ProjectArgument,
    *,
    name: Annotated[str | None, typer.Option(help="New name.")] = None,
    tier: TierOption = None,
    weight: WeightOption = None,
    share_cache: ShareCacheOption = None,
    quota_failure_mode: QuotaFailureModeOption = None,
    network: AllowedNetworks = None,
    clear_networks: Annotated[
        bool, typer.Option("--clear-networks", help="Remove its networks.")
    ] = False,
    flag: RouteFlags = None,
    clear_flags: Annotated[bool, typer.Option("--clear-flags", help="Remove its flags.")] = False,
    quality: QualityOption = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Change the properties that are given as options."""
    with open_existing_store(store) as opened_store:
        if clear_networks and network:
            raise ValueError("give --network or --clear-networks, not both")
        if clear_flags and flag:
            raise ValueError("give --flag or --clear-flags, not both")
        changes = given_changes(
            name=name,
            tier=tier,
            weight=weight,
            share_cache=share_cache,
            quota_failure_mode=quota_failure_mode,
            networks=() if clear_networks else network or None,
            flags=() if clear_flags else flag or None,
            quality=quality,
        )
        found = find_project(opened_store, project)
        changed = opened_store.accounts.change_project(found.id, **changes, actor=audit_actor())
    print_result(changed, f"{changed.name} is changed.", json=json)


@app.command("archive")
def archive_project(project: ProjectArgument, *, store: StoreUrl = None) -> None:
    """Archive a project. Requests with its keys fail from then on."""
    with open_existing_store(store) as opened_store:
        found = find_project(opened_store, project)
        opened_store.accounts.archive_project(found.id, actor=audit_actor())
    typer.echo(f"{found.name} is archived.")


@app.command("erase")
def erase_project(
    project: ProjectArgument,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Archive a project and erase what the store has of it, except sums of the ledger and the audit log."""
    with open_existing_store(store) as opened_store:
        found = find_project(opened_store, project)
        if not yes:
            typer.confirm(f"Erase the project {found.name} ({found.id}) for ever?", abort=True)
        erased = opened_store.erasure.erase_project(found, actor=audit_actor())
    counts = asdict(erased)
    lines = [
        f"{found.name} ({found.id}) is erased:",
        *(f"  {count:,} {name.replace('_', ' ')}" for name, count in counts.items()),
        (
            "Sums of the ledger and the audit log remain. Memory of gateways and replicas has the rest for a day"
            " at most, and backups as long as you keep them."
        ),
    ]
    if erased.remaining_requests:
        lines.append("Run the command again in an hour for the remaining requests.")
    print_result(erased, "\n".join(lines), json=json)


@retention_app.command("set")
def set_retention(
    project: ProjectArgument,
    *,
    kind: RetentionKindOption,
    days: Annotated[int, typer.Option(min=1, max=36_500, help="Days to keep them.")],
    store: StoreUrl = None,
) -> None:
    """Keep records of one kind of a project for fewer days than the settings of the gateways say."""
    from argosy.store import RetentionRule

    with open_existing_store(store) as opened_store:
        found = find_project(opened_store, project)
        rule = RetentionRule(project=found.id, kind=kind, keep_days=days)
        opened_store.retention.set_rule(rule, actor=audit_actor())
    typer.echo(f"Gateways keep {kind} of {found.name} for {days} days.")


@retention_app.command("list")
def list_retention(*, store: StoreUrl = None, json: JsonOutput = False) -> None:
    """List the projects with a retention of their own."""
    with open_existing_store(store) as opened_store:
        rules = opened_store.retention.list_rules()
        names = {item.id: item.name for item in opened_store.accounts.list_projects()}
    print_records(
        rules,
        ("Project", "Kind", "Days"),
        lambda rule: (names.get(rule.project, rule.project), rule.kind, rule.keep_days),
        "No project has a retention of its own.",
        json=json,
    )


@retention_app.command("remove")
def remove_retention(
    project: ProjectArgument, *, kind: RetentionKindOption, store: StoreUrl = None
) -> None:
    """Let the settings of the gateways hold for a project again."""
    with open_existing_store(store) as opened_store:
        found = find_project(opened_store, project)
        opened_store.retention.remove_rule(found.id, kind, actor=audit_actor())
    typer.echo(f"The settings of the gateways hold for {kind} of {found.name}.")


@users_app.command("list")
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


@users_app.command("create")
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
            project=find_id(find_project, opened_store, project),
            actor=audit_actor(),
        )
    print_result(created, f"{created.email} is created ({created.id}).", json=json)


@users_app.command("change")
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
            project=find_id(find_project, opened_store, project),
        )
        found = find_user(opened_store, user)
        changed = opened_store.accounts.change_user(found.id, **changes, actor=audit_actor())
    print_result(changed, f"{changed.email} is changed.", json=json)


@users_app.command("disable")
def disable_user(user: UserArgument, *, store: StoreUrl = None) -> None:
    """Disable a user. Requests with their tokens and keys fail from then on."""
    with open_existing_store(store) as opened_store:
        found = find_user(opened_store, user)
        opened_store.accounts.disable_user(found.id, actor=audit_actor())
    typer.echo(f"{found.email} is disabled.")
