"""Shared parts of the account commands: options, opening the store, the audit actor, and lookup by id or name."""

from __future__ import annotations

import getpass
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from argosy.cli.failure import fail

if TYPE_CHECKING:
    from argosy.store import Key, Organisation, Project, Store, User

R = TypeVar("R", "Organisation", "Project", "User", "Key")

StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="ARGOSY_STORE",
        metavar="URL",
        help="sqlite:///PATH or postgresql://...; by default the store of `argosy serve`.",
    ),
]
ProjectName = Annotated[
    str | None, typer.Option("--project", "-p", help="Id, name or ORGANISATION/NAME.")
]
OrganisationName = Annotated[str, typer.Option("--organisation", "-o", help="Id or name.")]
OrganisationFilterOption = Annotated[
    str | None, typer.Option("--organisation", "-o", help="Id or name.")
]
RoleName = Literal["user", "viewer", "operator", "admin"]
ScopeName = Literal["organisation", "gateway"]
TierName = Literal["premium", "standard", "free"]
AllowedNetworks = Annotated[
    list[str] | None,
    typer.Option(
        "--network", help="Network that requests may come from, like 10.0.0.0/8. May be repeated."
    ),
]
RouteFlags = Annotated[
    list[str] | None,
    typer.Option(
        "--flag",
        help="Flag that routes can match, or `no-speculation`, `keep-alive`, `stream-pacing-tokens` or"
        " `stream-pacing-interval`. May be repeated.",
    ),
]
DEFAULT_NAME = "default"
_ORGANISATION_REMEDY = "one that `argosy tenants organisations list` shows"
_PROJECT_REMEDY = "one that `argosy tenants list` shows (with --scope gateway a role applies to the whole gateway)"


@contextmanager
def open_existing_store(url: str | None) -> Iterator[Store]:
    """Open and migrate a store that exists, by default the default store. A ValueError ends the command."""
    from argosy.store import open_existing_store

    with _open_migrated(open_existing_store, url) as store:
        yield store


@contextmanager
def open_or_create_store(url: str | None, *, is_expected: bool = False) -> Iterator[Store]:
    """Open a store like `open_existing_store`, and create it if it does not exist.

    A new SQLite store is announced unless the caller expects one.
    """
    from argosy.store import open_store, sqlite_path

    def open_and_announce(store_url: str) -> Store:
        path = sqlite_path(store_url)
        is_new = not (is_expected or path is None or path.exists())
        store = open_store(store_url)
        if is_new:
            typer.echo(
                f"Created a new store in {path}. If the server uses another store, give --store.",
                err=True,
            )
        return store

    with _open_migrated(open_and_announce, url) as store:
        yield store


@contextmanager
def _open_migrated(open_url: Callable[[str], Store], url: str | None) -> Iterator[Store]:
    from argosy.store import default_store_url

    try:
        store = open_url(url or default_store_url())
        try:
            store.migrate()
            yield store
        finally:
            store.close()
    except ValueError as error:
        fail(str(error))


def audit_actor() -> str:
    """Return the actor for the audit log: the operating system's user."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # in some containers the user has no name
        return "cli"


def find_organisation(store: Store, reference: str) -> Organisation:
    """Return the organisation with this id, archived ones included, or the active one with this name.

    This function and those below raise ValueError if no record matches, or several do.
    """
    organisations = store.accounts.list_organisations()
    named = [each for each in organisations if each.archived_at is None and each.name == reference]
    described = f"organisation {reference!r}"
    return _find(organisations, reference, named, described, "argosy tenants organisations list")


def find_id(find: Callable[[Store, str], R], store: Store, reference: str | None) -> str | None:
    """Return the id of the record that one of the functions around this one finds, or None without a reference."""
    return None if reference is None else find(store, reference).id


def find_project(store: Store, reference: str) -> Project:
    """Return the project with this id, name or `ORGANISATION/NAME`. Archived projects are found only by id."""
    names = {item.id: item.name for item in store.accounts.list_organisations()}
    projects = store.accounts.list_projects()
    named = [
        each
        for each in projects
        if each.archived_at is None
        and reference in {each.name, f"{names[each.organisation]}/{each.name}"}
    ]
    return _find(projects, reference, named, f"project {reference!r}", "argosy tenants list")


def display_name(store: Store, project: Project) -> str:
    """Return the reference by which commands find the project: its name, or its id if the name is ambiguous."""
    try:
        return project.name if find_project(store, project.name) == project else project.id
    except ValueError:
        return project.id


def find_user(store: Store, reference: str) -> User:
    """Return the user with this id or email. Disabled users are found only by id."""
    users = store.accounts.list_users()
    named = [each for each in users if each.disabled_at is None and each.email == reference.lower()]
    return _find(users, reference, named, f"user {reference!r}", "argosy tenants users list")


def find_key(store: Store, reference: str) -> Key:
    """Return the key with this id, prefix, full secret or name. Revoked keys are not found by name."""
    keys = store.accounts.list_keys()
    named = [
        each for each in keys if each.prefix == reference or reference.startswith(f"{each.prefix}-")
    ] or [  # a rotated key and its replacement have the same name
        each
        for each in keys
        if each.revoked_at is None and each.name == reference and each.replaced_by is None
    ]
    return _find(keys, reference, named, f"key {reference[:20]!r}", "argosy keys list --all")


def resolve_organisation(
    store: Store, reference: str, alternative: str = f"--organisation, {_ORGANISATION_REMEDY}"
) -> Organisation:
    """Return the organisation. The default organisation is created if no organisation exists.

    The error message recommends the options `alternative` if there are only others.
    """
    organisations = store.accounts.list_organisations()
    if reference == DEFAULT_NAME and not organisations:
        return store.accounts.create_organisation(DEFAULT_NAME, actor=audit_actor())
    if reference == DEFAULT_NAME and not any(_is_default(item) for item in organisations):
        raise ValueError(f"no organisation is called {DEFAULT_NAME!r}; give {alternative}")
    return find_organisation(store, reference)


def resolve_project(store: Store, reference: str | None) -> Project:
    """Return the project. None is the default project of the default organisation, created if it is missing."""
    if reference is not None:
        return find_project(store, reference)
    organisation = resolve_organisation(store, DEFAULT_NAME, f"--project, {_PROJECT_REMEDY}")
    for project in store.accounts.list_projects():
        if project.organisation == organisation.id and _is_default(project):
            return project
    return store.accounts.create_project(organisation.id, DEFAULT_NAME, actor=audit_actor())


def given_changes(**options: Any) -> dict[str, Any]:  # noqa: ANN401 - options have any type
    """Return the options that are not None. Raises ValueError if all are."""
    changes = {name: value for name, value in options.items() if value is not None}
    if not changes:
        raise ValueError("nothing to change; give one of the options that --help lists")
    return changes


def format_scope(holder: Key | User) -> str:
    """Return the scope of a role for a table. The scope of the role `user` has no effect and is left empty."""
    return "" if holder.role == "user" else holder.scope


def account_names(store: Store) -> dict[str, str]:
    """Return display names of all accounts by id, archived ones included. Ambiguous names contain the id."""
    accounts = store.accounts
    return (
        _disambiguate_names({item.id: item.name for item in accounts.list_organisations()})
        | _disambiguate_names({item.id: item.name for item in accounts.list_projects()})
        | _disambiguate_names({item.id: item.email for item in accounts.list_users()})
        | {item.id: f"{item.name} ({item.prefix}-...)" for item in accounts.list_keys()}
    )


def format_owner(names: Mapping[str, str], organisation: str | None, project: str | None) -> str:
    """Return the owner of an adapter or a prompt for a table. `names` are those of `account_names`."""
    owners = [each for each in (organisation, project) if each is not None]
    return "/".join(names.get(each, each) for each in owners) or "all"


def _disambiguate_names(names_by_id: dict[str, str]) -> dict[str, str]:
    counts = Counter(names_by_id.values())
    return {
        key: f"{name} ({key})" if counts[name] > 1 else name for key, name in names_by_id.items()
    }


def _is_default(item: Organisation | Project) -> bool:
    return item.name == DEFAULT_NAME and item.archived_at is None


def _find(
    items: Sequence[R], reference: str, named: Sequence[R], description: str, list_command: str
) -> R:
    """Return the item with this id, or else the only one that is called so. No name can hide an id."""
    found = [item for item in items if item.id == reference] or named
    if len(found) == 1:
        return found[0]
    problem = "there is no" if not found else "there is more than one"
    raise ValueError(f"{problem} {description}; see `{list_command}` for their ids")
