"""The directory: read as a whole once, and after that what was changed since, as the audit log tells."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, select, text

from argosy.store import schema
from argosy.store.errors import StoreAwayError
from argosy.store.record_tables import find, order
from argosy.store.records import (
    Directory,
    Key,
    Limit,
    Organisation,
    Price,
    Project,
    Record,
    User,
)
from argosy.store.validation import R, noun

MOST_CHANGES = 1000
"""After more of them all is read again."""

_UNFINISHED = text(
    """SELECT name, to_regclass(name) IS NOT NULL AS is_there FROM unnest(CAST(:names AS text[])) AS name
    WHERE NOT EXISTS (SELECT FROM pg_index WHERE indrelid = to_regclass(name) AND indisprimary)"""
)
"""Which of these tables of PostgreSQL lack their primary key, or are not there at all."""

_KINDS = {noun(kind): kind for kind in (Organisation, Project, User, Key, Limit, Price)}


def read_directory(
    connection: Connection, known: Directory | None, *, read_at: float, expired_before: float
) -> Directory:
    """All accounts, as of one version; `known` is what was read before.

    Revoked keys, and those that have expired before that moment, are left out. Raises StoreAwayError while a backup
    is put back.
    """
    _require_whole(connection)
    state = connection.execute(select(schema.state)).one()
    accounts = _updated(connection, known, state) or _whole(connection)
    return msgspec.structs.replace(
        accounts,
        version=state.version,
        entries=state.audit_entries,
        seal=bytes(state.audit_head),
        keys=tuple(
            key
            for key in accounts.keys
            if key.revoked_at is None
            and (key.expires_at is None or key.expires_at > expired_before)
        ),
        read_at=read_at,
    )


def _require_whole(connection: Connection) -> None:
    """Raises StoreAwayError while a backup is put back into PostgreSQL, or once that has ended half way.

    `pg_restore` commits the rows of one table after the other, the state's before the users', and the primary keys
    after all rows. A database without any of the tables is not its doing.
    """
    if connection.dialect.name == "postgresql":
        names = list(schema.metadata.tables)
        unfinished = connection.execute(_UNFINISHED, {"names": names}).all()
        some_are_there = len(unfinished) < len(names) or any(one.is_there for one in unfinished)
        if unfinished and some_are_there:
            raise StoreAwayError(
                f"The database {connection.engine.url.database} is being restored, or was restored half way"
                f" ({', '.join(one.name for one in unfinished)} without primary key): wait for pg_restore, or look"
                " what it said."
            )


def _whole(connection: Connection) -> Directory:
    keys = schema.keys.c
    rotated = select(keys.id, keys.replaced_by).where(keys.replaced_by.is_not(None))
    return Directory(
        organisations=tuple(find(connection, Organisation)),
        projects=tuple(find(connection, Project)),
        users=tuple(find(connection, User)),
        named=_named(connection),
        keys=tuple(find(connection, Key, revoked_at=None)),
        limits=tuple(find(connection, Limit)),
        prices=tuple(find(connection, Price)),
        heirs={row.id: row.replaced_by for row in connection.execute(rotated)},
        had_keys=connection.execute(select(keys.id).limit(1)).first() is not None,
    )


def _updated(connection: Connection, known: Directory | None, state: Row[Any]) -> Directory | None:
    """What is `known`, with what has changed since; None where that is not told, or too much."""
    changed = None if known is None else _changed(connection, known, state)
    if known is None or changed is None:
        return None

    def now(kind: type[R], before: tuple[R, ...]) -> tuple[R, ...]:
        if kind not in changed:
            return before
        kept = [record for record in before if record.id not in changed[kind]]
        found = find(connection, kind, id=changed[kind])
        return tuple(sorted([*kept, *found], key=attrgetter(*order(kind))))

    keys = now(Key, known.keys)
    return Directory(
        organisations=now(Organisation, known.organisations),
        projects=now(Project, known.projects),
        users=now(User, known.users),
        named=known.named | _named(connection, changed),
        keys=keys,
        limits=now(Limit, known.limits),
        prices=now(Price, known.prices),
        heirs=known.heirs | {key.id: key.replaced_by for key in keys if key.replaced_by},
        had_keys=known.had_keys or bool(keys),
    )


def _named(
    connection: Connection, changed: Mapping[type[Record], Collection[str]] | None = None
) -> dict[str, float]:
    """When those that have changed, or all, were given other names or emails."""
    named: dict[str, float] = {}
    for kind, table in ((Project, schema.projects), (User, schema.users)):
        query = select(table.c.id, table.c.named_at).where(table.c.named_at.is_not(None))
        if changed is not None:
            query = query.where(table.c.id.in_(changed.get(kind, ())))
        named.update((row.id, row.named_at) for row in connection.execute(query))
    return named


def _changed(
    connection: Connection, known: Directory, state: Row[Any]
) -> Mapping[type[Record], Collection[str]] | None:
    """Ids of what has changed, by kind; None: it is too much, or the log does not go on from there."""
    if not known.entries <= state.audit_entries <= known.entries + MOST_CHANGES:
        return None
    log = schema.audit.c
    query = select(log.entry, log.action, log.subject, log.hash).order_by(log.entry)
    entries = connection.execute(query.where(log.entry >= known.entries)).all()
    if len(entries) != 1 + state.audit_entries - known.entries:
        return None
    if (entries[0].hash, entries[-1].hash) != (known.seal, state.audit_head):
        return None
    changed: dict[type[Record], set[str]] = {}
    for entry in entries[1:]:
        kind = _KINDS.get(entry.action.partition(".")[0])
        if kind is None:
            return None
        changed.setdefault(kind, set()).add(entry.subject)
    return changed
