"""Since when projects have had their names and users their emails, by which tokens find them, on both databases."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from tests.integration.store.conftest import START, Clock
from tests.integration.store.test_database import upgrade

from argosy.gateway.auth.credential_index import CredentialIndex
from argosy.gateway.auth.token_verifier import TokenClaims
from argosy.store import Project, Store, User, open_store
from argosy.store.database import Database

ME = "test"
EMAIL = "ann@x.test"


def make(store: Store, name: str) -> tuple[Project, User]:
    """An organisation's project and user, whose names nobody else has."""
    home = store.accounts.create_organisation(name, actor=ME)
    project = store.accounts.create_project(home.id, f"of {name}", actor=ME)
    user = store.accounts.create_user(home.id, f"{name}@x.test", project=project.id, actor=ME)
    return project, user


def rename(store: Store, project: Project, user: User) -> None:
    """To what a token says."""
    store.accounts.change_project(project.id, name="web", actor=ME)
    store.accounts.change_user(user.id, email=EMAIL.upper(), actor=ME)


def found(store: Store) -> set[str]:
    """Projects of tokens that say the name, and the email."""
    book = CredentialIndex(store.load_snapshot())
    said = {"project": "web", "email": ""}, {"project": "", "email": EMAIL}
    claims = (
        TokenClaims(subject="s", organisation="", role="user", expires_at=0, **one) for one in said
    )
    return {book.find_by_claims(one).principal.project for one in claims}


def test_nobodys_tokens_are_taken_by_renaming_what_is_older(store: Store, clock: Clock) -> None:
    theirs, other = make(store, "theirs")
    clock.now += 1
    ours, ann = make(store, "ours")
    rename(store, ours, ann)
    assert found(store) == {ours.id}
    clock.now += 1
    rename(store, theirs, other)
    assert found(store) == {ours.id}
    clock.now += 1
    store.accounts.archive_organisation(ours.organisation, actor=ME)
    assert found(store) == {theirs.id}


def test_only_another_name_is_a_new_one(store: Store, clock: Clock) -> None:
    project, user = make(store, "ours")
    rename(store, project, user)
    named = store.load_snapshot().renamed_at
    assert named == {project.id: START, user.id: START}
    clock.now += 1
    rename(store, project, user)
    store.accounts.change_project(project.id, name="web", tier="free", actor=ME)
    store.accounts.change_user(user.id, email=EMAIL, role="viewer", actor=ME)
    store.accounts.disable_user(user.id, actor=ME)
    assert store.load_snapshot().renamed_at == named


OLDER_NAMES = (
    "UPDATE projects SET name='web' WHERE id=:project",
    f"UPDATE users SET email='{EMAIL}' WHERE id=:user",  # noqa: S608 - ours
)
"""How a gateway renames that knows nothing of this."""


def test_what_an_older_gateway_renames_comes_last_too(store: Store, url: str, clock: Clock) -> None:
    theirs, other = make(store, "theirs")
    clock.now += 1
    ours, ann = make(store, "ours")
    rename(store, ours, ann)
    database = Database(url)
    with database.write_transaction() as connection:
        for statement in OLDER_NAMES:
            connection.execute(sa.text(statement), {"project": theirs.id, "user": other.id})
    database.close()
    fresh = open_store(url, clock=clock)
    assert set(fresh.load_snapshot().renamed_at) == {theirs.id, other.id, ours.id, ann.id}
    assert found(fresh) == {ours.id}
    fresh.close()


OLDER_ACCOUNTS = (
    "INSERT INTO organisations (id, name, created_at) VALUES ('org_a', 'a', 1), ('org_b', 'b', 1)",
    """INSERT INTO projects (id, organisation, name, tier, weight, share_cache, when_unsure, networks, created_at)
    VALUES ('proj_a', 'org_a', 'web', 'free', 1, false, 'open', '[]', 5),
    ('proj_b', 'org_b', 'web', 'free', 1, false, 'open', '[]', 1)""",
    f"""INSERT INTO users (id, organisation, email, role, project, created_at)
    VALUES ('user_a', 'org_a', '{EMAIL}', 'caller', 'proj_a', 5),
    ('user_b', 'org_b', '{EMAIL}', 'caller', 'proj_b', 1)""",  # noqa: S608 - ours
)
OLDER_ENTRY = """
    INSERT INTO audit (entry, at, actor, action, subject, details, hash) VALUES
    (:at, :at, 'me', :action, :subject, :details, :hash)
"""


@pytest.mark.parametrize(
    ("changes", "named", "project"),
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
def test_what_was_renamed_before_this_was_kept_is_known_from_the_log(
    empty_url: str, changes: list[tuple[str, str, str]], named: dict[str, float], project: str
) -> None:
    database = Database(empty_url)
    with database.write_transaction() as connection:
        upgrade(connection, "0006")
        for statement in OLDER_ACCOUNTS:
            connection.execute(sa.text(statement))
        for at, (kind, subject, details) in enumerate(changes, 10):
            entry = {"at": at, "subject": subject, "details": details, "hash": b""}
            connection.execute(sa.text(OLDER_ENTRY), entry | {"action": f"{kind}.change"})
    database.close()
    store = open_store(empty_url)
    store.migrate()
    assert store.load_snapshot().renamed_at == named
    assert found(store) == {project}
    store.close()
