"""What a gateway is told of accounts, read as a whole once and then as they change, is all there is: on both."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
import sqlalchemy as sa
from tests.integration.store.conftest import Clock
from tests.support.database_work import fill, reading

from argosy.store import AccountSnapshot, Price, Store, open_store
from argosy.store import snapshot_reader as reading_module
from argosy.store.database import Database
from argosy.store.errors import ConflictError
from argosy.store.snapshot_reader import read_snapshot

ME = "test"
DAY = 86_400.0


def told(directory: AccountSnapshot) -> AccountSnapshot:
    """All of it but when it was read."""
    return msgspec.structs.replace(directory, read_at=0.0)


def anew(url: str, clock: Clock) -> AccountSnapshot:
    """What somebody reads who has read nothing before."""
    fresh = open_store(url, clock=clock)
    try:
        return told(fresh.load_snapshot())
    finally:
        fresh.close()


@pytest.mark.parametrize("seed", range(3))
def test_what_has_changed_since_is_all_that_is_missing(
    store: Store, url: str, clock: Clock, seed: int
) -> None:
    """Whoever changed it, whatever that was, and however much at a time."""
    draw = random.Random(seed)
    other = open_store(url, clock=clock)
    for _ in range(12):
        for _ in range(draw.randrange(6)):
            change(other, draw, clock.now)
            clock.now += draw.choice((0.0, 1.0, 20 * DAY))
        assert told(store.load_snapshot()) == anew(url, clock)
    other.close()


def change(store: Store, draw: random.Random, now: float) -> None:
    """Any one."""
    accounts, terms, name = store.accounts, store.limits_and_prices, f"n{draw.random()}"
    organisations = [one.id for one in accounts.list_organisations()]
    projects = [one.id for one in accounts.list_projects()]
    users = [one.id for one in accounts.list_users()]
    keys = [one.id for one in accounts.list_keys()]
    limits = [one.id for one in terms.list_limits()]
    price = Price(model=name, input=1, cached_input=1, output=1, since=draw.random())
    if not projects:
        accounts.bootstrap(actor=ME)
        return
    able: list[Callable[[], object]] = [
        lambda: accounts.create_organisation(name, actor=ME),
        lambda: accounts.create_project(draw.choice(organisations), name, actor=ME),
        lambda: accounts.create_user(draw.choice(organisations), name, actor=ME),
        lambda: accounts.create_key(draw.choice(projects), name, expires_at=now + DAY, actor=ME),
        lambda: accounts.create_key(draw.choice(projects), name, actor=ME),
        lambda: accounts.rotate_key(draw.choice(keys), 60, actor=ME),
        lambda: accounts.rotate_key(draw.choice(keys), 0, actor=ME),
        lambda: accounts.revoke_key(draw.choice(keys), actor=ME),
        lambda: terms.set_limit("key", draw.choice(keys), "concurrency", 1, actor=ME),
        lambda: terms.set_limit("project", draw.choice(projects), "concurrency", 1, actor=ME),
        lambda: terms.set_price(price, actor=ME),
        lambda: accounts.change_project(draw.choice(projects), name=name, actor=ME),
    ]
    able += [lambda: terms.delete_limit(draw.choice(limits), actor=ME)] * bool(limits)
    able += [lambda: accounts.disable_user(draw.choice(users), actor=ME)] * bool(users)
    able += [lambda: accounts.change_user(draw.choice(users), email=name, actor=ME)] * bool(users)
    if draw.random() < 0.03:
        able = [lambda: accounts.archive_organisation(draw.choice(organisations), actor=ME)]
    try:
        draw.choice(able)()
    except ConflictError:
        return  # of what has ended


def test_one_change_among_thousands_is_all_that_is_read(store: Store, url: str) -> None:
    fill(url, 3000)
    store.accounts.revoke_key("key_000001", actor=ME)
    before = store.load_snapshot()
    store.accounts.revoke_key("key_000002", actor=ME)
    with reading() as read:
        after = store.load_snapshot()
    assert sum(read) < 500  # with PostgreSQL's list of its indexes, whatever the accounts
    assert {key.id for key in before.keys} - {key.id for key in after.keys} == {"key_000002"}
    assert after.limits is before.limits


def test_a_first_key_that_is_revoked_before_it_was_heard_of_opens_nothing(store: Store) -> None:
    home = store.accounts.create_organisation("acme", actor=ME)
    project = store.accounts.create_project(home.id, "web", actor=ME)
    assert not store.load_snapshot().requires_keys
    made, _ = store.accounts.create_key(project.id, "k", actor=ME)
    store.accounts.revoke_key(made.id, actor=ME)
    assert store.load_snapshot().requires_keys


def test_too_many_changes_are_read_as_a_whole(
    store: Store, url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "MAX_INCREMENTAL_CHANGES", 2)
    for count in (1, 2, 3, 7):
        for number in range(count):
            store.accounts.create_organisation(f"{count}-{number}", actor=ME)
        assert told(store.load_snapshot()) == anew(url, clock)


def test_what_is_known_of_another_history_is_not_built_on(
    store: Store, url: str, clock: Clock, empty_url: str
) -> None:
    """A backup was put back, and went on another way."""
    other = open_store(empty_url, clock=clock)
    other.migrate()
    for name in ("a", "b"):
        other.accounts.create_organisation(name, actor=ME)
    known = other.load_snapshot()
    other.close()
    database = Database(url)
    for name in ("c", "d", "e"):
        store.accounts.create_organisation(name, actor=ME)
        with database.read_transaction() as connection:
            found = read_snapshot(connection, known, read_at=0.0, expired_before=0.0)
        assert found == anew(url, clock)
    database.close()


def test_an_entry_of_the_log_that_is_missing_hides_no_change(
    store: Store, url: str, clock: Clock
) -> None:
    store.accounts.create_organisation("a", actor=ME)
    store.load_snapshot()
    for name in ("b", "c", "d"):
        store.accounts.create_organisation(name, actor=ME)
    database = Database(url)
    with database.write_transaction() as connection:
        trigger, on = (
            ("audit_no_delete", "")
            if url.startswith("sqlite")
            else ("audit_append_only", " ON audit")
        )
        connection.execute(sa.text(f"DROP TRIGGER {trigger}{on}"))
        connection.execute(sa.text("DELETE FROM audit WHERE entry = 3"))
    database.close()
    assert told(store.load_snapshot()) == anew(url, clock)
