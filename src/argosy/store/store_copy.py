"""Copies a whole store into an empty one, for backups, restores and moves to another database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Table, delete, func, insert, select

from argosy.store import schema
from argosy.store.database import Database
from argosy.store.errors import ConflictError

COPY_BATCH_ROWS = 1000
_PASSING_TABLES = (schema.gateways, schema.console_sessions, schema.replica_logs)
"""Tables that are not copied: running processes with their secrets, people who are signed in, and logs."""


def copy_database(source: Database, target: Database) -> int:
    """Copy all rows in one transaction. Both databases must have the newest tables.

    Reads see one state of the source, unaffected by concurrent writes.

    Returns:
        The number of copied rows.

    Raises:
        ConflictError: The target is not empty.
    """
    with (
        source.read_transaction() as source_connection,
        target.write_transaction() as target_connection,
    ):
        if not _is_empty(target_connection):
            raise ConflictError(
                f"{target.display_name} is not empty. Give a new or empty database."
            )
        target_connection.execute(delete(schema.state))  # creating the table inserted a row
        copied = 0
        for table in schema.metadata.sorted_tables:
            if table in _PASSING_TABLES:
                continue
            for batch in _read_batches(source, source_connection, table):
                target_connection.execute(insert(table), batch)
                copied += len(batch)
        return copied


def _read_batches(
    source: Database, connection: Connection, table: Table
) -> Iterator[list[dict[str, Any]]]:
    """Yield all rows of a table in batches. Errors name the source database, not the target."""
    query = select(table).execution_options(yield_per=COPY_BATCH_ROWS)
    with source.translate_errors(), connection.execute(query) as rows:
        for batch in rows.mappings().partitions():
            yield [dict(row) for row in batch]


def _is_empty(connection: Connection) -> bool:
    # Each account has an audit entry, so these tables suffice.
    tables = (schema.audit, schema.usage, schema.usage_days)
    counts = (select(func.count()).select_from(table) for table in tables)
    return not any(connection.execute(count).scalar_one() for count in counts)
