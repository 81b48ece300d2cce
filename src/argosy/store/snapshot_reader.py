"""Reads account snapshots: all records at first, then only those that changed according to the audit log."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, select, text

from argosy.store import schema
from argosy.store.content_access import CONTENT_READ
from argosy.store.errors import StoreUnavailableError
from argosy.store.record_tables import find_records, sort_fields
from argosy.store.records import (
    AccountRecord,
    AccountSnapshot,
    Adapter,
    Flag,
    Key,
    Limit,
    Organisation,
    Price,
    Project,
    Prompt,
    ReplicaSetting,
    User,
)
from argosy.store.validation import RecordT, record_noun

MAX_INCREMENTAL_CHANGES = 1000
"""Number of changes since the previous snapshot above which all records are read again."""

_TABLES_WITHOUT_PRIMARY_KEY = text(
    """SELECT name, to_regclass(name) IS NOT NULL AS is_there FROM unnest(CAST(:names AS text[])) AS name
    WHERE NOT EXISTS (SELECT FROM pg_index WHERE indrelid = to_regclass(name) AND indisprimary)"""
)
"""Names of the PostgreSQL tables that lack their primary key or do not exist."""

_RECORD_FIELDS: dict[str, type[AccountRecord]] = {
    "organisations": Organisation,
    "projects": Project,
    "users": User,
    "limits": Limit,
    "prices": Price,
    "replica_settings": ReplicaSetting,
    "adapters": Adapter,
    "prompts": Prompt,
    "flags": Flag,
}
"""Types of the records of a snapshot by its fields, besides keys, of which it has not all."""
_RECORD_TYPES: dict[str, type[AccountRecord]] = {
    record_noun(Key): Key,
    **{record_noun(each): each for each in _RECORD_FIELDS.values()},
}


def read_snapshot(
    connection: Connection,
    previous: AccountSnapshot | None,
    *,
    read_at: float,
    expired_before: float,
) -> AccountSnapshot:
    """Read all accounts as of one version, of which a previous snapshot has a part.

    Revoked keys and keys that expired before a time are left out. Raises StoreUnavailableError while a backup is
    restored into the database.
    """
    _check_not_restoring(connection)
    state = connection.execute(select(schema.state)).one()
    snapshot = _read_incrementally(connection, previous, state) or _read_all(connection)
    return msgspec.structs.replace(
        snapshot,
        version=state.version,
        audit_entries=state.audit_entries,
        audit_head=bytes(state.audit_head),
        keys=tuple(
            key
            for key in snapshot.keys
            if key.revoked_at is None
            and (key.expires_at is None or key.expires_at > expired_before)
        ),
        read_at=read_at,
    )


def _check_not_restoring(connection: Connection) -> None:
    """Raise StoreUnavailableError while a backup is restored into PostgreSQL, or if the restore ended early.

    `pg_restore` commits rows table by table, `state` before `users`, and creates primary keys after all rows. A
    database without any of the tables is not being restored.
    """
    if connection.dialect.name == "postgresql":
        names = list(schema.metadata.tables)
        unfinished = connection.execute(_TABLES_WITHOUT_PRIMARY_KEY, {"names": names}).all()
        has_tables = len(unfinished) < len(names) or any(table.is_there for table in unfinished)
        if unfinished and has_tables:
            raise StoreUnavailableError(
                f"The database {connection.engine.url.database} is being restored, or a restore ended early"
                f" (no primary key yet: {', '.join(table.name for table in unfinished)}). Wait for pg_restore, or"
                " check its output."
            )


def _read_all(connection: Connection) -> AccountSnapshot:
    keys = schema.keys.c
    rotated = select(keys.id, keys.replaced_by).where(keys.replaced_by.is_not(None))
    records: dict[str, Any] = {
        name: tuple(find_records(connection, record_type))
        for name, record_type in _RECORD_FIELDS.items()
    }
    return AccountSnapshot(
        **records,
        renamed_at=_read_rename_times(connection),
        keys=tuple(find_records(connection, Key, revoked_at=None)),
        successors={row.id: row.replaced_by for row in connection.execute(rotated)},
        has_had_keys=connection.execute(select(keys.id).limit(1)).first() is not None,
    )


def _read_incrementally(
    connection: Connection, previous: AccountSnapshot | None, state: Row[Any]
) -> AccountSnapshot | None:
    """Update `previous` with the changes since then. None if they are too many or the audit log does not list them."""
    changed_ids = None if previous is None else _read_changed_ids(connection, previous, state)
    if previous is None or changed_ids is None:
        return None

    def merge_changes(
        record_type: type[RecordT], before: tuple[RecordT, ...]
    ) -> tuple[RecordT, ...]:
        if record_type not in changed_ids:
            return before
        unchanged = [record for record in before if record.id not in changed_ids[record_type]]
        changed = find_records(connection, record_type, id=changed_ids[record_type])
        return tuple(sorted([*unchanged, *changed], key=attrgetter(*sort_fields(record_type))))

    records: dict[str, Any] = {
        name: merge_changes(record_type, getattr(previous, name))
        for name, record_type in _RECORD_FIELDS.items()
    }
    keys = merge_changes(Key, previous.keys)
    return AccountSnapshot(
        **records,
        renamed_at=previous.renamed_at | _read_rename_times(connection, changed_ids),
        keys=keys,
        successors=previous.successors
        | {key.id: key.replaced_by for key in keys if key.replaced_by},
        has_had_keys=previous.has_had_keys or bool(keys),
    )


def _read_rename_times(
    connection: Connection, changed_ids: Mapping[type[AccountRecord], Collection[str]] | None = None
) -> dict[str, float]:
    """Return when projects and users, all or those in `changed_ids`, got their current name or email."""
    renamed_at: dict[str, float] = {}
    for record_type, table in ((Project, schema.projects), (User, schema.users)):
        query = select(table.c.id, table.c.named_at).where(table.c.named_at.is_not(None))
        if changed_ids is not None:
            query = query.where(table.c.id.in_(changed_ids.get(record_type, ())))
        renamed_at.update((row.id, row.named_at) for row in connection.execute(query))
    return renamed_at


def _read_changed_ids(
    connection: Connection, previous: AccountSnapshot, state: Row[Any]
) -> Mapping[type[AccountRecord], Collection[str]] | None:
    """Return ids of changed records by type.

    None if there are too many changes, or if the audit log does not continue from the previous snapshot.
    """
    if (
        not previous.audit_entries
        <= state.audit_entries
        <= previous.audit_entries + MAX_INCREMENTAL_CHANGES
    ):
        return None
    log = schema.audit.c
    query = select(log.entry, log.action, log.subject, log.hash).order_by(log.entry)
    entries = connection.execute(query.where(log.entry >= previous.audit_entries)).all()
    if len(entries) != 1 + state.audit_entries - previous.audit_entries:
        return None
    if (entries[0].hash, entries[-1].hash) != (previous.audit_head, state.audit_head):
        return None
    changed_ids: dict[type[AccountRecord], set[str]] = {}
    for entry in entries[1:]:
        if entry.action == CONTENT_READ:
            continue
        record_type = _RECORD_TYPES.get(entry.action.partition(".")[0])
        if record_type is None:
            return None
        changed_ids.setdefault(record_type, set()).add(entry.subject)
    return changed_ids
