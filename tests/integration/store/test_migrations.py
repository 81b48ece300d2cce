"""Migrations on both databases: new tables equal the schema, and later steps change existing ones."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from tests.integration.store.conftest import ACTOR
from tests.support import store_process
from tests.support.usage_rows import usage_row

from argosy.store import ItemOwner, Store, StoredResponse, StoreError, migrations, open_store
from argosy.store.database import Database
from argosy.store.schema import metadata

NEXT_STEP = """
import sqlalchemy as sa
from alembic import op

revision = "next"
down_revision = "NEWEST"

def upgrade():
    op.add_column("usage", sa.Column("colour", sa.Text, nullable=False, server_default="grey"))
    op.execute("UPDATE usage SET colour = 'blue' WHERE request = 'before'")
"""


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Patch that adds a later step. `undo` brings back the present version."""
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "next.py").write_text(
        NEXT_STEP.replace("NEWEST", migrations.NEWEST_REVISION)
    )
    folders = (*migrations.STEP_FOLDERS, tmp_path / "steps")
    monkeypatch.setattr(migrations, "STEP_FOLDERS", folders)
    monkeypatch.setattr(migrations, "NEWEST_REVISION", "next")
    return monkeypatch


def assert_tables_match_the_schema(url: str) -> None:
    database = Database(url)
    with database.read_transaction() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == migrations.NEWEST_REVISION
    database.close()


def test_new_tables_match_the_schema(store: Store, url: str) -> None:
    assert_tables_match_the_schema(url)
    store.migrate()
    assert store.load_snapshot().version == 1


def test_later_step_changes_existing_tables_and_keeps_their_rows(
    url: str, store: Store, next_version: pytest.MonkeyPatch
) -> None:
    project = store.accounts.create_organisation("Acme", actor=ACTOR)
    store.ledger.add_records([usage_row("before"), usage_row("other")])
    for _ in range(2):
        store.migrate()
    assert store.accounts.list_organisations() == [project]
    assert store.ledger.report()[0].requests == 2
    database = Database(url)
    with database.read_transaction() as connection:
        colours = connection.execute(sa.text("SELECT request, colour FROM usage")).all()
    database.close()
    assert sorted(map(tuple, colours)) == [("before", "blue"), ("other", "grey")]
    next_version.undo()
    with pytest.raises(StoreError, match=r"belong to a newer Argosy \(next\)"):
        store.migrate()


def test_stored_bytes_of_an_older_database_are_summed_up(store: Store, url: str) -> None:
    for organisation in ("org_a", "org_b"):
        owner = ItemOwner(organisation, "proj_a")
        store.conversations.create(owner, {"a": "b"}, [{"id": "m", "content": organisation}], 9.0)
    response = StoredResponse(id="resp_1", status="completed", body={"id": "resp_1"})
    store.responses.create(owner, response, 9.0)
    totals = store.stored_bytes.read_totals()
    database = Database(url)
    with database.write_transaction() as connection:
        connection.execute(sa.text("DROP TABLE stored_bytes"))
        connection.execute(sa.text("DROP TABLE adapters"))
        connection.execute(sa.text("DROP TABLE prompts"))
        connection.execute(sa.text("DROP TABLE flags"))
        connection.execute(sa.text("ALTER TABLE usage DROP COLUMN findings"))
        connection.execute(sa.text("ALTER TABLE usage DROP COLUMN service_tier"))
        connection.execute(sa.text("DROP TABLE batches"))
        connection.execute(sa.text("DROP TABLE batch_lines"))
        connection.execute(sa.text("DROP TABLE files"))
        connection.execute(sa.text("DROP TABLE uploads"))
        connection.execute(sa.text("DROP TABLE blob_removals"))
        connection.execute(sa.text("DROP TABLE cold_parts"))
        connection.execute(sa.text("DROP TABLE hardware_days"))
        connection.execute(sa.text("DROP TABLE retention"))
        connection.execute(sa.text("DROP INDEX conversations_owner"))
        connection.execute(sa.text("DROP TABLE quality_runs"))
        connection.execute(sa.text("DROP TABLE quality_sets"))
        connection.execute(sa.text("DROP TABLE objective_hours"))
        connection.execute(sa.text("DROP TABLE quality_samples"))
        connection.execute(sa.text("ALTER TABLE projects DROP COLUMN quality"))
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0001'"))
    database.close()
    store.migrate()
    assert store.stored_bytes.read_totals() == totals
    test_new_tables_match_the_schema(store, url)


def test_candidates_of_an_older_database_keep_the_share_that_a_person_set(
    store: Store, url: str
) -> None:
    """The step from 0004 to later ones adds the columns of rollouts to adapters that exist."""
    add = partial(store.adapters.add_version, "tuned", "base", actor=ACTOR)
    add(f"sha256:{'1' * 64}")
    add(f"sha256:{'2' * 64}", candidate_percent=20)
    (before,) = store.adapters.list_adapters()
    database = Database(url)
    with database.write_transaction() as connection:
        columns = ("rollout", "step_s", "rejected", "rejection", "evidence_version", "evidence")
        for column in columns:
            connection.execute(sa.text(f"ALTER TABLE adapters DROP COLUMN {column}"))
        connection.execute(sa.text("DROP TABLE prompts"))
        connection.execute(sa.text("DROP TABLE flags"))
        connection.execute(sa.text("ALTER TABLE usage DROP COLUMN findings"))
        connection.execute(sa.text("ALTER TABLE usage DROP COLUMN service_tier"))
        connection.execute(sa.text("DROP TABLE batches"))
        connection.execute(sa.text("DROP TABLE batch_lines"))
        connection.execute(sa.text("DROP TABLE files"))
        connection.execute(sa.text("DROP TABLE uploads"))
        connection.execute(sa.text("DROP TABLE blob_removals"))
        connection.execute(sa.text("DROP TABLE cold_parts"))
        connection.execute(sa.text("DROP TABLE hardware_days"))
        connection.execute(sa.text("DROP TABLE retention"))
        connection.execute(sa.text("DROP INDEX conversations_owner"))
        connection.execute(sa.text("DROP TABLE quality_runs"))
        connection.execute(sa.text("DROP TABLE quality_sets"))
        connection.execute(sa.text("DROP TABLE objective_hours"))
        connection.execute(sa.text("DROP TABLE quality_samples"))
        connection.execute(sa.text("ALTER TABLE projects DROP COLUMN quality"))
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0004'"))
    database.close()
    store.migrate()
    (after,) = store.adapters.list_adapters()
    assert after.rollout
    assert msgspec.structs.replace(after, rollout=before.rollout) == before
    assert_tables_match_the_schema(url)


@pytest.mark.usefixtures("next_version")
def test_new_database_runs_no_steps(empty_url: str) -> None:
    store = open_store(empty_url)
    for _ in range(2):
        store.migrate()
    database = Database(empty_url)
    with database.read_transaction() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == "next"
        columns = {column["name"] for column in sa.inspect(connection).get_columns("usage")}
    database.close()
    assert "colour" not in columns
    assert store.load_snapshot().version == 1
    store.close()


def test_processes_migrate_concurrently(
    empty_url: str, store_processes: store_process.StoreProcesses
) -> None:
    store_processes.run(store_process.migrate, empty_url)
    store = open_store(empty_url)
    assert store.load_snapshot().version == 1
    store.close()


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_long_read_delays_the_migration_but_no_older_gateway(
    store: Store, url: str, next_version: pytest.MonkeyPatch
) -> None:
    """A backup of an hour must not stop older gateways from writing usage for an hour."""
    next_version.setattr(migrations, "LOCK_TIMEOUT_S", 1)
    next_version.setattr(migrations, "RETRY_INTERVAL_S", 0.1)
    older = open_store(f"{url}&options=-c%20lock_timeout%3D20s")
    waiting = "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND NOT granted"
    with ThreadPoolExecutor() as threads, psycopg.connect(url) as backup:
        backup.execute("SELECT count(*) FROM usage")
        migration = threads.submit(store.migrate)
        while backup.execute(waiting).fetchone() == (0,):
            time.sleep(0.01)
        older.ledger.add_records([usage_row("meanwhile")])
        assert not migration.done()
        backup.rollback()
        migration.result()
    assert store.ledger.report()[0].requests == 1
    older.close()
