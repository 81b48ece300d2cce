"""Account snapshots on both databases: read incrementally as from scratch, with the ages of names that tokens claim."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
import sqlalchemy as sa
from tests.integration.store.conftest import ACTOR, RULES, START
from tests.support.database_work import count_rows_read, fill
from tests.support.fake_clock import FakeClock

from argosy.gateway.auth import TokenClaims
from argosy.gateway.auth.credential_index import CredentialIndex
from argosy.store import (
    AccountSnapshot,
    ConflictError,
    Price,
    Project,
    Store,
    User,
    open_store,
    snapshot_reader,
)
from argosy.store.database import Database
from argosy.store.snapshot_reader import read_snapshot

DAY = 86_400.0
PROJECT_NAME = "web"
EMAIL = "ann@x.test"


def without_read_time(snapshot: AccountSnapshot) -> AccountSnapshot:
    return msgspec.structs.replace(snapshot, read_at=0.0)


def load_from_scratch(url: str, clock: FakeClock) -> AccountSnapshot:
    fresh = open_store(url, clock=clock)
    try:
        return without_read_time(fresh.load_snapshot())
    finally:
        fresh.close()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))]
)
def test_incremental_snapshot_equals_a_full_one(
    store: Store, url: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """More changes than the maximum are read in full."""
    monkeypatch.setattr(snapshot_reader, "MAX_INCREMENTAL_CHANGES", 4)
    draw = random.Random(seed)
    other = open_store(url, clock=clock)
    for _ in range(12):
        for _ in range(draw.randrange(6)):
            make_random_change(other, draw, clock.now)
            clock.now += draw.choice((0.0, 1.0, 20 * DAY))
        assert without_read_time(store.load_snapshot()) == load_from_scratch(url, clock)
    other.close()


def make_random_change(store: Store, draw: random.Random, now: float) -> None:
    accounts, terms, name = store.accounts, store.limits_and_prices, f"n{draw.random()}"
    organisations = [organisation.id for organisation in accounts.list_organisations()]
    projects = [project.id for project in accounts.list_projects()]
    users = [user.id for user in accounts.list_users()]
    keys = [key.id for key in accounts.list_keys()]
    limits = [limit.id for limit in terms.list_limits()]
    price = Price(model=name, input=1, cached_input=1, output=1, since=draw.random())
    if not projects:
        accounts.bootstrap(actor=ACTOR)
        return
    changes: list[Callable[[], object]] = [
        lambda: accounts.create_organisation(name, actor=ACTOR),
        lambda: accounts.create_project(draw.choice(organisations), name, actor=ACTOR),
        lambda: accounts.create_user(draw.choice(organisations), name, actor=ACTOR),
        lambda: accounts.create_key(draw.choice(projects), name, expires_at=now + DAY, actor=ACTOR),
        lambda: accounts.create_key(draw.choice(projects), name, actor=ACTOR),
        lambda: accounts.rotate_key(draw.choice(keys), 60, actor=ACTOR),
        lambda: accounts.rotate_key(draw.choice(keys), 0, actor=ACTOR),
        lambda: accounts.revoke_key(draw.choice(keys), actor=ACTOR),
        lambda: terms.set_limit("key", draw.choice(keys), "concurrency", 1, actor=ACTOR),
        lambda: terms.set_limit("project", draw.choice(projects), "concurrency", 1, actor=ACTOR),
        lambda: terms.set_price(price, actor=ACTOR),
        lambda: accounts.change_project(draw.choice(projects), name=name, actor=ACTOR),
        lambda: store.prompts.add_version("p", "{}", labels=("new",), actor=ACTOR),
        lambda: store.adapters.add_version(name, "m", f"sha256:{'0' * 64}", actor=ACTOR),
    ]
    old_prompts = [each.id for each in store.prompts.list_prompts() if not each.labels]
    if old_prompts:
        changes.append(lambda: store.prompts.delete(draw.choice(old_prompts), actor=ACTOR))
    if limits:
        changes.append(lambda: terms.delete_limit(draw.choice(limits), actor=ACTOR))
    if users:
        changes.append(lambda: accounts.disable_user(draw.choice(users), actor=ACTOR))
        changes.append(lambda: accounts.change_user(draw.choice(users), email=name, actor=ACTOR))
    if draw.random() < 0.03:
        changes = [lambda: accounts.archive_organisation(draw.choice(organisations), actor=ACTOR)]
    try:
        draw.choice(changes)()
    except ConflictError:
        return  # the record has ended


def test_single_change_among_thousands_is_read_alone(store: Store, url: str) -> None:
    fill(url, 3000)
    store.accounts.revoke_key("key_000001", actor=ACTOR)
    before = store.load_snapshot()
    store.accounts.revoke_key("key_000002", actor=ACTOR)
    with count_rows_read() as rows_read:
        after = store.load_snapshot()
    # PostgreSQL also reads its list of indexes, whose size does not depend on the accounts.
    assert sum(rows_read) < 500
    assert {key.id for key in before.keys} - {key.id for key in after.keys} == {"key_000002"}
    assert after.limits is before.limits


@RULES
def test_first_key_revoked_before_it_is_read_still_requires_keys(
    store: Store, project: Project
) -> None:
    assert not store.load_snapshot().requires_keys
    key, _ = store.accounts.create_key(project.id, "k", actor=ACTOR)
    store.accounts.revoke_key(key.id, actor=ACTOR)
    assert store.load_snapshot().requires_keys


@RULES
def test_snapshot_of_another_history_is_not_a_base(
    store: Store, url: str, clock: FakeClock, empty_url: str
) -> None:
    """A restored backup has the same version number and other changes."""
    other = open_store(empty_url, clock=clock)
    other.migrate()
    for name in ("a", "b"):
        other.accounts.create_organisation(name, actor=ACTOR)
    base = other.load_snapshot()
    other.close()
    database = Database(url)
    for name in ("c", "d", "e"):
        store.accounts.create_organisation(name, actor=ACTOR)
        with database.read_transaction() as connection:
            found = read_snapshot(connection, base, read_at=0.0, expired_before=0.0)
        assert found == load_from_scratch(url, clock)
    database.close()


def test_missing_audit_entry_hides_no_change(
    store: Store, url: str, clock: FakeClock, database_kind: str
) -> None:
    store.accounts.create_organisation("a", actor=ACTOR)
    store.load_snapshot()
    for name in ("b", "c", "d"):
        store.accounts.create_organisation(name, actor=ACTOR)
    is_sqlite = database_kind == "sqlite"
    trigger = "audit_no_delete" if is_sqlite else "audit_append_only ON audit"
    database = Database(url)
    with database.write_transaction() as connection:
        connection.execute(sa.text(f"DROP TRIGGER {trigger}"))
        connection.execute(sa.text("DELETE FROM audit WHERE entry = 3"))
    database.close()
    assert without_read_time(store.load_snapshot()) == load_from_scratch(url, clock)


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


@RULES
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


@RULES
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
