"""How much a database reads: counted by itself, not by a clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from argosy.store import schema
from argosy.store.database import Database


def fill(url: str, accounts: int) -> None:
    """So many organisations, projects, users, keys, limits and prices, all of the first two organisations."""
    numbers = range(accounts)
    named = [{"name": f"n{n}", "created_at": float(n)} for n in numbers]
    role = {"role": "user", "scope": "organisation"}
    share = {"tier": "free", "weight": 1.0, "share_cache": False, "quota_failure_mode": "open"}
    few: dict[str, tuple[str, ...]] = {"networks": (), "flags": ()}
    rows: dict[sa.Table, list[dict[str, Any]]] = {
        schema.organisations: [one | {"id": f"org_{n:06}"} for n, one in enumerate(named)],
        schema.projects: [
            one | share | few | {"id": f"proj_{n:06}", "organisation": f"org_{n % 2:06}"}
            for n, one in enumerate(named)
        ],
        schema.users: [
            role
            | {"id": f"user_{n:06}", "organisation": f"org_{n % 2:06}", "email": f"e{n}"}
            | {"created_at": float(n)}
            for n in numbers
        ],
        schema.keys: [
            one
            | role
            | few
            | {"id": f"key_{n:06}", "project": f"proj_{n % 4:06}", "prefix": "p", "models": ()}
            | {"digest": n.to_bytes(32, "big")}
            for n, one in enumerate(named)
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
def reading() -> Iterator[list[int]]:
    """About how many rows each query reads in its database meanwhile: SQLite tells its steps, some thirty a row."""
    read: list[int] = []
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        read[-1] = steps // 30

    def begin(
        connection: sa.Connection,
        _: object,
        statement: str,
        given: Any,  # noqa: ANN401 - as the driver takes it
        *__: object,
    ) -> None:
        nonlocal steps
        if not statement.startswith("SELECT"):
            return
        driver: Any = connection.connection.driver_connection
        steps = 0
        read.append(0)
        if connection.dialect.name == "sqlite":
            driver.set_progress_handler(step, 1)
        else:
            explained = driver.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", given)
            ((plan,),) = explained.fetchone()
            read[-1] = _scanned(plan["Plan"])

    sa.event.listen(sa.Engine, "before_cursor_execute", begin)
    try:
        yield read
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", begin)


def _scanned(node: dict[str, Any]) -> int:
    below = sum(map(_scanned, node.get("Plans", ())))
    if "Scan" not in node["Node Type"]:
        return below
    read: int = round(node["Actual Rows"]) + node.get("Rows Removed by Filter", 0)
    return below + read
