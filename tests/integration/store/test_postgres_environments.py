"""PostgreSQL databases with other encodings, rights and settings than the default ones."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql
from tests.integration.store.conftest import migrate
from tests.support.services import PostgresServer
from tests.support.usage_rows import usage_row

from argosy.store import StoreError, open_store

NAME = "café 日本 \N{SAILBOAT}"


@pytest.fixture
def administrator(postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres.url("postgres"), autocommit=True) as connection:
        yield connection


def create_database(administrator: psycopg.Connection, encoding: str) -> str:
    """Create a database with an encoding. Returns its name."""
    name = f"in_{encoding.lower()}"
    administrator.execute(
        sql.SQL("CREATE DATABASE {} ENCODING {} LOCALE 'C' TEMPLATE template0").format(
            sql.Identifier(name), encoding
        )
    )
    return name


def test_database_without_an_encoding_stores_every_text(
    postgres: PostgresServer, administrator: psycopg.Connection
) -> None:
    """`initdb` creates such databases under the C locale."""
    store = open_store(postgres.url(create_database(administrator, "SQL_ASCII")))
    store.migrate()
    store.accounts.create_organisation(NAME, actor="test")
    store.ledger.add_records([usage_row("r", model=NAME)])
    assert [organisation.name for organisation in store.load_snapshot().organisations] == [NAME]
    assert [row.model for row in store.ledger.report(["model"])] == [NAME]
    store.close()


def test_text_outside_the_encoding_is_rejected_with_a_remedy(
    postgres: PostgresServer, administrator: psycopg.Connection
) -> None:
    store = open_store(postgres.url(create_database(administrator, "LATIN1")))
    store.migrate()
    with pytest.raises(StoreError, match=r"no equivalent in encoding.* ENCODING 'UTF8'"):
        store.ledger.add_records([usage_row("r", model=NAME)])
    assert store.ledger.add_records([usage_row("r", model="café")]) == 1
    assert [row.model for row in store.ledger.report(["model"])] == ["café"]
    store.close()


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


def test_read_only_database_is_not_reported_as_a_standby_alone(
    postgres: PostgresServer, administrator: psycopg.Connection
) -> None:
    """Providers make a database read-only when its disk is full."""
    with postgres.database() as url:
        migrate(url)
        name = url.partition("@/")[2].partition("?")[0]
        administrator.execute(
            sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(
                sql.Identifier(name)
            )
        )
        store = open_store(url)
        with pytest.raises(StoreError, match="default_transaction_read_only"):
            store.accounts.create_organisation("acme", actor="test")
        store.close()
