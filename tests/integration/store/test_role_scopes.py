"""Databases of PostgreSQL as others have set them up: their encodings, rights and settings."""

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


def database_in(administrator: psycopg.Connection, encoding: str) -> str:
    """A new database's name."""
    name = f"in_{encoding.lower()}"
    administrator.execute(
        sql.SQL("CREATE DATABASE {} ENCODING {} LOCALE 'C' TEMPLATE template0").format(
            sql.Identifier(name), encoding
        )
    )
    return name


def test_a_database_without_an_encoding_keeps_every_text(
    postgres: PostgresServer, administrator: psycopg.Connection
) -> None:
    """What `initdb` makes where the locale is C."""
    store = open_store(postgres.url(database_in(administrator, "SQL_ASCII")))
    store.migrate()
    store.accounts.create_organisation(NAME, actor="test")
    store.ledger.add_records([usage_row("r", model=NAME)])
    assert [one.name for one in store.load_snapshot().organisations] == [NAME]
    assert [row.model for row in store.ledger.report(["model"])] == [NAME]
    store.close()


def test_a_text_that_an_encoding_lacks_is_refused_with_what_to_do(
    postgres: PostgresServer, administrator: psycopg.Connection
) -> None:
    store = open_store(postgres.url(database_in(administrator, "LATIN1")))
    store.migrate()
    with pytest.raises(StoreError, match=r"no equivalent in encoding.* ENCODING 'UTF8'"):
        store.ledger.add_records([usage_row("r", model=NAME)])
    assert store.ledger.add_records([usage_row("r", model="café")]) == 1
    assert [row.model for row in store.ledger.report(["model"])] == ["café"]
    store.close()


@pytest.mark.parametrize("migrated", [False, True])
def test_a_user_without_rights_is_told_to_get_them(
    postgres: PostgresServer, administrator: psycopg.Connection, *, migrated: bool
) -> None:
    """Only owners make tables in a schema of PostgreSQL 15 or newer."""
    administrator.execute("DROP ROLE IF EXISTS nobody")
    administrator.execute("CREATE ROLE nobody LOGIN")
    with postgres.database() as url:
        if migrated:
            migrate(url)
        store = open_store(url.replace("//postgres@", "//nobody@"))
        with pytest.raises(StoreError, match=r"permission denied for .* GRANT"):
            store.migrate()
        store.close()


def test_a_database_that_was_made_read_only_is_not_only_taken_for_a_standby(
    postgres: PostgresServer, administrator: psycopg.Connection
) -> None:
    """As those who host databases do when its disk is full."""
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
