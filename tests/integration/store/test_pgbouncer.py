"""A PostgreSQL behind PgBouncer, which gives each transaction whatever connection is free."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from tests.support.services import PostgresServer, running_pgbouncer
from tests.support.usage_rows import usage_row

from argosy.store import StoreError, StoreUnavailableError, open_store

OFTEN = 8
"""As often as a driver might take for a reason to prepare what it is asked."""


@pytest.fixture(scope="module")
def pooled(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """One connection, shared by transactions."""
    settings = {"pool_mode": "transaction", "default_pool_size": 1, "query_wait_timeout": 1}
    with running_pgbouncer(postgres, **settings) as bouncer:
        yield bouncer


def through(bouncer: PostgresServer, url: str) -> str:
    """The same database there."""
    return bouncer.url(url.partition("@/")[2].partition("?")[0])


def test_many_share_a_connection_and_each_gets_what_it_asked_for(
    postgres: PostgresServer, pooled: PostgresServer
) -> None:
    with postgres.database() as url:
        stores = [open_store(through(pooled, url)) for _ in range(2)]
        for store in stores:
            store.migrate()
        for turn in range(OFTEN):
            for place, store in enumerate(stores):
                store.accounts.create_organisation(f"org-{turn}-{place}", actor="test")
                assert (
                    store.ledger.add_records([usage_row(f"{turn}-{place}-{n}") for n in range(5)])
                    == 5
                )
        for store in stores:
            assert len(store.load_snapshot().organisations) == 2 * OFTEN
            (row,) = store.ledger.report()
            assert row.requests == 2 * OFTEN * 5
            store.close()


def test_one_that_pools_statements_is_refused(postgres: PostgresServer) -> None:
    with running_pgbouncer(postgres, pool_mode="statement") as bouncer:
        store = open_store(bouncer.url("postgres"))
        with pytest.raises(StoreError, match="pool_mode = transaction") as refused:
            store.migrate()
        assert not isinstance(
            refused.value, StoreUnavailableError
        )  # who starts would wait for that
        store.close()


def test_one_that_does_not_take_what_the_url_says_is_refused(pooled: PostgresServer) -> None:
    store = open_store(f"{pooled.url('postgres')}&options=-cwork_mem%3D8MB")
    with pytest.raises(StoreError, match="Remove the parameter from the URL") as refused:
        store.migrate()
    assert not isinstance(refused.value, StoreUnavailableError)
    store.close()


def test_one_without_a_free_connection_may_have_one_later(
    postgres: PostgresServer, pooled: PostgresServer
) -> None:
    with postgres.database() as url:
        store = open_store(through(pooled, url))
        with psycopg.connect(through(pooled, url)) as busy:
            busy.execute("SELECT 1")
            with pytest.raises(StoreUnavailableError, match="default_pool_size"):
                store.migrate()
        store.migrate()
        store.close()
