"""The audit log on both databases: complete, without secrets, and nothing in it can be altered unseen."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from tests.integration.store.conftest import START, at_once

from argosy.store import AuditVerification, Price, Store, StoreError
from argosy.store.database import Database

UNPROTECT = {
    "sqlite": ("DROP TRIGGER audit_no_update", "DROP TRIGGER audit_no_delete"),
    "postgresql": ("DROP TRIGGER audit_append_only ON audit",),
}


@pytest.fixture
def database(url: str) -> Database:
    """The same one, for SQL by hand."""
    return Database(url)


def run(database: Database, *statements: str) -> None:
    with database.write_transaction() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))
    database.close()


def fill(store: Store) -> None:
    """Five entries."""
    for number in range(5):
        store.accounts.create_organisation(f"o{number}", actor=f"key:k{number}")


def test_every_change_is_told(store: Store) -> None:
    accounts = store.accounts
    organisation = accounts.create_organisation("Acme", actor="a")
    project = accounts.create_project(organisation.id, "p", actor="b")
    accounts.change_project(project.id, tier="free", weight=2, actor="c")
    user = accounts.create_user(organisation.id, "u@x.y", actor="d")
    accounts.change_user(user.id, role="viewer", actor="d")
    key, _ = accounts.create_key(project.id, "k", actor="e")
    new, _ = accounts.rotate_key(key.id, 5, actor="f")
    accounts.revoke_key(new.id, actor="g")
    limit = store.limits_and_prices.set_limit("project", project.id, "concurrency", 3, actor="h")
    store.limits_and_prices.set_limit("project", project.id, "concurrency", 4, actor="h")
    store.limits_and_prices.delete_limit(limit.id, actor="h")
    price = store.limits_and_prices.set_price(
        Price(model="m", input=1, cached_input=1, output=1), actor="i"
    )
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
    theirs = {entry.subject for entry in entries if entry.organisation == organisation.id}
    assert theirs == {entry.subject for entry in entries} - {price.id}
    other = accounts.create_organisation("Other", actor="k")
    within = store.audit_log.for_organisation(organisation.id).list_entries()
    assert within == [entry for entry in entries[::-1] if entry.subject != price.id]
    assert store.audit_log.for_organisation(other.id).list_entries(subject=project.id) == []


def test_entries_come_page_by_page_and_by_subject(store: Store) -> None:
    fill(store)
    newest = store.audit_log.list_entries(limit=2)
    assert [entry.entry for entry in newest] == [5, 4]
    assert [entry.entry for entry in store.audit_log.list_entries(before=4)] == [3, 2, 1]
    assert store.audit_log.list_entries(subject=newest[1].subject) == [newest[1]]


def test_no_secret_is_told(store: Store, database: Database) -> None:
    made = store.accounts.bootstrap(actor="serve")
    assert made is not None
    _, plain = store.accounts.rotate_key(made[0].id, 5, actor="me")
    with database.read_transaction() as connection:
        told = repr(connection.execute(sa.text("SELECT * FROM audit")).all())
    database.close()
    for key in (made[1], plain):
        assert key.split("-", 3)[3] not in told
    assert "digest" not in told


@pytest.mark.parametrize("statement", ["UPDATE audit SET actor = 'x'", "DELETE FROM audit"])
def test_the_database_refuses_to_alter_it(store: Store, database: Database, statement: str) -> None:
    fill(store)
    with pytest.raises(ValueError, match="append-only"):
        run(database, statement)
    database.close()
    assert store.audit_log.verify() == AuditVerification(entries=5)


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
def test_tampering_shows(
    store: Store, database: Database, kind: str, statement: str, broken: int, problem: str
) -> None:
    fill(store)
    run(database, *UNPROTECT[kind], statement)
    assert store.audit_log.verify() == AuditVerification(
        entries=broken - 1, broken=broken, problem=problem
    )


@pytest.mark.parametrize("details", ["not JSON", "[1]", ""])
def test_an_entry_that_cannot_be_read_says_what_to_ask(
    store: Store, database: Database, kind: str, details: str
) -> None:
    fill(store)
    run(database, *UNPROTECT[kind])
    with database.write_transaction() as connection:
        update = sa.text("UPDATE audit SET details = :details WHERE entry = 3")
        connection.execute(update, {"details": details})
    with pytest.raises(StoreError, match=r"Entry 3 .*was altered.* `argosy audit"):
        store.audit_log.list_entries()
    known = store.load_snapshot()
    run(database, "DELETE FROM state")
    for used in (store.audit_log.verify, lambda: store.is_current(known), store.load_snapshot):
        with pytest.raises(StoreError, match="lacks its row in the table 'state'"):
            used()


def test_a_chain_that_was_written_anew_shows(store: Store, database: Database, kind: str) -> None:
    """The head that the last change left does not fit, neither to a forged end nor to a longer one."""
    from argosy.store.audit import hash_entry

    fill(store)
    with database.write_transaction() as connection:
        for statement in UNPROTECT[kind]:
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
        more = {**rows[4], "entry": 6}
        more["hash"] = hash_entry(rows[4]["hash"], more)
        connection.execute(INSERT, more)
    database.close()
    assert store.audit_log.verify() == AuditVerification(
        entries=5, broken=6, problem="not written by Argosy"
    )


INSERT = sa.text(
    "INSERT INTO audit VALUES (:entry, :at, :actor, :action, :subject, :details, :hash, :organisation)"
)


def test_writers_in_several_processes_make_one_chain(store: Store, url: str) -> None:
    at_once(3, "change", url, 15)
    assert store.audit_log.verify() == AuditVerification(entries=45)
    assert store.load_snapshot().version == 46
    assert len(store.load_snapshot().organisations) == 45
