"""A backup that PostgreSQL's own programs put back while gateways run: what is there half way is not taken for all."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.integration.store.conftest import Clock
from tests.support.services import find_program
from tests.support.usage_rows import usage_row

from argosy.store import AccountSnapshot, Store, StoreUnavailableError, open_store

ME = "test"


@pytest.fixture
def kind() -> str:
    return "postgresql"


def run(program: str, *arguments: str | Path) -> None:
    command = [find_program(program, "postgresql"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def told(directory: AccountSnapshot) -> tuple[object, ...]:
    return directory.organisations, directory.projects, directory.users, directory.keys


@pytest.fixture
def reader(url: str, clock: Clock) -> Iterator[Store]:
    """Somebody else's store on the same database."""
    with contextlib.closing(open_store(url, clock=clock)) as opened:
        yield opened


@pytest.mark.parametrize("known", ["nothing", "less", "more"])
def test_accounts_are_read_once_they_are_all_there(
    store: Store, reader: Store, url: str, tmp_path: Path, known: str
) -> None:
    """Rows come back table by table, and then the primary keys; until then nothing is read or added."""
    home = store.accounts.create_organisation("acme", actor=ME).id
    if known == "less":
        reader.load_snapshot()
    user = store.accounts.create_user(home, "ann@acme.org", actor=ME)
    project = store.accounts.create_project(home, "web", actor=ME)
    store.accounts.create_key(project.id, "k", user=user.id, actor=ME)
    store.ledger.add_records([usage_row("before")])
    expected = store.load_snapshot()
    run("pg_dump", "--format=custom", "--file", tmp_path / "dump", url)
    if known == "more":
        store.accounts.create_organisation("zeta", actor=ME)
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
    assert told(reader.load_snapshot()) == told(expected)
    assert reader.ledger.add_records([usage_row("meanwhile"), usage_row("before")]) == 1
