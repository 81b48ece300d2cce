"""PostgreSQL servers that reject writes, as standbys and read-only databases do, or that end slow statements."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.support.services import PostgresServer, running_standby
from tests.support.usage_rows import usage_row

from argosy.store import Store, StoreError, open_existing_store, open_store


@pytest.fixture(scope="module")
def standby(postgres: PostgresServer) -> Iterator[PostgresServer]:
    with running_standby(postgres) as server:
        yield server


def wait_until_replicated(primary: PostgresServer, standby: PostgresServer) -> None:
    """Wait until the standby has replayed everything that the primary has committed."""
    replayed = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
    with (
        psycopg.connect(primary.url("postgres")) as source,
        psycopg.connect(standby.url("postgres"), autocommit=True) as target,
    ):
        position = source.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
        while target.execute(replayed, position).fetchone() != (True,):
            time.sleep(0.05)


def database_name(url: str) -> str:
    return url.partition("@/")[2].partition("?")[0]


def test_store_follows_an_address_from_the_standby_to_the_primary(
    postgres: PostgresServer, standby: PostgresServer
) -> None:
    with postgres.database() as url:
        primary = open_store(url)
        primary.migrate()
        primary.close()
        wait_until_replicated(postgres, standby)
        address = standby.folder / "address"
        address.symlink_to(standby.folder)
        store = open_store(f"postgresql://postgres@/{database_name(url)}?host={address}")
        assert store.load_snapshot().version == 1
        for _ in range(2):
            with pytest.raises(StoreError, match="a standby, give the address of the primary"):
                store.accounts.create_organisation("acme", actor="test")
        address.unlink()
        address.symlink_to(postgres.folder)
        assert store.accounts.create_organisation("acme", actor="test").name == "acme"
        store.close()


def test_standby_serves_reads_and_copies(
    postgres: PostgresServer, standby: PostgresServer, tmp_path: Path
) -> None:
    with postgres.database() as url:
        primary = open_store(url)
        primary.migrate()
        primary.ledger.add_records([usage_row("1")])
        wait_until_replicated(postgres, standby)
        store = open_existing_store(standby.url(database_name(url)))
        store.migrate()
        assert store.ledger.report() == primary.ledger.report()
        backup = open_store(f"sqlite:///{tmp_path}/backup.db")
        backup.migrate()
        store.copy_to(backup)
        assert backup.ledger.report() == primary.ledger.report()
        for opened in (backup, store, primary):
            opened.close()


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_read_only_default_is_respected_and_reported(
    store: Store, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Some providers make a database read-only by default before its disk is full."""
    read_only = open_store(f"{url}&options=-c%20default_transaction_read_only%3Don")
    assert read_only.load_snapshot().version == 1
    for _ in range(2):
        with pytest.raises(StoreError, match="check default_transaction_read_only"):
            read_only.accounts.create_organisation("acme", actor="test")
        with pytest.raises(StoreError, match="check default_transaction_read_only"):
            read_only.ledger.add_records([usage_row(str(number)) for number in range(50)])
        assert read_only.ledger.report()[0].requests == 0
    read_only.close()
    assert store.accounts.list_organisations() == []
    assert not caplog.messages, "retries would repeat the message for hours"


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_statement_timeout_is_reported_with_a_remedy(store: Store, url: str) -> None:
    limited = open_store(f"{url}&options=-c%20statement_timeout%3D100")
    with psycopg.connect(url) as locking:
        locking.execute("LOCK TABLE usage IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(StoreError, match="Raise the statement_timeout"):
            limited.ledger.report()
    assert limited.ledger.report() == store.ledger.report()
    limited.close()
