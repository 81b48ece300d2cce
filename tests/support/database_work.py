"""Databases with many accounts, and the number of rows that each query reads.

The database counts the rows itself, so that no clock decides a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from argosy.store import schema
from argosy.store.database import Database

SQLITE_STEPS_PER_ROW = 30
"""Approximate number of virtual machine steps in which SQLite reads a row."""


def fill(url: str, accounts: int) -> None:
    """Insert `accounts` rows into each account table. The first two organisations own all of them."""
    numbers = range(accounts)
    named = [{"name": f"n{n}", "created_at": float(n)} for n in numbers]
    role = {"role": "user", "scope": "organisation"}
    share = {"tier": "free", "weight": 1.0, "share_cache": False, "quota_failure_mode": "open"}
    share |= {"quality": "off"}
    empty: dict[str, tuple[str, ...]] = {"networks": (), "flags": ()}
    rows: dict[sa.Table, list[dict[str, Any]]] = {
        schema.organisations: [row | {"id": f"org_{n:06}"} for n, row in enumerate(named)],
        schema.projects: [
            row | share | empty | {"id": f"proj_{n:06}", "organisation": f"org_{n % 2:06}"}
            for n, row in enumerate(named)
        ],
        schema.users: [
            role
            | {"id": f"user_{n:06}", "organisation": f"org_{n % 2:06}", "email": f"e{n}"}
            | {"created_at": float(n)}
            for n in numbers
        ],
        schema.keys: [
            row
            | role
            | empty
            | {"id": f"key_{n:06}", "project": f"proj_{n % 4:06}", "prefix": "p", "models": ()}
            | {"digest": n.to_bytes(32, "big")}
            for n, row in enumerate(named)
        ],
        schema.limits: [
            {"id": f"limit_{n:06}", "owner_kind": "key", "owner": f"key_{n:06}", "amount": 1}
            | {"unit": "concurrency"}
            for n in numbers
        ],
        schema.prices: [
            {"id": f"price_{n:06}", "model": "m", "since": float(n)}
            | dict.fromkeys(("input", "cached_input", "output"), 1)
            for n in numbers
        ],
    }
    database = Database(url)
    with database.write_transaction() as connection:
        for table, values in rows.items():
            connection.execute(sa.insert(table), values)
        connection.execute(sa.text("ANALYZE"))
    database.close()


@contextmanager
def count_rows_read() -> Iterator[list[int]]:
    """Yield a list that receives the approximate number of rows that each SELECT inside the block reads.

    PostgreSQL reports the rows in its query plans. SQLite reports steps of its virtual machine.
    """
    rows_read: list[int] = []
    steps = 0

    def count_step() -> None:
        nonlocal steps
        steps += 1
        rows_read[-1] = steps // SQLITE_STEPS_PER_ROW

    def begin_query(
        connection: sa.Connection,
        _: object,
        statement: str,
        parameters: Any,  # noqa: ANN401 - a type of the driver
        *__: object,
    ) -> None:
        nonlocal steps
        if not statement.startswith("SELECT"):
            return
        driver: Any = connection.connection.driver_connection
        steps = 0
        rows_read.append(0)
        if connection.dialect.name == "sqlite":
            driver.set_progress_handler(count_step, 1)
        else:
            explained = driver.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters)
            ((plan,),) = explained.fetchone()
            rows_read[-1] = _count_scanned_rows(plan["Plan"])

    sa.event.listen(sa.Engine, "before_cursor_execute", begin_query)
    try:
        yield rows_read
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", begin_query)


def _count_scanned_rows(node: dict[str, Any]) -> int:
    scanned = sum(map(_count_scanned_rows, node.get("Plans", ())))
    if "Scan" not in node["Node Type"]:
        return scanned
    read: int = round(node["Actual Rows"]) + node.get("Rows Removed by Filter", 0)
    return scanned + read
