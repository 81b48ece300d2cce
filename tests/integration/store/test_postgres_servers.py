"""PostgreSQL with other settings than the default ones, as a standby, behind PgBouncer, and during a restore."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from tests.integration.store.conftest import ACTOR, migrate
from tests.support.fake_clock import FakeClock
from tests.support.services import (
    PostgresServer,
    find_program,
    running_pgbouncer,
    running_standby,
)
from tests.support.usage_rows import usage_row

from argosy.store import (
    AccountSnapshot,
    Store,
    StoreError,
    StoreUnavailableError,
    open_existing_store,
    open_store,
)

NAME = "café 日本 \N{SAILBOAT}"
REPETITIONS = 8
"""Number of executions after which a driver may prepare a statement."""


@pytest.fixture
def administrator(postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres.url("postgres"), autocommit=True) as connection:
        yield connection


def database_name(url: str) -> str:
    return url.partition("@/")[2].partition("?")[0]


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_text_is_stored_as_it_is_or_rejected_with_a_remedy(
    postgres: PostgresServer, administrator: psycopg.Connection, encoding: str
) -> None:
    """`initdb` creates databases without an encoding (SQL_ASCII) under the C locale."""
    name = f"in_{encoding.lower()}"
    administrator.execute(
        sql.SQL("CREATE DATABASE {} ENCODING {} LOCALE 'C' TEMPLATE template0").format(
            sql.Identifier(name), encoding
        )
    )
    with closing(open_store(postgres.url(name))) as store:
        store.migrate()
        if encoding == "LATIN1":
            with pytest.raises(StoreError, match=r"no equivalent in encoding.* ENCODING 'UTF8'"):
                store.ledger.add_records([usage_row("r", model=NAME)])
        text = NAME if encoding == "SQL_ASCII" else "café"
        store.accounts.create_organisation(text, actor="test")
        assert store.ledger.add_records([usage_row("r", model=text)]) == 1
        assert [each.name for each in store.load_snapshot().organisations] == [text]
        assert [row.model for row in store.ledger.report(["model"])] == [text]


@pytest.mark.parametrize("migrated", [False, True])
def test_missing_rights_are_reported_with_a_remedy(
    postgres: PostgresServer, administrator: psycopg.Connection, *, migrated: bool
) -> None:
    """Since PostgreSQL 15, only owners may create tables in the schema `public`."""
    administrator.execute("DROP ROLE IF EXISTS unprivileged")
    administrator.execute("CREATE ROLE unprivileged LOGIN")
    with postgres.database() as url:
        if migrated:
            migrate(url)
        store = open_store(url.replace("//postgres@", "//unprivileged@"))
        with pytest.raises(StoreError, match=r"permission denied for .* GRANT"):
            store.migrate()
        store.close()


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


@pytest.fixture(scope="module")
def pgbouncer(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """PgBouncer whose transactions share one connection."""
    settings = {"pool_mode": "transaction", "default_pool_size": 1, "query_wait_timeout": 1}
    with running_pgbouncer(postgres, **settings) as server:
        yield server


def pooled_url(pgbouncer: PostgresServer, url: str) -> str:
    """Return the URL of the same database behind PgBouncer."""
    return pgbouncer.url(database_name(url))


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


# --- restore -------------------------------------------------------------------------------------


def run(program: str, *arguments: str | Path) -> None:
    command = [find_program(program, "postgresql"), *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def records(snapshot: AccountSnapshot) -> tuple[object, ...]:
    return snapshot.organisations, snapshot.projects, snapshot.users, snapshot.keys


@pytest.mark.parametrize("database_kind", ["postgresql"])
@pytest.mark.parametrize("known", ["nothing", "less", "more"])
def test_accounts_are_read_only_after_a_complete_restore(
    store: Store, url: str, clock: FakeClock, tmp_path: Path, known: str
) -> None:
    """pg_restore creates the tables, loads them one by one and adds the primary keys at the end."""
    reader = open_store(url, clock=clock)
    home = store.accounts.create_organisation("acme", actor=ACTOR).id
    if known == "less":
        reader.load_snapshot()
    user = store.accounts.create_user(home, "ann@acme.org", actor=ACTOR)
    project = store.accounts.create_project(home, "web", actor=ACTOR)
    store.accounts.create_key(project.id, "k", user=user.id, actor=ACTOR)
    store.ledger.add_records([usage_row("before")])
    expected = store.load_snapshot()
    run("pg_dump", "--format=custom", "--file", tmp_path / "dump", url)
    if known == "more":
        store.accounts.create_organisation("zeta", actor=ACTOR)
        reader.load_snapshot()
    with psycopg.connect(url) as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")

    def restore(section: str) -> None:
        run("pg_restore", "--section", section, "--dbname", url, tmp_path / "dump")

    restore("pre-data")
    with pytest.raises(StoreUnavailableError, match="being restored"):
        reader.ledger.add_records([usage_row("meanwhile")])
    restore("data")
    with pytest.raises(StoreUnavailableError, match=r"being restored.*users"):
        reader.load_snapshot()
    restore("post-data")
    assert records(reader.load_snapshot()) == records(expected)
    assert reader.ledger.add_records([usage_row("meanwhile"), usage_row("before")]) == 1
    reader.close()
