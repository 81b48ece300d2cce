"""Migrations on both databases: older data is preserved, and older gateways keep working meanwhile."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from tests.integration.store.conftest import ACTOR, migrate_to_revision, run_concurrently
from tests.support.usage_rows import usage_row

from argosy.store import AuditVerification, Role, Store, StoreError, migrations, open_store
from argosy.store.audit import GENESIS_HASH, hash_entry
from argosy.store.database import Database
from argosy.store.schema import metadata

OLDER_ACCOUNTS = (
    "INSERT INTO organisations (id, name, created_at) VALUES ('org_o', 'o', 1)",
    "INSERT INTO projects VALUES ('proj_p', 'org_o', 'p', 'free', 1, false, 'open', '[]', 1, NULL)",
    "INSERT INTO users VALUES ('user_u', 'org_o', 'u@x.y', 'viewer', NULL, 1, NULL)",
)
OLDER_KEYS = """
    INSERT INTO keys (id, project, name, prefix, digest, role, models, networks, created_at) VALUES
    ('key_a', 'proj_p', 'a', 'a', 'a', 'admin', '[]', '[]', 1),
    ('key_c', 'proj_p', 'c', 'c', 'c', 'caller', '[]', '[]', 1)
"""
OLDER_KEY = """
    INSERT INTO keys (id, project, name, prefix, digest, role, models, networks, created_at, scope, flags) VALUES
    (:id, 'proj_p', :id, 'a', :digest, 'caller', '[]', '[]', 1, 'organisation', '[]')
"""
OLDER_LIMIT = "INSERT INTO limits (id, owner_kind, owner, unit, amount) VALUES (:id, :kind, :owner, 'concurrency', 1)"
OLDER_ROW = """
    INSERT INTO usage (request, organisation, project, key, "user", model, route, started_at, ended_at,
        status, input_tokens, cached_tokens, output_tokens, nano_dollars, day)
    VALUES (:request, 'o', 'p', 'k', 'u', 'm', 'r1', 1, 2, 'completed', 9, 0, 5, 7, 0) ON CONFLICT DO NOTHING
"""
"""Usage record as older gateways write it, with the replica in the column `route`."""
OLDER_DAY = "INSERT INTO usage_days VALUES (3, 'o', 'p', 'k', 'u', 'm', 'r1', 2, 9, 0, 5, 7)"


def test_migrated_tables_match_the_schema(store: Store, url: str) -> None:
    database = Database(url)
    with database.read_transaction() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    database.close()
    store.migrate()
    assert store.load_snapshot().version == 1


def test_roles_without_a_scope_apply_to_the_whole_gateway(empty_url: str) -> None:
    entry = {"entry": 1, "at": 1.0, "actor": "x", "action": "y", "subject": "z", "details": "{}"}
    head = hash_entry(GENESIS_HASH, entry | {"organisation": None})
    insert_entry = (
        "INSERT INTO audit VALUES (:entry, :at, :actor, :action, :subject, :details, :head)"
    )
    database = Database(empty_url)
    with database.write_transaction() as connection:
        migrate_to_revision(connection, "0001")
        for statement in (*OLDER_ACCOUNTS, OLDER_KEYS):
            connection.execute(sa.text(statement))
        connection.execute(sa.text(insert_entry), entry | {"head": head})
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
    store.accounts.create_project("org_o", "q", actor=ACTOR)
    assert store.audit_log.verify() == AuditVerification(entries=2)
    store.close()


def test_roles_and_quota_failure_modes_are_stored_as_earlier_versions_do(
    store: Store, url: str
) -> None:
    accounts = store.accounts
    organisation = accounts.create_organisation("o", actor=ACTOR)
    project = accounts.create_project(
        organisation.id, "p", quota_failure_mode="closed", actor=ACTOR
    )
    user = accounts.create_user(organisation.id, "u@x.y", actor=ACTOR)
    roles: tuple[Role, ...] = ("user", "viewer")
    for role in roles:
        accounts.create_key(project.id, role, role=role, actor=ACTOR)
    database = Database(url)
    with database.read_transaction() as connection:
        modes = connection.execute(sa.text("SELECT when_unsure FROM projects")).all()
        user_roles = connection.execute(sa.text("SELECT role FROM users")).all()
        key_roles = connection.execute(sa.text("SELECT name, role FROM keys ORDER BY name")).all()
    database.close()
    assert [tuple(row) for row in modes] == [("closed",)]
    assert [tuple(row) for row in user_roles] == [("caller",)]
    assert [tuple(row) for row in key_roles] == [("user", "caller"), ("viewer", "viewer")]
    assert (user.role, accounts.get_user(user.id).role) == ("user", "user")
    assert {key.role for key in accounts.list_keys()} == set(roles)
    changed = accounts.change_project(project.id, quota_failure_mode="open", actor=ACTOR)
    assert accounts.get_project(project.id) == changed
    assert accounts.change_user(user.id, role="viewer", actor=ACTOR).role == "viewer"
    assert accounts.change_user(user.id, role="user", actor=ACTOR) == user


def test_usage_of_older_gateways_keeps_its_replica(empty_url: str, database_kind: str) -> None:
    """Older gateways that still run write the replica into the column that now holds the route.

    SQLite rejects their records until they are updated, because a column must not be empty.
    """
    database = Database(empty_url)
    with database.write_transaction() as connection:
        migrate_to_revision(connection, "0003")
        connection.execute(sa.text(OLDER_ROW), {"request": "before"})
        connection.execute(sa.text(OLDER_DAY))
    store = open_store(empty_url)
    store.migrate()
    is_accepted = database_kind == "postgresql"
    rejection = pytest.raises(StoreError, match=r"NOT NULL constraint failed: usage\.replica")
    with (
        contextlib.nullcontext() if is_accepted else rejection,
        database.write_transaction() as connection,
    ):
        connection.execute(sa.text(OLDER_ROW), {"request": "meanwhile"})
    database.close()
    store.ledger.add_records([usage_row("after", asked="next", route="canary", replica="r2")])
    (rows,) = store.ledger.iter_records()
    expected = dict.fromkeys(("before", "meanwhile"), ("m", "", "", "r1"))
    if not is_accepted:
        del expected["meanwhile"]
    expected["after"] = ("m", "next", "canary", "r2")
    stored = {row.request: (row.model, row.asked, row.route, row.replica) for row in rows}
    assert stored == expected
    for _ in range(2):
        report = store.ledger.report(("asked", "route", "replica"))
        assert [(row.asked, row.route, row.replica, row.requests) for row in report] == [
            ("", "", "r1", 3 + is_accepted),
            ("next", "canary", "r2", 1),
        ]
        store.ledger.roll_up(time.time())
    store.close()


def test_keys_and_limits_of_older_gateways_belong_to_their_organisation(empty_url: str) -> None:
    """Older gateways create keys and limits without the column that names the organisation."""
    owners = {"organisation": "org_o", "project": "proj_p", "user": "user_u"}

    def insert_older_records(connection: sa.Connection, suffix: str) -> None:
        key = f"key_{suffix}"
        connection.execute(sa.text(OLDER_KEY), {"id": key, "digest": key.encode()})
        for kind, owner in (owners | {"key": key}).items():
            limit = {"id": f"limit_{suffix}_{kind}", "kind": kind, "owner": owner}
            connection.execute(sa.text(OLDER_LIMIT), limit)

    database = Database(empty_url)
    with database.write_transaction() as connection:
        migrate_to_revision(connection, "0001")
        for statement in OLDER_ACCOUNTS:
            connection.execute(sa.text(statement))
        migrate_to_revision(connection, "0005")
        insert_older_records(connection, "before")
    store = open_store(empty_url)
    store.migrate()
    with database.write_transaction() as connection:
        insert_older_records(connection, "meanwhile")
    database.close()
    other = store.accounts.create_organisation("other", actor=ACTOR)
    for scope, keys, limits in (
        ("org_o", {"key_before", "key_meanwhile"}, 8),
        (other.id, set[str](), 0),
    ):
        accounts = store.accounts.for_organisation(scope)
        assert {key.id for key in accounts.list_keys()} == keys
        assert len(store.limits_and_prices.for_organisation(scope).list_limits()) == limits
    store.close()


def test_processes_migrate_concurrently(empty_url: str) -> None:
    run_concurrently(2, "migrate", empty_url)
    store = open_store(empty_url)
    assert store.load_snapshot().version == 1
    store.close()


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_long_read_delays_the_migration_but_no_older_gateway(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup of an hour must not stop older gateways from writing usage for an hour."""
    monkeypatch.setattr(migrations, "LOCK_TIMEOUT_S", 1)
    monkeypatch.setattr(migrations, "RETRY_INTERVAL_S", 0.1)
    older = Database(f"{empty_url}&options=-c%20lock_timeout%3D20s")
    with older.write_transaction() as connection:
        migrate_to_revision(connection, "0003")
    store = open_store(empty_url)
    waiting = "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND NOT granted"
    with ThreadPoolExecutor() as threads, psycopg.connect(empty_url) as backup:
        backup.execute("SELECT count(*) FROM usage")
        migration = threads.submit(store.migrate)
        while backup.execute(waiting).fetchone() == (0,):
            time.sleep(0.01)
        with older.write_transaction() as connection:
            connection.execute(sa.text(OLDER_ROW), {"request": "meanwhile"})
        assert not migration.done()
        backup.rollback()
        migration.result()
    assert store.ledger.report()[0].requests == 1
    older.close()
    store.close()
