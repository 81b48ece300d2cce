"""Opening, migrating and losing a database; every failure says what to do."""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from tests.integration.store.conftest import at_once
from tests.support.usage_rows import usage_row

from argosy.store import (
    AuditVerification,
    Store,
    StoreError,
    default_store_url,
    migrations,
    open_existing_store,
    open_store,
)
from argosy.store import database as database_module
from argosy.store.audit import GENESIS_HASH, hash_entry
from argosy.store.database import Database
from argosy.store.record_tables import begin_transaction
from argosy.store.schema import metadata


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
def test_a_bad_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(StoreError, match="Write sqlite:///") as refused:
        open_store(url)
    assert "hidden" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_a_server_that_is_not_there(scheme: str, tmp_path: Path) -> None:
    store = open_store(f"{scheme}://user:hidden@/db?host={tmp_path}&password=hidden")
    with pytest.raises(
        StoreError, match=r"postgresql:///db cannot be used: .*Check that it is running"
    ) as refused:
        store.load_snapshot()
    assert "hidden" not in str(refused.value)
    store.close()


HBA = b"SFATAL\0C28000\0Mno pg_hba.conf entry for host\0\0"


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        (b"R" + struct.pack("!II", 8, 3), "Give the password in the URL or in PGPASSWORD."),
        (b"E" + struct.pack("!I", 4 + len(HBA)) + HBA, "Allow this user in its pg_hba.conf."),
    ],
)
def test_a_server_that_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, advice: str
) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    with socket.socket(socket.AF_UNIX) as listening, ThreadPoolExecutor() as threads:
        listening.bind(str(tmp_path / ".s.PGSQL.5432"))
        listening.listen()

        def answering() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(answer)
                connection.recv(1024)  # until it has left

        answered = threads.submit(answering)
        store = open_store(f"postgresql://user@/db?host={tmp_path}")
        with pytest.raises(StoreError, match=re.escape(advice)):
            store.load_snapshot()
        store.close()
        answered.result()


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="Give a path that this user can write to"):
        open_store(f"sqlite:///{tmp_path}/file/store.db")
    with pytest.raises(StoreError, match="Give a path"):
        open_store(f"sqlite:///{tmp_path}")


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_text("A letter to the editor. " * 100)
    store = open_store(f"sqlite:///{tmp_path}/store.db")
    with pytest.raises(StoreError, match=r"not a database\. Move that file away"):
        store.migrate()
    store.close()


@pytest.mark.parametrize("put_back", [True, False])
def test_a_file_that_is_replaced_or_removed_under_a_running_process(
    migrated_file: Path, tmp_path: Path, *, put_back: bool
) -> None:
    path = tmp_path / "store.db"
    shutil.copy(migrated_file, path)
    store = open_store(f"sqlite:///{path}")
    store.load_snapshot()
    path.unlink()
    if put_back:
        shutil.copy(migrated_file, path)
    with pytest.raises(StoreError, match="start it again"):
        store.accounts.create_organisation("lost", actor="me")
    store.close()
    assert path.exists() == put_back


def test_a_backup_that_is_put_in_a_files_place_stays_what_it_is(
    migrated_file: Path, tmp_path: Path
) -> None:
    """Opened once more, it would be given what the file before had in its write-ahead log."""
    path, backup = tmp_path / "store.db", tmp_path / "backup.db"
    shutil.copy(migrated_file, path)
    shutil.copy(migrated_file, backup)
    store = open_store(f"sqlite:///{path}")
    store.accounts.create_organisation("newer", actor="me")
    backup.replace(path)
    for _ in range(3):
        with pytest.raises(StoreError, match=r"store\.db-wal and .*start it again"):
            store.load_snapshot()
    store.close()
    assert path.read_bytes() == migrated_file.read_bytes()


def test_a_file_that_is_removed_is_not_made_anew(migrated_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    shutil.copy(migrated_file, path)
    store = open_store(f"sqlite:///{path}")
    store.load_snapshot()
    path.unlink()
    for _ in range(3):
        with pytest.raises(StoreError, match="start it again"):
            store.load_snapshot()
    store.close()
    assert not path.exists()


def test_a_full_disk_is_named_as_that_and_nobody_waits_for_it(
    migrated_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room for what processes share of a file; they wait for others to end with it, not for that."""
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    shutil.copy(migrated_file, tmp_path / "store.db")
    store = open_store(f"sqlite:///{tmp_path}/store.db")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        with pytest.raises(StoreError, match="Free space on its disk"):
            store.load_snapshot()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        store.close()


def test_a_backup_that_went_another_way_is_not_taken_for_what_it_was(
    migrated_file: Path, tmp_path: Path
) -> None:
    stores = []
    for name in ("one", "other"):
        shutil.copy(migrated_file, tmp_path / name)
        store = open_store(f"sqlite:///{tmp_path / name}")
        store.accounts.create_organisation(name, actor="me")
        stores.append(store)
    one, other = stores
    assert one.load_snapshot().version == other.load_snapshot().version
    assert one.is_current(one.load_snapshot())
    assert not other.is_current(one.load_snapshot())
    one.close()
    other.close()


def test_a_file_that_is_damaged(migrated_file: Path, tmp_path: Path) -> None:
    content = bytearray(migrated_file.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    (tmp_path / "store.db").write_bytes(content)
    store = open_store(f"sqlite:///{tmp_path}/store.db")
    with pytest.raises(StoreError, match=r"malformed\. .*Restore a backup"):
        store.load_snapshot()
    store.close()


def test_tables_that_are_not_ours(empty_url: str) -> None:
    database = Database(empty_url)
    with database.write_transaction() as connection:
        connection.execute(sa.text("CREATE TABLE organisations (name TEXT)"))
    database.close()
    store = open_store(empty_url)
    with pytest.raises(StoreError, match=r"of another program\. Use another database"):
        store.migrate()
    store.close()


def test_a_file_whose_folder_has_gone(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/new/store.db")
    shutil.rmtree(tmp_path / "new")
    with pytest.raises(StoreError, match=r"removed while it was in use"):
        store.load_snapshot()
    store.close()


def test_tables_that_are_not_there_yet(empty_url: str) -> None:
    store = open_store(empty_url)
    with pytest.raises(StoreError, match="Restore a backup, or start a gateway"):
        store.load_snapshot()
    store.close()


def test_who_only_looks_makes_nothing(empty_url: str) -> None:
    for _ in range(2):
        with pytest.raises(StoreError, match=r"no Argosy store in .*Check the URL"):
            open_existing_store(empty_url)
    store = open_store(empty_url)
    store.migrate()
    store.close()
    found = open_existing_store(empty_url)
    assert found.load_snapshot().keys == ()
    found.close()


def test_tables_of_a_newer_version(store: Store, url: str) -> None:
    database = Database(url)
    with database.write_transaction() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    with pytest.raises(StoreError, match=r"newer Argosy \(9999\)\. Update this one"):
        store.migrate()


def test_a_missing_driver_names_what_to_install() -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from argosy.store import open_store\n"
        "open_store('postgresql://host/db')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "StoreError: PostgreSQL needs its driver: pip install 'argosy[postgres]'" in done.stderr


def test_only_its_owner_reads_the_file(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/new/folder/store.db")
    store.migrate()
    for file in (tmp_path / "new" / "folder").iterdir():
        assert file.stat().st_mode & 0o077 == 0
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o077 == 0
    store.close()


def test_the_default_is_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    store = open_store(default_store_url())
    store.migrate()
    assert (tmp_path / "state" / "argosy" / "argosy.db").exists()
    store.close()
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/ann")
    assert default_store_url() == "sqlite:////home/ann/.local/state/argosy/argosy.db"


def test_migrations_make_the_tables_that_the_code_expects(store: Store, url: str) -> None:
    database = Database(url)
    with database.read_transaction() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    database.close()
    store.migrate()
    assert store.load_snapshot().version == 1


def test_roles_that_were_given_before_there_were_scopes_hold_for_the_whole_gateway(
    empty_url: str,
) -> None:
    database = Database(empty_url)
    with database.write_transaction() as connection:
        upgrade(connection, "0001")
        for statement in BEFORE_SCOPES:
            connection.execute(sa.text(statement))
        entry = {
            "entry": 1,
            "at": 1.0,
            "actor": "x",
            "action": "y",
            "subject": "z",
            "details": "{}",
        }
        head = hash_entry(GENESIS_HASH, entry | {"organisation": None})
        connection.execute(
            sa.text(
                "INSERT INTO audit VALUES (:entry, :at, :actor, :action, :subject, :details, :head)"
            ),
            entry | {"head": head},
        )
        connection.execute(
            sa.text("UPDATE state SET audit_entries = 1, audit_head = :head"), {"head": head}
        )
    database.close()
    store = open_store(empty_url)
    store.migrate()
    keys, users = store.accounts.list_keys(), store.accounts.list_users()
    assert {key.id: key.scope for key in keys} == {"key_a": "gateway", "key_c": "organisation"}
    assert {key.flags for key in keys} == {p.flags for p in store.accounts.list_projects()} == {()}
    assert [(user.role, user.scope) for user in users] == [("viewer", "gateway")]
    assert [entry.organisation for entry in store.audit_log.list_entries()] == [None]
    assert store.audit_log.verify() == AuditVerification(entries=1)
    store.accounts.create_project("org_o", "q", actor="test")
    assert store.audit_log.verify() == AuditVerification(entries=2)
    store.close()


def upgrade(connection: sa.Connection, revision: str) -> None:
    """Bring the tables to where an older version had them."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


OLDER_ROW = """
    INSERT INTO usage (request, organisation, project, key, "user", model, route, started_at, ended_at,
        status, input_tokens, cached_tokens, output_tokens, nano_dollars, day)
    VALUES (:request, 'o', 'p', 'k', 'u', 'm', 'r1', 1, 2, 'completed', 9, 0, 5, 7, 0) ON CONFLICT DO NOTHING
"""

BEFORE_SCOPES = (
    "INSERT INTO organisations (id, name, created_at) VALUES ('org_o', 'o', 1)",
    "INSERT INTO projects VALUES ('proj_p', 'org_o', 'p', 'free', 1, false, 'open', '[]', 1, NULL)",
    "INSERT INTO users VALUES ('user_u', 'org_o', 'u@x.y', 'viewer', NULL, 1, NULL)",
    """INSERT INTO keys (id, project, name, prefix, digest, role, models, networks, created_at) VALUES
    ('key_a', 'proj_p', 'a', 'a', 'a', 'admin', '[]', '[]', 1),
    ('key_c', 'proj_p', 'c', 'c', 'c', 'caller', '[]', '[]', 1)""",
)


def test_stores_role_and_quota_failure_mode_as_earlier_versions_do(store: Store, url: str) -> None:
    accounts = store.accounts
    organisation = accounts.create_organisation("o", actor="me")
    project = accounts.create_project(organisation.id, "p", quota_failure_mode="closed", actor="me")
    user = accounts.create_user(organisation.id, "u@x.y", actor="me")
    keys = [
        accounts.create_key(project.id, role, role=role, actor="me")[0]
        for role in ("user", "viewer")
    ]
    database = Database(url)
    with database.read_transaction() as connection:
        assert connection.execute(sa.text("SELECT when_unsure FROM projects")).scalar_one() == (
            "closed"
        )
        assert connection.execute(sa.text("SELECT role FROM users")).scalar_one() == "caller"
        stored = connection.execute(sa.text("SELECT name, role FROM keys ORDER BY name")).all()
    database.close()
    assert [tuple(row) for row in stored] == [("user", "caller"), ("viewer", "viewer")]
    assert (user.role, accounts.get_user(user.id).role) == ("user", "user")
    assert {key.role for key in accounts.list_keys()} == {key.role for key in keys}
    changed = accounts.change_project(project.id, quota_failure_mode="open", actor="me")
    assert accounts.get_project(project.id) == changed
    assert accounts.change_user(user.id, role="viewer", actor="me").role == "viewer"
    assert accounts.change_user(user.id, role="user", actor="me") == user


def test_the_ledger_is_kept_when_a_route_becomes_a_replica_and_older_gateways_go_on(
    empty_url: str, kind: str
) -> None:
    """Those that still run write rows as they always did: `OLDER_ROW`, in which a route is a replica."""
    database = Database(empty_url)
    with database.write_transaction() as connection:
        upgrade(connection, "0003")
        connection.execute(sa.text(OLDER_ROW), {"request": "before"})
        connection.execute(
            sa.text(
                "INSERT INTO usage_days VALUES (3, 'o', 'p', 'k', 'u', 'm', 'r1', 2, 9, 0, 5, 7)"
            )
        )
    store = open_store(empty_url)
    store.migrate()
    waits = pytest.raises(StoreError, match=r"NOT NULL constraint failed: usage\.replica")
    with (
        contextlib.nullcontext() if kind == "postgresql" else waits,
        database.write_transaction() as connection,
    ):
        connection.execute(sa.text(OLDER_ROW), {"request": "meanwhile"})
    database.close()
    store.ledger.add_records([usage_row("after", asked="next", route="canary", replica="r2")])
    (rows,) = store.ledger.iter_records()
    told = {row.request: (row.model, row.asked, row.route, row.replica) for row in rows}
    meanwhile = {"meanwhile": ("m", "", "", "r1")} if kind == "postgresql" else {}
    assert told == meanwhile | {
        "before": ("m", "", "", "r1"),
        "after": ("m", "next", "canary", "r2"),
    }
    for _ in range(2):
        report = store.ledger.report(("asked", "route", "replica"))
        assert [(row.asked, row.route, row.replica, row.requests) for row in report] == [
            ("", "", "r1", 3 + len(meanwhile)),
            ("next", "canary", "r2", 1),
        ]
        store.ledger.roll_up(time.time())
    store.close()


OLDER_KEY = """
    INSERT INTO keys (id, project, name, prefix, digest, role, models, networks, created_at, scope, flags) VALUES
    (:id, 'proj_p', :id, 'a', :digest, 'caller', '[]', '[]', 1, 'organisation', '[]')
"""
OLDER_LIMIT = "INSERT INTO limits (id, owner_kind, owner, unit, amount) VALUES (:id, :kind, :owner, 'concurrency', 1)"


def test_keys_and_limits_say_whose_they_are_those_of_older_versions_too(empty_url: str) -> None:
    """Those that still run make keys and limits as they always did, without saying it."""
    owners = {"organisation": "org_o", "project": "proj_p", "user": "user_u"}

    def make(connection: sa.Connection, when: str) -> None:
        key = f"key_{when}"
        connection.execute(sa.text(OLDER_KEY), {"id": key, "digest": key.encode()})
        for kind, owner in (owners | {"key": key}).items():
            limit = {"id": f"limit_{when}_{kind}", "kind": kind, "owner": owner}
            connection.execute(sa.text(OLDER_LIMIT), limit)

    database = Database(empty_url)
    with database.write_transaction() as connection:
        upgrade(connection, "0001")
        for statement in BEFORE_SCOPES[:3]:
            connection.execute(sa.text(statement))
        upgrade(connection, "0005")
        make(connection, "before")
    store = open_store(empty_url)
    store.migrate()
    with database.write_transaction() as connection:
        make(connection, "meanwhile")
    database.close()
    other = store.accounts.create_organisation("other", actor="test")
    for within, count in (("org_o", 1), (other.id, 0)):
        accounts, terms = (
            store.accounts.for_organisation(within),
            store.limits_and_prices.for_organisation(within),
        )
        keys = {f"key_{when}" for when in ("before", "meanwhile")[: 2 * count]}
        assert {key.id for key in accounts.list_keys()} == keys
        assert len(terms.list_limits()) == 8 * count
    store.close()


def test_processes_migrate_at_the_same_time(empty_url: str) -> None:
    at_once(2, "migrate", empty_url)
    store = open_store(empty_url)
    assert store.load_snapshot().version == 1
    store.close()


def test_one_of_two_first_runs_makes_the_key(store: Store, url: str) -> None:
    keys = [key for key in at_once(2, "first_run", url) if key]
    assert len(keys) == 1
    assert len(store.load_snapshot().keys) == 1


@pytest.mark.parametrize("kind", ["postgresql"])
def test_connections_that_were_cut_are_replaced(store: Store, url: str) -> None:
    assert store.load_snapshot().version == 1
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    assert store.load_snapshot().version == 1


@pytest.mark.parametrize("kind", ["postgresql"])
def test_a_writer_that_vanished_keeps_nobody_waiting_for_long(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "POSTGRES_IDLE_TIMEOUT_S", 1)
    vanished = Database(url)

    def vanish() -> None:
        with begin_transaction(vanished, "test", time.time):
            store.accounts.create_organisation("acme", actor="test")  # another connection's

    with pytest.raises(StoreError, match="idle-in-transaction timeout"):
        vanish()
    assert [one.name for one in store.load_snapshot().organisations] == ["acme"]
    vanished.close()
