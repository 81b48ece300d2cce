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
OfOrganisation = Annotated[str | None, typer.Option("--organisation", "-o", help="Id or name.")]
RoleName = Literal["caller", "viewer", "operator", "admin"]
ScopeName = Literal["organisation", "gateway"]
TierName = Literal["premium", "standard", "free"]
Networks = Annotated[
    list[str] | None,
    typer.Option("--network", help="One to be used from, like 10.0.0.0/8. May be repeated."),
]
Flags = Annotated[
    list[str] | None,
    typer.Option("--flag", help="One that routes of the gateway go by. May be repeated."),
]
DEFAULT = "default"
_ORGANISATIONS = "one that `argosy tenants organisations list` shows"
_PROJECTS = (
    "one that `argosy tenants list` shows (with --scope gateway a role holds for the whole gateway)"
)


@contextmanager
def opened(url: str | None) -> Iterator[Store]:
    """The store that is there, its tables up to date. Whatever it refuses ends the command with a sentence."""
    from argosy.store import find_store

    with _using(find_store, url) as store:
        yield store


@contextmanager
def opened_or_made(url: str | None, *, wanted: bool = False) -> Iterator[Store]:
    """The same for what may come first: the store is made where there is none, which is said unless it is `wanted`."""
    from argosy.store import open_store

    def begin(where: str) -> Store:
        path = Path(where.removeprefix("sqlite:///"))
        begins = where.startswith("sqlite:") and not path.exists() and not wanted
        store = open_store(where)
        if begins:
            typer.echo(
                f"A new store begins in {path}; where a server has another, give --store.", err=True
            )
        return store

    with _using(begin, url) as store:
        yield store


@contextmanager
def _using(find: Callable[[str], Store], url: str | None) -> Iterator[Store]:
    from argosy.store import default_url

    try:
        store = find(url or default_url())
        try:
            store.migrate()
            yield store
        finally:
            store.close()
    except ValueError as error:
        fail(str(error))


def actor() -> str:
    """Who runs the command, for the audit log."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # a user without a name, as in some containers
        return "cli"


def find_organisation(store: Store, wanted: str) -> Organisation:
    """By id, one that has ended too, or by name. Raises ValueError; so do the others."""
    known = store.accounts.list_organisations()
    living = [item for item in known if item.archived_at is None]
    found = _by_id(known, wanted) or [item for item in living if item.name == wanted]
    return _one(found, f"organisation {wanted!r}", "argosy tenants organisations list")


def id_of_organisation(store: Store, wanted: str | None) -> str | None:
    """The id of the organisation that is meant; None where none is: all of them."""
    return None if wanted is None else find_organisation(store, wanted).id


def find_project(store: Store, wanted: str) -> Project:
    """By id, by name, or by organisation and name with a slash between."""
    names = {item.id: item.name for item in store.accounts.list_organisations()}
    known = store.accounts.list_projects()
    living = [item for item in known if item.archived_at is None]
    found = _by_id(known, wanted) or [
        item for item in living if wanted in {item.name, f"{names[item.organisation]}/{item.name}"}
    ]
    return _one(found, f"project {wanted!r}", "argosy tenants list")


def call_project(store: Store, project: Project) -> str:
    """What commands find this one by: its name, or its id where others are called the same."""
    try:
        return project.name if find_project(store, project.name) == project else project.id
    except ValueError:
        return project.id


def find_user(store: Store, wanted: str) -> User:
    """By id or email."""
    known = store.accounts.list_users()
    living = [item for item in known if item.disabled_at is None]
    found = _by_id(known, wanted) or [item for item in living if item.email == wanted.lower()]
    return _one(found, f"user {wanted!r}", "argosy tenants users list")


def find_key(store: Store, wanted: str) -> Key:
    """By id, by name, or by its beginning; the whole key will do."""
    known = store.accounts.list_keys()
    living = [item for item in known if item.revoked_at is None]
    found = [
        item
        for item in known
        if wanted in {item.id, item.prefix} or wanted.startswith(f"{item.prefix}-")
    ]
    if not found:  # a key that was rotated has the name of the one in its place
        found = [item for item in living if wanted == item.name and item.replaced_by is None]
    return _one(found, f"key {wanted[:20]!r}", "argosy keys list --all")


def home_organisation(
    store: Store, wanted: str, instead: str = f"--organisation, {_ORGANISATIONS}"
) -> Organisation:
    """The organisation that is meant; the default one is made when there is none at all."""
    known = store.accounts.list_organisations()
    if wanted == DEFAULT and not known:
        return store.accounts.create_organisation(DEFAULT, actor=actor())
    if wanted == DEFAULT and not any(_is_default(item) for item in known):
        raise ValueError(f"no organisation is called {DEFAULT!r}; give {instead}")
    return find_organisation(store, wanted)


def home_project(store: Store, wanted: str | None) -> Project:
    """The project that is meant; the default organisation's default one is made when there is none."""
    if wanted is not None:
        return find_project(store, wanted)
    organisation = home_organisation(store, DEFAULT, f"--project, {_PROJECTS}")
    for project in store.accounts.list_projects():
        if project.organisation == organisation.id and _is_default(project):
            return project
    return store.accounts.create_project(organisation.id, DEFAULT, actor=actor())


def changes(**options: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever the options hold
    """The options that were given. Raises ValueError when none was."""
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        raise ValueError("give what to change, as one of the options that --help lists")
    return given


def show_scope(holder: Key | User) -> str:
    """Where a role is held, for a table; empty where it makes no difference."""
    return "" if holder.role == "caller" else holder.scope


def names(store: Store) -> dict[str, str]:
    """What people call the ids of accounts, ended ones too; with the id behind it where several are called the same."""
    accounts = store.accounts
    return (
        _distinct({item.id: item.name for item in accounts.list_organisations()})
        | _distinct({item.id: item.name for item in accounts.list_projects()})
        | _distinct({item.id: item.email for item in accounts.list_users()})
        | {item.id: f"{item.name} ({item.prefix}-...)" for item in accounts.list_keys()}
    )


def _distinct(called: dict[str, str]) -> dict[str, str]:
    many = Counter(called.values())
    return {key: f"{name} ({key})" if many[name] > 1 else name for key, name in called.items()}


def _is_default(item: Organisation | Project) -> bool:
    return item.name == DEFAULT and item.archived_at is None


def _by_id(items: Sequence[R], wanted: str) -> list[R]:
    """An id is looked for first: nobody is in its way by giving something of theirs that name."""
    return [item for item in items if item.id == wanted]


def _one(found: Sequence[T], what: str, where: str) -> T:
    if len(found) == 1:
        return found[0]
    many = "there is no" if not found else "there is more than one"
    raise ValueError(f"{many} {what}; see `{where}` for their ids")
