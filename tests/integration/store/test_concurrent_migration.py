"""Tables are brought up to date beside those that use them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
import sqlalchemy as sa
from tests.integration.store.test_database import OLDER_ROW, upgrade

from argosy.store import migrations, open_store
from argosy.store.database import Database


@pytest.mark.parametrize("kind", ["postgresql"])
def test_who_uses_a_table_for_long_keeps_a_migration_waiting_and_nobody_else(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup that takes an hour is no hour without older gateways' usage."""
    monkeypatch.setattr(migrations, "LOCK_TIMEOUT_S", 1)
    monkeypatch.setattr(migrations, "RETRY_INTERVAL_S", 0.1)
    older = Database(f"{empty_url}&options=-c%20lock_timeout%3D20s")
    with older.write_transaction() as connection:
        upgrade(connection, "0003")
    store = open_store(empty_url)
    waits = "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND NOT granted"
    with ThreadPoolExecutor() as threads, psycopg.connect(empty_url) as backup:
        backup.execute("SELECT count(*) FROM usage")
        migrating = threads.submit(store.migrate)
        while backup.execute(waits).fetchone() == (0,):
            time.sleep(0.01)
        with older.write_transaction() as connection:
            connection.execute(sa.text(OLDER_ROW), {"request": "meanwhile"})
        assert not migrating.done()
        backup.rollback()
        migrating.result()
    assert store.ledger.report()[0].requests == 1
    older.close()
    store.close()
