"""A store copied into another: as a backup, and from one kind of database to the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy import Connection, Engine, event
from tests.integration.store.conftest import Clock
from tests.support.usage_rows import usage_row

from argosy.store import (
    AccountSnapshot,
    ConflictError,
    Price,
    ReportGroup,
    Store,
    StoreError,
    open_store,
    store_copy,
)

ME = "test"


@pytest.fixture(params=["sqlite", "postgresql"])
def other_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables, of one kind or the other."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/other.db"
    return str(request.getfixturevalue("postgres_url"))


def test_a_copy_keeps_everything_and_goes_on(store: Store, clock: Clock, other_url: str) -> None:
    organisation = store.accounts.create_organisation("acme", actor=ME)
    project = store.accounts.create_project(organisation.id, "web", actor=ME)
    user = store.accounts.create_user(organisation.id, "ann@example.com", actor=ME)
    key, _ = store.accounts.create_key(
        project.id, "k", user=user.id, models=["m"], networks=["10.0.0.0/8"], actor=ME
    )
    rotated, _ = store.accounts.rotate_key(key.id, 60.0, actor=ME)
    store.accounts.change_project(project.id, name="shop", actor=ME)
    store.limits_and_prices.set_limit("key", rotated.id, "tokens", 2**62, window="minute", actor=ME)
    price = Price(model="m", tier=None, input=3, cached_input=1, output=9, since=7.5)
    store.limits_and_prices.set_price(price, actor=ME)
    rows = [usage_row(f"r{number}", asked="next", route="canary") for number in range(2500)]
    long_ago = usage_row("old", asked="next", ended_at=rows[0].ended_at - 3 * 86_400)
    store.ledger.add_records([*rows, long_ago])
    assert store.ledger.roll_up(rows[0].ended_at - 2 * 86_400) == 1
    other = open_store(other_url, clock=clock)
    other.migrate()
    assert store.copy_to(other) > len(rows)
    assert other.is_current(store.load_snapshot())
    assert accounts(other) == accounts(store)
    assert other.load_snapshot().renamed_at == {project.id: clock.now}
    groups: tuple[ReportGroup, ...] = ("key", "day", "model", "asked", "route", "replica")
    assert other.ledger.report(groups) == store.ledger.report(groups)
    assert other.ledger.report()[0].requests == len(rows) + 1
    other.ledger.add_records(rows)
    assert other.ledger.report()[0].requests == len(rows) + 1
    before = other.audit_log.verify()
    assert before == store.audit_log.verify()
    assert before.broken is None
    other.accounts.revoke_key(rotated.id, actor=ME)
    assert other.audit_log.verify().entries == before.entries + 1
    other.close()


def test_what_keeps_something_is_not_written_over(store: Store, tmp_path: Path) -> None:
    store.accounts.create_organisation("acme", actor=ME)
    other = open_store(f"sqlite:///{tmp_path}/other.db")
    other.migrate()
    other.accounts.create_organisation("theirs", actor=ME)
    before, ours = accounts(other), accounts(store)
    with pytest.raises(ConflictError, match="is not empty"):
        store.copy_to(other)
    with pytest.raises(ConflictError, match="is not empty"):
        store.copy_to(store)
    assert accounts(other) == before
    assert accounts(store) == ours
    other.close()


@pytest.mark.parametrize("kind", ["postgresql"])
def test_the_database_that_went_away_is_named(
    store: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_copy, "COPY_BATCH_ROWS", 10)
    store.ledger.add_records([usage_row(f"r{number}") for number in range(500)])
    other = open_store(f"sqlite:///{tmp_path}/other.db")
    other.migrate()

    def cut(_: Connection, __: Any, statement: str, *___: object) -> None:  # noqa: ANN401 - a cursor
        if statement.startswith("INSERT INTO usage"):
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )

    event.listen(Engine, "before_cursor_execute", cut)
    try:
        with pytest.raises(StoreError, match=r"postgresql://.* cannot be used"):
            store.copy_to(other)
    finally:
        event.remove(Engine, "before_cursor_execute", cut)
    assert other.ledger.report()[0].requests == 0
    assert store.copy_to(other) > 500
    other.close()


def accounts(store: Store) -> AccountSnapshot:
    """Whenever they are read."""
    return msgspec.structs.replace(store.load_snapshot(), read_at=0.0)
