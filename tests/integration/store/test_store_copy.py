"""Copies of a store into another one, as a backup or to change the kind of database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy import Connection, Engine, event
from tests.integration.store.conftest import ACTOR
from tests.support.fake_clock import FakeClock
from tests.support.usage_rows import usage_row

from argosy.store import (
    AccountSnapshot,
    ConflictError,
    Price,
    Project,
    ReportGroup,
    Store,
    StoreError,
    User,
    open_store,
)


@pytest.fixture
def other_url(database_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database of the other kind, without tables."""
    if database_kind == "postgresql":
        return f"sqlite:///{tmp_path}/target.db"
    return str(request.getfixturevalue("postgres_url"))


def load_accounts(store: Store) -> AccountSnapshot:
    """Return the account snapshot without its time."""
    return msgspec.structs.replace(store.load_snapshot(), read_at=0.0)


def test_copy_into_the_other_kind_holds_everything_and_accepts_changes(
    store: Store, clock: FakeClock, project: Project, user: User, other_url: str
) -> None:
    key, _ = store.accounts.create_key(
        project.id, "k", user=user.id, models=["m"], networks=["10.0.0.0/8"], actor=ACTOR
    )
    new, _ = store.accounts.rotate_key(key.id, 60.0, actor=ACTOR)
    store.accounts.change_project(project.id, name="shop", actor=ACTOR)
    store.limits_and_prices.set_limit("key", new.id, "tokens", 2**62, window="minute", actor=ACTOR)
    price = Price(model="m", tier=None, input=3, cached_input=1, output=9, since=7.5)
    store.limits_and_prices.set_price(price, actor=ACTOR)
    rows = [usage_row(f"r{number}", asked="next", route="canary") for number in range(2500)]
    old_row = usage_row("old", asked="next", ended_at=rows[0].ended_at - 3 * 86_400)
    store.ledger.add_records([*rows, old_row])
    assert store.ledger.roll_up(rows[0].ended_at - 2 * 86_400) == 1
    target = open_store(other_url, clock=clock)
    target.migrate()
    assert store.copy_to(target) > len(rows)
    assert target.is_current(store.load_snapshot())
    assert load_accounts(target) == load_accounts(store)
    assert target.load_snapshot().renamed_at == {project.id: clock.now}
    groups: tuple[ReportGroup, ...] = ("key", "day", "model", "asked", "route", "replica")
    assert target.ledger.report(groups) == store.ledger.report(groups)
    assert target.ledger.report()[0].requests == len(rows) + 1
    target.ledger.add_records(rows)
    assert target.ledger.report()[0].requests == len(rows) + 1
    before = target.audit_log.verify()
    assert before == store.audit_log.verify()
    assert before.broken is None
    target.accounts.revoke_key(new.id, actor=ACTOR)
    assert target.audit_log.verify().entries == before.entries + 1
    target.close()


def test_copy_into_a_store_with_accounts_is_rejected(store: Store, tmp_path: Path) -> None:
    store.accounts.create_organisation("acme", actor=ACTOR)
    target = open_store(f"sqlite:///{tmp_path}/target.db")
    target.migrate()
    target.accounts.create_organisation("zeta", actor=ACTOR)
    before = load_accounts(target), load_accounts(store)
    for nonempty in (target, store):
        with pytest.raises(ConflictError, match="is not empty"):
            store.copy_to(nonempty)
    assert (load_accounts(target), load_accounts(store)) == before
    target.close()


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_interrupted_copy_names_the_failed_database_and_can_be_repeated(
    store: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.store.store.COPY_BATCH_ROWS", 10)
    store.ledger.add_records([usage_row(f"r{number}") for number in range(500)])
    target = open_store(f"sqlite:///{tmp_path}/target.db")
    target.migrate()

    def cut_connections(_: Connection, __: Any, statement: str, *___: object) -> None:  # noqa: ANN401 - a cursor
        if statement.startswith("INSERT INTO usage"):
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )

    event.listen(Engine, "before_cursor_execute", cut_connections)
    try:
        with pytest.raises(StoreError, match=r"postgresql://.* cannot be used"):
            store.copy_to(target)
    finally:
        event.remove(Engine, "before_cursor_execute", cut_connections)
    assert target.ledger.report()[0].requests == 0
    assert store.copy_to(target) > 500
    target.close()
