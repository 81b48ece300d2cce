"""All that a store keeps, copied into an empty one: a backup, its return, or a move to another database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Table, delete, func, insert, select

from argosy.store import schema
from argosy.store.database import Database
from argosy.store.errors import ConflictError

COPY_BATCH_ROWS = 1000


def copy_database(source: Database, target: Database) -> int:
    """Copy every row, as of one moment, whoever writes meanwhile; how many. Both have the newest tables.

    All of them are copied or none. Raises ConflictError when the target keeps something already.
    """
    with source.read_transaction() as here, target.write_transaction() as there:
        if not _is_empty(there):
            raise ConflictError(
                f"{target.display_name} keeps something already: name a database that is new, or empty."
            )
        there.execute(delete(schema.state))  # the row that every store begins with
        copied = 0
        for table in schema.metadata.sorted_tables:
            for batch in _read_batches(source, here, table):
                there.execute(insert(table), batch)
                copied += len(batch)
        return copied


def _read_batches(
    source: Database, here: Connection, table: Table
) -> Iterator[list[dict[str, Any]]]:
    """All of a table, batch by batch. What the source raises is not told as if the target had."""
    query = select(table).execution_options(yield_per=COPY_BATCH_ROWS)
    with source.translate_errors(), here.execute(query) as rows:
        for batch in rows.mappings().partitions():
            yield [dict(row) for row in batch]


def _is_empty(connection: Connection) -> bool:
    kept = (schema.audit, schema.usage, schema.usage_days)  # no account is without its entry
    counts = (select(func.count()).select_from(table) for table in kept)
    return not any(connection.execute(count).scalar_one() for count in counts)
