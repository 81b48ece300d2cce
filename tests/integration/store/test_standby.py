"""A PostgreSQL that lets nobody write, a standby or for a while: it is asked, and what it refuses is told."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psycopg
import pytest
from tests.support.services import PostgresServer, running_standby
from tests.support.usage_rows import usage_row

from argosy.store import Store, StoreError, open_existing_store, open_store


def test_a_name_that_moves_from_a_standby_to_the_primary_is_followed(
    postgres: PostgresServer,
) -> None:
    with postgres.database() as url, running_standby(postgres) as standby:
        primary = open_store(url)
        primary.migrate()
        primary.close()
        name = Path(url.partition("@/")[2].partition("?")[0])
        place = standby.folder / "place"
        place.symlink_to(standby.folder)
        store = open_store(f"postgresql://postgres@/{name}?host={place}")
        until_copied(store)
        for _ in range(2):
            with pytest.raises(StoreError, match="a standby, give the address of the primary"):
                store.accounts.create_organisation("acme", actor="test")
        place.unlink()
        place.symlink_to(postgres.folder)
        assert store.accounts.create_organisation("acme", actor="test").name == "acme"
        store.close()


def until_copied(store: Store) -> None:
    """Wait until the standby has the tables."""
    while True:
        with contextlib.suppress(StoreError):
            store.load_snapshot()
            return


def test_who_only_looks_may_ask_a_standby(postgres: PostgresServer, tmp_path: Path) -> None:
    with postgres.database() as url:
        primary = open_store(url)
        primary.migrate()
        primary.ledger.add_records([usage_row("1")])
        with running_standby(postgres) as standby:
            store = open_existing_store(standby.url(url.partition("@/")[2].partition("?")[0]))
            store.migrate()
            assert store.ledger.report() == primary.ledger.report()
            backup = open_store(f"sqlite:///{tmp_path}/backup.db")
            backup.migrate()
            store.copy_to(backup)
            assert backup.ledger.report() == primary.ledger.report()
            backup.close()
            store.close()
        primary.close()


@pytest.mark.parametrize("kind", ["postgresql"])
def test_who_is_not_to_write_for_a_while_does_not(
    store: Store, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Some make a database read-only before its disk is full, for all that do not insist."""
    polite = open_store(f"{url}&options=-c%20default_transaction_read_only%3Don")
    assert polite.load_snapshot().version == 1
    for _ in range(2):
        with pytest.raises(StoreError, match="check default_transaction_read_only"):
            polite.accounts.create_organisation("acme", actor="test")
        with pytest.raises(StoreError, match="check default_transaction_read_only"):
            polite.ledger.add_records([usage_row(str(number)) for number in range(50)])
        assert polite.ledger.report()[0].requests == 0
    polite.close()
    assert store.accounts.list_organisations() == []
    assert not caplog.messages  # each try would say so, for hours


@pytest.mark.parametrize("kind", ["postgresql"])
def test_who_has_too_little_time_is_told(store: Store, url: str) -> None:
    hurried = open_store(f"{url}&options=-c%20statement_timeout%3D100")
    with psycopg.connect(url) as locking:
        locking.execute("LOCK TABLE usage IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(StoreError, match="Raise the statement_timeout"):
            hurried.ledger.report()
    assert hurried.ledger.report() == store.ledger.report()
    hurried.close()
