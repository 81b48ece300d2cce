"""Ages of project names and user emails, which decide whom a token names, on both databases."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from tests.integration.store.conftest import ACTOR, START, migrate_to_revision
from tests.support.fake_clock import FakeClock

from argosy.gateway.auth.credential_index import CredentialIndex
from argosy.gateway.auth.token_claims import TokenClaims
from argosy.store import Project, Store, User, open_store
from argosy.store.database import Database

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


OLDER_RENAMES = (
    f"UPDATE projects SET name='{PROJECT_NAME}' WHERE id=:project",  # noqa: S608 - constants
    f"UPDATE users SET email='{EMAIL}' WHERE id=:user",  # noqa: S608 - constants
)
"""Statements of older gateways, which do not store the time of a renaming."""


def test_renaming_by_an_older_gateway_restarts_the_age(
    store: Store, url: str, clock: FakeClock
) -> None:
    later, later_user = create_tenant(store, "later")
    clock.now += 1
    first, first_user = create_tenant(store, "first")
    rename(store, first, first_user)
    database = Database(url)
    with database.write_transaction() as connection:
        for statement in OLDER_RENAMES:
            connection.execute(sa.text(statement), {"project": later.id, "user": later_user.id})
    database.close()
    fresh = open_store(url, clock=clock)
    renamed = {later.id, later_user.id, first.id, first_user.id}
    assert set(fresh.load_snapshot().renamed_at) == renamed
    assert find_claimed_projects(fresh) == {first.id}
    fresh.close()


OLDER_ACCOUNTS = (
    "INSERT INTO organisations (id, name, created_at) VALUES ('org_a', 'a', 1), ('org_b', 'b', 1)",
    """INSERT INTO projects (id, organisation, name, tier, weight, share_cache, when_unsure, networks, created_at)
    VALUES ('proj_a', 'org_a', 'web', 'free', 1, false, 'open', '[]', 5),
    ('proj_b', 'org_b', 'web', 'free', 1, false, 'open', '[]', 1)""",
    f"""INSERT INTO users (id, organisation, email, role, project, created_at)
    VALUES ('user_a', 'org_a', '{EMAIL}', 'caller', 'proj_a', 5),
    ('user_b', 'org_b', '{EMAIL}', 'caller', 'proj_b', 1)""",  # noqa: S608 - constants
)
OLDER_ENTRY = """
    INSERT INTO audit (entry, at, actor, action, subject, details, hash) VALUES
    (:at, :at, 'me', :action, :subject, :details, :hash)
"""


@pytest.mark.parametrize(
    ("changes", "renamed_at", "project"),
    [
        ([], {}, "proj_b"),
        (
            [
                ("project", "proj_b", '{"name":["x","y"],"tier":["free","standard"]}'),
                ("project", "proj_b", '{"name":["y","web"]}'),
                ("project", "proj_b", r'{"flags":[[],["\"name\":["]]}'),
                ("user", "user_b", f'{{"email":["x@x.test","{EMAIL}"],"role":["admin","caller"]}}'),
                ("user", "user_b", '{"scope":["gateway","organisation"]}'),
            ],
            {"proj_b": 11.0, "user_b": 13.0},
            "proj_a",
        ),
    ],
)
def test_migration_takes_times_of_renamings_from_the_audit_log(
    empty_url: str,
    changes: list[tuple[str, str, str]],
    renamed_at: dict[str, float],
    project: str,
) -> None:
    database = Database(empty_url)
    with database.write_transaction() as connection:
        migrate_to_revision(connection, "0006")
        for statement in OLDER_ACCOUNTS:
            connection.execute(sa.text(statement))
        for at, (kind, subject, details) in enumerate(changes, 10):
            entry = {"at": at, "subject": subject, "details": details, "hash": b""}
            connection.execute(sa.text(OLDER_ENTRY), entry | {"action": f"{kind}.change"})
    database.close()
    store = open_store(empty_url)
    store.migrate()
    assert store.load_snapshot().renamed_at == renamed_at
    assert find_claimed_projects(store) == {project}
    store.close()
