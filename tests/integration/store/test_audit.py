"""Audit log on both databases: complete, without secrets, and protected against unnoticed changes."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from tests.integration.store.conftest import RULES, START
from tests.support import store_process

from argosy.store import AuditVerification, Price, Store, StoreError
from argosy.store.audit import hash_entry
from argosy.store.database import Database

DROP_PROTECTION = {
    "sqlite": ("DROP TRIGGER audit_no_update", "DROP TRIGGER audit_no_delete"),
    "postgresql": ("DROP TRIGGER audit_append_only ON audit",),
}
INSERT = sa.text(
    "INSERT INTO audit VALUES (:entry, :at, :actor, :action, :subject, :details, :hash, :organisation)"
)


@pytest.fixture
def database(url: str) -> Database:
    """Direct SQL access to the store's database."""
    return Database(url)


def execute(database: Database, *statements: str) -> None:
    with database.write_transaction() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))
    database.close()


def add_five_entries(store: Store) -> None:
    for number in range(5):
        store.accounts.create_organisation(f"o{number}", actor=f"key:k{number}")


def test_every_change_adds_an_entry(store: Store) -> None:
    accounts, terms = store.accounts, store.limits_and_prices
    organisation = accounts.create_organisation("Acme", actor="a")
    project = accounts.create_project(organisation.id, "p", actor="b")
    accounts.change_project(project.id, tier="free", weight=2, actor="c")
    user = accounts.create_user(organisation.id, "u@x.y", actor="d")
    accounts.change_user(user.id, role="viewer", actor="d")
    key, _ = accounts.create_key(project.id, "k", actor="e")
    new, _ = accounts.rotate_key(key.id, 5, actor="f")
    accounts.revoke_key(new.id, actor="g")
    limit = terms.set_limit("project", project.id, "concurrency", 3, actor="h")
    terms.set_limit("project", project.id, "concurrency", 4, actor="h")
    terms.delete_limit(limit.id, actor="h")
    price = terms.set_price(Price(model="m", input=1, cached_input=1, output=1), actor="i")
    accounts.archive_organisation(organisation.id, actor="j")
    entries = store.audit_log.list_entries()[::-1]
    assert [(entry.actor, entry.action, entry.subject) for entry in entries] == [
        ("a", "organisation.create", organisation.id),
        ("b", "project.create", project.id),
        ("c", "project.change", project.id),
        ("d", "user.create", user.id),
        ("d", "user.change", user.id),
        ("e", "key.create", key.id),
        ("f", "key.rotate", key.id),
        ("f", "key.create", new.id),
        ("g", "key.revoke", new.id),
        ("h", "limit.create", limit.id),
        ("h", "limit.change", limit.id),
        ("h", "limit.delete", limit.id),
        ("i", "price.create", price.id),
        ("j", "project.archive", project.id),
        ("j", "user.disable", user.id),
        ("j", "organisation.archive", organisation.id),
    ]
    assert {entry.at for entry in entries} == {START}
    assert entries[2].details == {"tier": ["standard", "free"], "weight": [1.0, 2.0]}
    assert entries[6].details == {"expires_at": [None, START + 5], "replaced_by": [None, new.id]}
    assert entries[9].details["amount"] == 3
    assert store.audit_log.verify() == AuditVerification(entries=16)
    assert store.audit_log.list_entries(limit=2) == entries[:-3:-1]
    assert store.audit_log.list_entries(before=4) == entries[2::-1]
    assert store.audit_log.list_entries(subject=new.id) == entries[8:6:-1]
    own = {entry.subject for entry in entries if entry.organisation == organisation.id}
    assert own == {entry.subject for entry in entries} - {price.id}
    other = accounts.create_organisation("Other", actor="k")
    scoped = store.audit_log.for_organisation(organisation.id).list_entries()
    assert scoped == [entry for entry in entries[::-1] if entry.subject != price.id]
    assert store.audit_log.for_organisation(other.id).list_entries(subject=project.id) == []


@RULES
def test_entries_contain_no_secret(store: Store, database: Database) -> None:
    created = store.accounts.bootstrap(actor="serve")
    assert created is not None
    _, plain = store.accounts.rotate_key(created[0].id, 5, actor="me")
    with database.read_transaction() as connection:
        stored = repr(connection.execute(sa.text("SELECT * FROM audit")).all())
    database.close()
    for key in (created[1], plain):
        assert key.split("-", 3)[3] not in stored
    assert "digest" not in stored


def test_database_rejects_changes_of_entries(store: Store, database: Database) -> None:
    add_five_entries(store)
    for statement in ("UPDATE audit SET actor = 'x'", "DELETE FROM audit"):
        with pytest.raises(ValueError, match="append-only"):
            execute(database, statement)
    database.close()
    assert store.audit_log.verify() == AuditVerification(entries=5)


@RULES
@pytest.mark.parametrize(
    ("statement", "broken", "problem"),
    [
        ("UPDATE audit SET actor = 'x' WHERE entry = 3", 3, "altered"),
        ("UPDATE audit SET at = at + 1 WHERE entry = 2", 2, "altered"),
        ("UPDATE audit SET details = '{}' WHERE entry = 5", 5, "altered"),
        ("UPDATE audit SET organisation = 'x' WHERE entry = 3", 3, "altered"),
        ("UPDATE audit SET organisation = NULL WHERE entry = 3", 3, "altered"),
        ("DELETE FROM audit WHERE entry = 1", 1, "missing"),
        ("DELETE FROM audit WHERE entry = 4", 4, "missing"),
        ("DELETE FROM audit WHERE entry = 5", 5, "missing"),
        ("DELETE FROM audit", 1, "missing"),
        (
            "INSERT INTO audit SELECT 6, at, actor, action, subject, details, hash, NULL FROM audit WHERE entry = 5",
            6,
            "altered",
        ),
    ],
)
def test_verification_finds_the_tampered_entry(
    store: Store, database: Database, database_kind: str, statement: str, broken: int, problem: str
) -> None:
    add_five_entries(store)
    execute(database, *DROP_PROTECTION[database_kind], statement)
    assert store.audit_log.verify() == AuditVerification(
        entries=broken - 1, broken=broken, problem=problem
    )


@RULES
@pytest.mark.parametrize("details", ["not JSON", "[1]", ""])
def test_unreadable_entry_is_reported_with_a_remedy(
    store: Store, database: Database, database_kind: str, details: str
) -> None:
    add_five_entries(store)
    execute(
        database,
        *DROP_PROTECTION[database_kind],
        f"UPDATE audit SET details = '{details}' WHERE entry = 3",  # noqa: S608 - constants
    )
    with pytest.raises(StoreError, match=r"Entry 3 .*was altered.* `argosy audit"):
        store.audit_log.list_entries()


@RULES
def test_missing_state_row_is_reported(store: Store, database: Database) -> None:
    snapshot = store.load_snapshot()
    execute(database, "DELETE FROM state")
    for call in (store.audit_log.verify, lambda: store.is_current(snapshot), store.load_snapshot):
        with pytest.raises(StoreError, match="lacks its row in the table 'state'"):
            call()


@RULES
def test_verification_finds_a_forged_chain(
    store: Store, database: Database, database_kind: str
) -> None:
    """The stored head fits neither a forged last entry nor an additional one."""
    add_five_entries(store)
    with database.write_transaction() as connection:
        for statement in DROP_PROTECTION[database_kind]:
            connection.execute(sa.text(statement))
        rows = connection.execute(sa.text("SELECT * FROM audit ORDER BY entry")).mappings().all()
        forged = {**rows[4], "actor": "x"}
        forged["hash"] = hash_entry(rows[3]["hash"], forged)
        connection.execute(sa.text("DELETE FROM audit WHERE entry = 5"))
        connection.execute(INSERT, forged)
    assert store.audit_log.verify().broken == 5
    with database.write_transaction() as connection:
        connection.execute(sa.text("DELETE FROM audit WHERE entry = 5"))
        connection.execute(INSERT, dict(rows[4]))
        additional = {**rows[4], "entry": 6}
        additional["hash"] = hash_entry(rows[4]["hash"], additional)
        connection.execute(INSERT, additional)
    database.close()
    assert store.audit_log.verify() == AuditVerification(
        entries=5, broken=6, problem="not written by Argosy"
    )


def test_concurrent_writers_extend_one_chain(
    store: Store, url: str, store_processes: store_process.StoreProcesses
) -> None:
    store_processes.run(store_process.create_organisations, url, 15)
    assert store.audit_log.verify() == AuditVerification(entries=30)
    assert store.load_snapshot().version == 31
    assert len(store.load_snapshot().organisations) == 30
