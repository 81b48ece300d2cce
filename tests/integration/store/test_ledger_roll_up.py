"""Roll-up of old days on PostgreSQL beside other writers: no writer waits, and no record is lost or counted twice."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event
from tests.integration.store.conftest import START, StoreProcesses
from tests.support.usage_rows import usage_row

from argosy.store import Store, open_store

pytestmark = pytest.mark.parametrize("database_kind", ["postgresql"])

DAY = 86_400.0


def test_records_added_during_a_roll_up_are_kept_without_waiting(store: Store, url: str) -> None:
    other = open_store(f"{url}&options=-c%20lock_timeout%3D1s")
    late_rows = {"INSERT": usage_row("before the sums"), "DELETE": usage_row("before the removal")}

    def add_late_row(_: Connection, __: Any, statement: str, *___: object) -> None:  # noqa: ANN401 - a cursor
        row = late_rows.pop(statement.partition(" ")[0], None)
        if row is not None:
            other.ledger.add_records([row])

    store.ledger.add_records([usage_row("first")])
    event.listen(Engine, "before_cursor_execute", add_late_row)
    try:
        assert store.ledger.roll_up(START + DAY) == 3
    finally:
        event.remove(Engine, "before_cursor_execute", add_late_row)
        other.close()
    assert store.ledger.report()[0].requests == 3
    assert list(store.ledger.iter_records()) == []


def test_roll_up_does_not_wait_for_a_vacuum(store: Store, url: str) -> None:
    store.ledger.add_records([usage_row("first")])
    impatient = open_store(f"{url}&options=-c%20lock_timeout%3D1s")
    with psycopg.connect(url) as vacuum:
        vacuum.execute("LOCK TABLE usage IN SHARE UPDATE EXCLUSIVE MODE")  # the lock of VACUUM
        assert impatient.ledger.roll_up(START + DAY) == 1
    impatient.close()


def test_concurrent_roll_ups_remove_each_record_once(
    store: Store, url: str, store_processes: StoreProcesses
) -> None:
    rows = [usage_row(f"r{number}", ended_at=START + number) for number in range(400)]
    store.ledger.add_records(rows)
    removed = store_processes.run("roll_up", url, START + 2 * DAY, 50)
    assert sum(removed) == 400
    assert store.ledger.report()[0].requests == 400
