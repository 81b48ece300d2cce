"""The directory: read as a whole once, and after that what was changed since, as the audit log tells."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, select, text

from argosy.store import schema
from argosy.store.errors import StoreUnavailableError
from argosy.store.record_tables import find_records, sort_fields
from argosy.store.records import (
    AccountRecord,
    AccountSnapshot,
    Key,
    Limit,
    Organisation,
    Price,
    Project,
    User,
)
from argosy.store.validation import RecordT, record_noun

MAX_INCREMENTAL_CHANGES = 1000
"""After more of them all is read again."""

_TABLES_WITHOUT_PRIMARY_KEY = text(
    """SELECT name, to_regclass(name) IS NOT NULL AS is_there FROM unnest(CAST(:names AS text[])) AS name
    WHERE NOT EXISTS (SELECT FROM pg_index WHERE indrelid = to_regclass(name) AND indisprimary)"""
)
"""Which of these tables of PostgreSQL lack their primary key, or are not there at all."""

_RECORD_TYPES = {
    record_noun(kind): kind for kind in (Organisation, Project, User, Key, Limit, Price)
}


def read_snapshot(
    connection: Connection,
    previous: AccountSnapshot | None,
    *,
    read_at: float,
    expired_before: float,
) -> AccountSnapshot:
    """All accounts, as of one version; `known` is what was read before.

    Revoked keys, and those that have expired before that moment, are left out. Raises StoreAwayError while a backup
    is put back.
    """
    _check_not_restoring(connection)
    state = connection.execute(select(schema.state)).one()
    accounts = _read_incrementally(connection, previous, state) or _read_all(connection)
    return msgspec.structs.replace(
        accounts,
        version=state.version,
        audit_entries=state.audit_entries,
        audit_head=bytes(state.audit_head),
        keys=tuple(
            key
            for key in accounts.keys
            if key.revoked_at is None
            and (key.expires_at is None or key.expires_at > expired_before)
        ),
        read_at=read_at,
    )


def _check_not_restoring(connection: Connection) -> None:
    """Raises StoreAwayError while a backup is put back into PostgreSQL, or once that has ended half way.

    `pg_restore` commits the rows of one table after the other, the state's before the users', and the primary keys
    after all rows. A database without any of the tables is not its doing.
    """
    if connection.dialect.name == "postgresql":
        names = list(schema.metadata.tables)
        unfinished = connection.execute(_TABLES_WITHOUT_PRIMARY_KEY, {"names": names}).all()
        some_are_there = len(unfinished) < len(names) or any(one.is_there for one in unfinished)
        if unfinished and some_are_there:
            raise StoreUnavailableError(
                f"The database {connection.engine.url.database} is being restored, or was restored half way"
                f" ({', '.join(one.name for one in unfinished)} without primary key): wait for pg_restore, or look"
                " what it said."
            )


def _read_all(connection: Connection) -> AccountSnapshot:
    keys = schema.keys.c
    rotated = select(keys.id, keys.replaced_by).where(keys.replaced_by.is_not(None))
    return AccountSnapshot(
        organisations=tuple(find_records(connection, Organisation)),
        projects=tuple(find_records(connection, Project)),
        users=tuple(find_records(connection, User)),
        renamed_at=_read_rename_times(connection),
        keys=tuple(find_records(connection, Key, revoked_at=None)),
        limits=tuple(find_records(connection, Limit)),
        prices=tuple(find_records(connection, Price)),
        successors={row.id: row.replaced_by for row in connection.execute(rotated)},
        has_had_keys=connection.execute(select(keys.id).limit(1)).first() is not None,
    )


def _read_incrementally(
    connection: Connection, previous: AccountSnapshot | None, state: Row[Any]
) -> AccountSnapshot | None:
    """What is `known`, with what has changed since; None where that is not told, or too much."""
    changed = None if previous is None else _read_changed_ids(connection, previous, state)
    if previous is None or changed is None:
        return None

    def merge_changes(
        record_type: type[RecordT], before: tuple[RecordT, ...]
    ) -> tuple[RecordT, ...]:
        if record_type not in changed:
            return before
        kept = [record for record in before if record.id not in changed[record_type]]
        found = find_records(connection, record_type, id=changed[record_type])
        return tuple(sorted([*kept, *found], key=attrgetter(*sort_fields(record_type))))

    keys = merge_changes(Key, previous.keys)
    return AccountSnapshot(
        organisations=merge_changes(Organisation, previous.organisations),
        projects=merge_changes(Project, previous.projects),
        users=merge_changes(User, previous.users),
        renamed_at=previous.renamed_at | _read_rename_times(connection, changed),
        keys=keys,
        limits=merge_changes(Limit, previous.limits),
        prices=merge_changes(Price, previous.prices),
        successors=previous.successors
        | {key.id: key.replaced_by for key in keys if key.replaced_by},
        has_had_keys=previous.has_had_keys or bool(keys),
    )


def _read_rename_times(
    connection: Connection, changed_ids: Mapping[type[AccountRecord], Collection[str]] | None = None
) -> dict[str, float]:
    """When those that have changed, or all, were given other names or emails."""
    named: dict[str, float] = {}
    for kind, table in ((Project, schema.projects), (User, schema.users)):
        query = select(table.c.id, table.c.named_at).where(table.c.named_at.is_not(None))
        if changed_ids is not None:
            query = query.where(table.c.id.in_(changed_ids.get(kind, ())))
        named.update((row.id, row.named_at) for row in connection.execute(query))
    return named


def _read_changed_ids(
    connection: Connection, previous: AccountSnapshot, state: Row[Any]
) -> Mapping[type[AccountRecord], Collection[str]] | None:
    """Ids of what has changed, by kind; None: it is too much, or the log does not go on from there."""
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
    changed: dict[type[AccountRecord], set[str]] = {}
    for entry in entries[1:]:
        kind = _RECORD_TYPES.get(entry.action.partition(".")[0])
        if kind is None:
            return None
        changed.setdefault(kind, set()).add(entry.subject)
    return changed
