"""What the commands on accounts share: the store they open, who acts, and records found by what people call them."""

from __future__ import annotations

import getpass
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from argosy.cli.failure import fail

if TYPE_CHECKING:
    from argosy.store import Key, Organisation, Project, Store, User

T = TypeVar("T")
R = TypeVar("R", "Organisation", "Project", "User")

StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="ARGOSY_STORE",
        metavar="URL",
        help="sqlite:///PATH or postgresql://...; by default the one of `argosy serve`.",
    ),
]
ProjectName = Annotated[
    str | None, typer.Option("--project", "-p", help="Id or name (ORGANISATION/NAME too).")
]
OrganisationName = Annotated[str, typer.Option("--organisation", "-o", help="Id or name.")]
OrganisationFilterOption = Annotated[
    str | None, typer.Option("--organisation", "-o", help="Id or name.")
]
RoleName = Literal["caller", "viewer", "operator", "admin"]
ScopeName = Literal["organisation", "gateway"]
TierName = Literal["premium", "standard", "free"]
AllowedNetworks = Annotated[
    list[str] | None,
    typer.Option("--network", help="One to be used from, like 10.0.0.0/8. May be repeated."),
]
RouteFlags = Annotated[
    list[str] | None,
    typer.Option("--flag", help="One that routes of the gateway go by. May be repeated."),
]
DEFAULT_NAME = "default"
_ORGANISATION_REMEDY = "one that `argosy tenants organisations list` shows"
_PROJECT_REMEDY = (
    "one that `argosy tenants list` shows (with --scope gateway a role holds for the whole gateway)"
)


@contextmanager
def open_existing_store(url: str | None) -> Iterator[Store]:
    """The store that is there, its tables up to date. Whatever it refuses ends the command with a sentence."""
    from argosy.store import open_existing_store

    with _open_migrated(open_existing_store, url) as store:
        yield store


@contextmanager
def open_or_create_store(url: str | None, *, is_expected: bool = False) -> Iterator[Store]:
    """The same for what may come first: the store is made where there is none, which is said unless it is `wanted`."""
    from argosy.store import open_store

    def begin(where: str) -> Store:
        path = Path(where.removeprefix("sqlite:///"))
        begins = where.startswith("sqlite:") and not path.exists() and not is_expected
        store = open_store(where)
        if begins:
            typer.echo(
                f"A new store begins in {path}; where a server has another, give --store.", err=True
            )
        return store

    with _open_migrated(begin, url) as store:
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
    """Who runs the command, for the audit log."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # a user without a name, as in some containers
        return "cli"


def find_organisation(store: Store, reference: str) -> Organisation:
    """By id, one that has ended too, or by name. Raises ValueError; so do the others."""
    known = store.accounts.list_organisations()
    living = [item for item in known if item.archived_at is None]
    found = _match_by_id(known, reference) or [item for item in living if item.name == reference]
    return _require_single(
        found, f"organisation {reference!r}", "argosy tenants organisations list"
    )


def find_organisation_id(store: Store, reference: str | None) -> str | None:
    """The id of the organisation that is meant; None where none is: all of them."""
    return None if reference is None else find_organisation(store, reference).id


def find_project(store: Store, reference: str) -> Project:
    """By id, by name, or by organisation and name with a slash between."""
    names = {item.id: item.name for item in store.accounts.list_organisations()}
    known = store.accounts.list_projects()
    living = [item for item in known if item.archived_at is None]
    found = _match_by_id(known, reference) or [
        item
        for item in living
        if reference in {item.name, f"{names[item.organisation]}/{item.name}"}
    ]
    return _require_single(found, f"project {reference!r}", "argosy tenants list")


def display_name(store: Store, project: Project) -> str:
    """What commands find this one by: its name, or its id where others are called the same."""
    try:
        return project.name if find_project(store, project.name) == project else project.id
    except ValueError:
        return project.id


def find_user(store: Store, reference: str) -> User:
    """By id or email."""
    known = store.accounts.list_users()
    living = [item for item in known if item.disabled_at is None]
    found = _match_by_id(known, reference) or [
        item for item in living if item.email == reference.lower()
    ]
    return _require_single(found, f"user {reference!r}", "argosy tenants users list")


def find_key(store: Store, reference: str) -> Key:
    """By id, by name, or by its beginning; the whole key will do."""
    known = store.accounts.list_keys()
    living = [item for item in known if item.revoked_at is None]
    found = [
        item
        for item in known
        if reference in {item.id, item.prefix} or reference.startswith(f"{item.prefix}-")
    ]
    if not found:  # a key that was rotated has the name of the one in its place
        found = [item for item in living if reference == item.name and item.replaced_by is None]
    return _require_single(found, f"key {reference[:20]!r}", "argosy keys list --all")


def resolve_organisation(
    store: Store, reference: str, alternative: str = f"--organisation, {_ORGANISATION_REMEDY}"
) -> Organisation:
    """The organisation that is meant; the default one is made when there is none at all."""
    known = store.accounts.list_organisations()
    if reference == DEFAULT_NAME and not known:
        return store.accounts.create_organisation(DEFAULT_NAME, actor=audit_actor())
    if reference == DEFAULT_NAME and not any(_is_default(item) for item in known):
        raise ValueError(f"no organisation is called {DEFAULT_NAME!r}; give {alternative}")
    return find_organisation(store, reference)


def resolve_project(store: Store, reference: str | None) -> Project:
    """The project that is meant; the default organisation's default one is made when there is none."""
    if reference is not None:
        return find_project(store, reference)
    organisation = resolve_organisation(store, DEFAULT_NAME, f"--project, {_PROJECT_REMEDY}")
    for project in store.accounts.list_projects():
        if project.organisation == organisation.id and _is_default(project):
            return project
    return store.accounts.create_project(organisation.id, DEFAULT_NAME, actor=audit_actor())


def given_changes(**options: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever the options hold
    """The options that were given. Raises ValueError when none was."""
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        raise ValueError("give what to change, as one of the options that --help lists")
    return given


def format_scope(holder: Key | User) -> str:
    """Where a role is held, for a table; empty where it makes no difference."""
    return "" if holder.role == "caller" else holder.scope


def account_names(store: Store) -> dict[str, str]:
    """What people call the ids of accounts, ended ones too; with the id behind it where several are called the same."""
    accounts = store.accounts
    return (
        _disambiguate_names({item.id: item.name for item in accounts.list_organisations()})
        | _disambiguate_names({item.id: item.name for item in accounts.list_projects()})
        | _disambiguate_names({item.id: item.email for item in accounts.list_users()})
        | {item.id: f"{item.name} ({item.prefix}-...)" for item in accounts.list_keys()}
    )


def _disambiguate_names(names_by_id: dict[str, str]) -> dict[str, str]:
    many = Counter(names_by_id.values())
    return {key: f"{name} ({key})" if many[name] > 1 else name for key, name in names_by_id.items()}


def _is_default(item: Organisation | Project) -> bool:
    return item.name == DEFAULT_NAME and item.archived_at is None


def _match_by_id(items: Sequence[R], reference: str) -> list[R]:
    """An id is looked for first: nobody is in its way by giving something of theirs that name."""
    return [item for item in items if item.id == reference]


def _require_single(found: Sequence[T], description: str, list_command: str) -> T:
    if len(found) == 1:
        return found[0]
    many = "there is no" if not found else "there is more than one"
    raise ValueError(f"{many} {description}; see `{list_command}` for their ids")
