"""Backups that pg_restore loads while gateways run. A partly restored database is not read."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.integration.store.conftest import ACTOR
from tests.support.fake_clock import FakeClock
from tests.support.services import find_program
from tests.support.usage_rows import usage_row

from argosy.store import AccountSnapshot, Store, StoreUnavailableError, open_store


@pytest.fixture
def database_kind() -> str:
    return "postgresql"


def run(program: str, *arguments: str | Path) -> None:
    command = [find_program(program, "postgresql"), *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def records(snapshot: AccountSnapshot) -> tuple[object, ...]:
    return snapshot.organisations, snapshot.projects, snapshot.users, snapshot.keys


@pytest.fixture
def reader(url: str, clock: FakeClock) -> Iterator[Store]:
    """Second store on the same database."""
    with contextlib.closing(open_store(url, clock=clock)) as opened:
        yield opened


@pytest.mark.parametrize("known", ["nothing", "less", "more"])
def test_accounts_are_read_only_after_a_complete_restore(
    store: Store, reader: Store, url: str, tmp_path: Path, known: str
) -> None:
    """pg_restore creates the tables, loads them one by one and adds the primary keys at the end."""
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
