"""Migrated stores on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fake_clock import FakeClock
from tests.support.migrated_store import write_migrated_file
from tests.support.services import PostgresServer
from tests.support.store_process import StoreProcesses

from argosy.store import Organisation, Project, Store, User, open_store

START = 1_763_750_000.0
TEMPLATE = "migrated"
ACTOR = "key:test"
RULES = pytest.mark.parametrize(
    "database_kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.exhaustive)]
)
"""Mark of tests of rules that Python code applies. The other tests store and read each type on both databases."""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def empty_url(database_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database without tables."""
    if database_kind == "sqlite":
        return f"sqlite:///{tmp_path}/empty.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture(scope="session")
def migrated_server(postgres: PostgresServer) -> PostgresServer:
    """PostgreSQL server with a migrated template database."""
    migrate(postgres.create(TEMPLATE))
    return postgres


@pytest.fixture
def url(database_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a migrated database without accounts."""
    if database_kind == "sqlite":
        yield write_migrated_file(tmp_path / "store.db")
    else:
        server: PostgresServer = request.getfixturevalue("migrated_server")
        with server.database(like=TEMPLATE) as url:
            yield url


@pytest.fixture
def store(url: str, clock: FakeClock) -> Iterator[Store]:
    opened = open_store(url, clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def organisation(store: Store) -> Organisation:
    return store.accounts.create_organisation("Acme", actor=ACTOR)


@pytest.fixture
def project(store: Store, organisation: Organisation) -> Project:
    return store.accounts.create_project(organisation.id, "search", actor=ACTOR)


@pytest.fixture
def user(store: Store, organisation: Organisation) -> User:
    return store.accounts.create_user(organisation.id, "Ann@example.com", actor=ACTOR)


def migrate(url: str) -> None:
    store = open_store(url)
    store.migrate()
    store.close()


@pytest.fixture(scope="session")
def store_processes() -> Iterator[StoreProcesses]:
    """Two processes that use one store at the same time."""
    with StoreProcesses() as processes:
        yield processes
