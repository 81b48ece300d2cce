"""Old days are summed up in PostgreSQL while others use the ledger: nobody waits, nothing is lost or counts twice."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event
from tests.integration.store.conftest import START, at_once
from tests.support.usage_rows import usage_row

from argosy.store import Store, open_store

pytestmark = pytest.mark.parametrize("kind", ["postgresql"])

DAY = 86_400.0


def test_what_comes_meanwhile_waits_for_nobody_and_is_kept(store: Store, url: str) -> None:
    other = open_store(f"{url}&options=-c%20lock_timeout%3D1s")
    coming = {"INSERT": usage_row("before they are summed"), "DELETE": usage_row("before they go")}

    def come(_: Connection, __: Any, statement: str, *___: object) -> None:  # noqa: ANN401 - a cursor
        row = coming.pop(statement.partition(" ")[0], None)
        if row is not None:
            other.ledger.add_records([row])

    store.ledger.add_records([usage_row("first")])
    event.listen(Engine, "before_cursor_execute", come)
    try:
        assert store.ledger.roll_up(START + DAY) == 3
    finally:
        event.remove(Engine, "before_cursor_execute", come)
        other.close()
    assert store.ledger.report()[0].requests == 3
    assert list(store.ledger.iter_records()) == []


def test_it_does_not_wait_for_a_vacuum_nor_do_others_for_both(store: Store, url: str) -> None:
    store.ledger.add_records([usage_row("first")])
    impatient = open_store(f"{url}&options=-c%20lock_timeout%3D1s")
    with psycopg.connect(url) as vacuum:
        vacuum.execute("LOCK TABLE usage IN SHARE UPDATE EXCLUSIVE MODE")  # as VACUUM does
        assert impatient.ledger.roll_up(START + DAY) == 1
    impatient.close()


def test_several_that_forget_the_same_days_forget_each_row_once(store: Store, url: str) -> None:
    store.ledger.add_records(
        [usage_row(f"r{number}", ended_at=START + number) for number in range(900)]
    )
    gone = at_once(3, "forget", url, START + 2 * DAY, 100)
    assert sum(map(int, gone)) == 900
    assert store.ledger.report()[0].requests == 900
