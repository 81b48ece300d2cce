"""Databases that cannot be opened or used. Each error says what to do."""

from __future__ import annotations

import re
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from tests.integration.store.conftest import migrate
from tests.support import store_process
from tests.support.migrated_store import write_migrated_file

from argosy.extras import install_command
from argosy.store import (
    QueryTimeoutError,
    Store,
    StoreError,
    UsageRecord,
    database,
    default_store_url,
    hash_key,
    limit_query_time,
    open_existing_store,
    open_store,
    sqlite_path,
    usage_log_folder,
)
from argosy.store.database import Database
from argosy.store.record_tables import begin_transaction


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "mysql://user:hidden@host/db",
        "sqlite+aiosqlite:///x.db",
        "postgresql+asyncpg://user:hidden@host/db",
        "postgresql://user:hidden@host:port/db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite://host/x.db",
        "sqlite:///x.db?mode=ro",
    ],
)
def test_invalid_url_is_rejected_without_its_password(url: str) -> None:
    with pytest.raises(StoreError, match="Write sqlite:///") as rejected:
        open_store(url)
    assert "hidden" not in str(rejected.value)
    assert rejected.value.__cause__ is None


# --- servers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_unreachable_server_is_named_without_the_password(scheme: str, tmp_path: Path) -> None:
    store = open_store(f"{scheme}://user:hidden@/db?host={tmp_path}&password=hidden")
    with pytest.raises(
        StoreError, match=r"postgresql:///db cannot be used: .*Check that it is running"
    ) as failed:
        store.load_snapshot()
    assert "hidden" not in str(failed.value)
    store.close()


HBA_ERROR = b"SFATAL\0C28000\0Mno pg_hba.conf entry for host\0\0"


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (b"R" + struct.pack("!II", 8, 3), "Give the password in the URL or in PGPASSWORD."),
        (
            b"E" + struct.pack("!I", 4 + len(HBA_ERROR)) + HBA_ERROR,
            "Allow this user in its pg_hba.conf.",
        ),
    ],
    ids=["password", "pg_hba"],
)
def test_rejected_login_is_reported_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: bytes, remedy: str
) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor() as threads:
        listener.bind(str(tmp_path / ".s.PGSQL.5432"))
        listener.listen()

        def serve_one_connection() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(message)
                connection.recv(1024)  # until the client disconnects

        served = threads.submit(serve_one_connection)
        store = open_store(f"postgresql://user@/db?host={tmp_path}")
        with pytest.raises(StoreError, match=re.escape(remedy)):
            store.load_snapshot()
        store.close()
        served.result()


def test_missing_driver_is_reported_with_the_package_to_install() -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from argosy.store import open_store\n"
        "open_store('postgresql://host/db')"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    message = f"StoreError: PostgreSQL needs its driver: {install_command('postgres')}"
    assert message in process.stderr


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_terminated_connections_are_replaced(store: Store, url: str) -> None:
    assert store.load_snapshot().version == 1
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    assert store.load_snapshot().version == 1


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_connection_in_use_at_the_close_is_closed_when_it_is_given_back(url: str) -> None:
    database = Database(url)
    with database.read_transaction() as connection:
        driver_connection = connection.connection.driver_connection
        assert isinstance(driver_connection, psycopg.Connection)
        database.close()
        assert connection.execute(sa.select(sa.literal(1))).scalar_one() == 1
    with database.read_transaction() as connection:  # of a thread that has not heard of it
        late_connection = connection.connection.driver_connection
        assert isinstance(late_connection, psycopg.Connection)
    assert driver_connection.closed
    assert late_connection.closed


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_idle_writer_does_not_block_others_for_long(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "POSTGRES_IDLE_TIMEOUT_S", 0.2)
    idle = Database(url)

    def hold_transaction() -> None:
        with begin_transaction(idle, "test", time.time):
            # The store uses another connection and waits for the idle transaction.
            store.accounts.create_organisation("acme", actor="test")

    with pytest.raises(
        StoreError, match=r"idle-in-transaction timeout|server closed the connection"
    ):
        hold_transaction()
    assert [organisation.name for organisation in store.load_snapshot().organisations] == ["acme"]
    idle.close()


# --- SQLite files --------------------------------------------------------------------------------


def write_letter(path: Path) -> None:
    path.write_text("A letter to the editor. " * 100)


def damage_pages(path: Path) -> None:
    migrate(f"sqlite:///{path}")
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("prepare", "remedy"),
    [
        (Path.mkdir, "Give a path that this user can write to"),
        (write_letter, r"not a database\. Move that file away"),
        (damage_pages, r"malformed\. .*Restore a backup"),
    ],
    ids=["folder", "other format", "damaged"],
)
def test_unusable_file_is_reported_with_a_remedy(
    tmp_path: Path, prepare: Callable[[Path], object], remedy: str
) -> None:
    path = tmp_path / "store.db"
    prepare(path)
    with pytest.raises(StoreError, match=remedy), closing(open_store(f"sqlite:///{path}")) as store:
        store.load_snapshot()


@pytest.fixture
def store_file(tmp_path: Path) -> Path:
    """Migrated SQLite file of this test."""
    write_migrated_file(tmp_path / "store.db")
    return tmp_path / "store.db"


@pytest.mark.parametrize("is_replaced", [True, False])
def test_file_removed_during_use_is_reported_and_not_recreated(
    store_file: Path, *, is_replaced: bool
) -> None:
    store = open_store(f"sqlite:///{store_file}")
    store.load_snapshot()
    store_file.unlink()
    if is_replaced:
        write_migrated_file(store_file)
    for _ in range(3):
        with pytest.raises(StoreError, match=r"removed while it was in use\..* start it again"):
            store.accounts.create_organisation("lost", actor="me")
        with pytest.raises(StoreError, match="start it again"):
            store.load_snapshot()
    store.close()
    assert store_file.exists() == is_replaced


def test_backup_moved_over_an_open_file_stays_unchanged(store_file: Path, tmp_path: Path) -> None:
    """Opening the backup would apply the write-ahead log of the previous file to it."""
    backup = tmp_path / "backup.db"
    write_migrated_file(backup)
    content = backup.read_bytes()
    store = open_store(f"sqlite:///{store_file}")
    store.accounts.create_organisation("newer", actor="me")
    backup.replace(store_file)
    for _ in range(3):
        with pytest.raises(StoreError, match=r"store\.db-wal and .*start it again"):
            store.load_snapshot()
    store.close()
    assert store_file.read_bytes() == content


def test_full_disk_is_reported_without_retries(
    store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite reports missing space for its shared memory like a lock, for which the store retries."""
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("the store retries"))
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = open_store(f"sqlite:///{store_file}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard_limit))
    try:
        with pytest.raises(StoreError, match="Free space on its disk"):
            store.load_snapshot()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
        store.close()


def test_diverged_backup_with_the_same_version_is_not_current(tmp_path: Path) -> None:
    stores = []
    for name in ("first", "second"):
        store = open_store(write_migrated_file(tmp_path / name))
        store.accounts.create_organisation(name, actor="me")
        stores.append(store)
    first, second = stores
    assert first.load_snapshot().version == second.load_snapshot().version
    assert first.is_current(first.load_snapshot())
    assert not second.is_current(first.load_snapshot())
    first.close()
    second.close()


def test_default_file_is_private_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    migrate(default_store_url())
    folder = tmp_path / "state" / "argosy"
    assert folder / "argosy.db" in folder.iterdir()
    for path in (folder, *folder.iterdir()):
        assert path.stat().st_mode & 0o077 == 0
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/ann")
    assert default_store_url() == "sqlite:////home/ann/.local/state/argosy/argosy.db"


@pytest.mark.parametrize("name", ["plain", "what?", "100%25", "100%", "#1 & +2", "é"])
def test_default_file_is_in_a_folder_of_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name))
    path = tmp_path / name / "argosy" / "argosy.db"
    migrate(default_store_url())
    assert path.is_file()
    assert [folder.name for folder in tmp_path.iterdir()] == [name]
    assert sqlite_path(default_store_url()) == path
    assert usage_log_folder(default_store_url()).parent == path.parent
    open_existing_store(default_store_url()).close()


# --- tables --------------------------------------------------------------------------------------


def test_tables_of_another_program_are_rejected(empty_url: str) -> None:
    with closing(Database(empty_url)) as foreign, foreign.write_transaction() as connection:
        connection.execute(sa.text("CREATE TABLE organisations (name TEXT)"))
    with (
        closing(open_store(empty_url)) as store,
        pytest.raises(StoreError, match=r"of another program\. Use another database"),
    ):
        store.migrate()


def test_tables_of_an_unreleased_build_are_reported(url: str) -> None:
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:", 1))
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE usage DROP COLUMN is_capped"))
    engine.dispose()
    record = UsageRecord(request="a", started_at=1.0, ended_at=2.0, status="completed")
    with closing(open_store(url)) as store, pytest.raises(StoreError, match="Move it away"):
        store.ledger.add_records([record])


def test_missing_tables_are_reported(empty_url: str) -> None:
    with (
        closing(open_store(empty_url)) as store,
        pytest.raises(StoreError, match="Restore a backup, or start a gateway"),
    ):
        store.load_snapshot()


def test_open_existing_store_creates_nothing(empty_url: str) -> None:
    for _ in range(2):
        with pytest.raises(StoreError, match=r"no Argosy store in .*Check the URL"):
            open_existing_store(empty_url)
    migrate(empty_url)
    store = open_existing_store(empty_url)
    assert store.load_snapshot().keys == ()
    store.close()


def test_concurrent_bootstraps_create_default_records_and_one_admin_key(
    store: Store, url: str, store_processes: store_process.StoreProcesses
) -> None:
    (plain,) = filter(None, store_processes.run(store_process.bootstrap, url))
    snapshot = store.load_snapshot()
    assert snapshot.version == 2
    assert [organisation.name for organisation in snapshot.organisations] == ["default"]
    assert [project.name for project in snapshot.projects] == ["default"]
    (key,) = snapshot.keys
    assert (key.role, key.scope, key.digest) == ("admin", "gateway", hash_key(plain))
    assert key.project == snapshot.projects[0].id


def test_query_that_exceeds_its_time_limit_is_ended_and_later_ones_run(url: str) -> None:
    opened = Database(url)
    endless = sa.text(
        "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers) SELECT count(*) FROM numbers"
    )
    with (
        limit_query_time(0.05),
        pytest.raises(QueryTimeoutError, match="shorter time"),
        opened.read_transaction() as connection,
    ):
        connection.execute(endless)
    with opened.read_transaction() as connection:
        ten_times_longer = sa.text(
            str(endless).replace("FROM numbers)", "FROM numbers WHERE n < 300000)", 1)
        )
        assert connection.execute(ten_times_longer).scalar_one() == 300_000
    opened.close()
