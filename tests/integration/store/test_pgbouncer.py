"""PostgreSQL behind PgBouncer, which assigns connections per transaction."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from tests.support.services import PostgresServer, running_pgbouncer
from tests.support.usage_rows import usage_row

from argosy.store import StoreError, StoreUnavailableError, open_store

REPETITIONS = 8
"""Number of executions after which a driver may prepare a statement."""


@pytest.fixture(scope="module")
def pgbouncer(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """PgBouncer whose transactions share one connection."""
    settings = {"pool_mode": "transaction", "default_pool_size": 1, "query_wait_timeout": 1}
    with running_pgbouncer(postgres, **settings) as server:
        yield server


def pooled_url(pgbouncer: PostgresServer, url: str) -> str:
    """Return the URL of the same database behind PgBouncer."""
    return pgbouncer.url(url.partition("@/")[2].partition("?")[0])


def test_stores_share_one_connection(postgres: PostgresServer, pgbouncer: PostgresServer) -> None:
    with postgres.database() as url:
        stores = [open_store(pooled_url(pgbouncer, url)) for _ in range(2)]
        for store in stores:
            store.migrate()
        for turn in range(REPETITIONS):
            for index, store in enumerate(stores):
                store.accounts.create_organisation(f"org-{turn}-{index}", actor="test")
                rows = [usage_row(f"{turn}-{index}-{number}") for number in range(5)]
                assert store.ledger.add_records(rows) == 5
        for store in stores:
            assert len(store.load_snapshot().organisations) == 2 * REPETITIONS
            (row,) = store.ledger.report()
            assert row.requests == 2 * REPETITIONS * 5
            store.close()


def test_statement_pooling_is_rejected(postgres: PostgresServer) -> None:
    with running_pgbouncer(postgres, pool_mode="statement") as server:
        assert_rejected(server.url("postgres"), "pool_mode = transaction")


def test_rejected_url_parameter_is_reported_with_a_remedy(pgbouncer: PostgresServer) -> None:
    url = f"{pgbouncer.url('postgres')}&options=-cwork_mem%3D8MB"
    assert_rejected(url, "Remove the parameter from the URL")


def assert_rejected(url: str, remedy: str) -> None:
    """Check that a migration fails permanently. A starting gateway would wait for an unavailable store."""
    store = open_store(url)
    with pytest.raises(StoreError, match=remedy) as rejected:
        store.migrate()
    assert not isinstance(rejected.value, StoreUnavailableError)
    store.close()


def test_exhausted_pool_is_temporary(postgres: PostgresServer, pgbouncer: PostgresServer) -> None:
    with postgres.database() as url:
        store = open_store(pooled_url(pgbouncer, url))
        with psycopg.connect(pooled_url(pgbouncer, url)) as busy:
            busy.execute("SELECT 1")
            with pytest.raises(StoreUnavailableError, match="default_pool_size"):
                store.migrate()
        store.migrate()
        store.close()
