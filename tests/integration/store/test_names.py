"""Ages of project names and user emails, which decide whom a token names, on both databases."""

from __future__ import annotations

from tests.integration.store.conftest import ACTOR, START
from tests.support.fake_clock import FakeClock

from argosy.gateway.auth import TokenClaims
from argosy.gateway.auth.credential_index import CredentialIndex
from argosy.store import Project, Store, User

PROJECT_NAME = "web"
EMAIL = "ann@x.test"


def create_tenant(store: Store, name: str) -> tuple[Project, User]:
    """Create an organisation's project and user with names that are unique in the whole gateway."""
    home = store.accounts.create_organisation(name, actor=ACTOR)
    project = store.accounts.create_project(home.id, f"of {name}", actor=ACTOR)
    user = store.accounts.create_user(home.id, f"{name}@x.test", project=project.id, actor=ACTOR)
    return project, user


def rename(store: Store, project: Project, user: User) -> None:
    """Give a project and a user the names that tokens claim."""
    store.accounts.change_project(project.id, name=PROJECT_NAME, actor=ACTOR)
    store.accounts.change_user(user.id, email=EMAIL.upper(), actor=ACTOR)


def find_claimed_projects(store: Store) -> set[str]:
    """Return the projects of a token that claims the project name and of a token that claims the email."""
    index = CredentialIndex(store.load_snapshot())
    claimed = {"project": PROJECT_NAME, "email": ""}, {"project": "", "email": EMAIL}
    tokens = (
        TokenClaims(subject="s", organisation="", role="user", expires_at=0, **names)
        for names in claimed
    )
    return {index.find_by_claims(claims).principal.project for claims in tokens}


def test_token_names_the_first_bearer_of_a_name(store: Store, clock: FakeClock) -> None:
    """An older project that is renamed later cannot take over another tenant's tokens."""
    later, later_user = create_tenant(store, "later")
    clock.now += 1
    first, first_user = create_tenant(store, "first")
    rename(store, first, first_user)
    assert find_claimed_projects(store) == {first.id}
    clock.now += 1
    rename(store, later, later_user)
    assert find_claimed_projects(store) == {first.id}
    clock.now += 1
    store.accounts.archive_organisation(first.organisation, actor=ACTOR)
    assert find_claimed_projects(store) == {later.id}


def test_only_a_different_name_restarts_its_age(store: Store, clock: FakeClock) -> None:
    project, user = create_tenant(store, "first")
    rename(store, project, user)
    renamed_at = store.load_snapshot().renamed_at
    assert renamed_at == {project.id: START, user.id: START}
    clock.now += 1
    rename(store, project, user)
    store.accounts.change_project(project.id, name=PROJECT_NAME, tier="free", actor=ACTOR)
    store.accounts.change_user(user.id, email=EMAIL, role="viewer", actor=ACTOR)
    store.accounts.disable_user(user.id, actor=ACTOR)
    assert store.load_snapshot().renamed_at == renamed_at
