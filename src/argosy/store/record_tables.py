"""Records in their tables: finding them, and changing them together with the audit log and the version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Self

import msgspec
from msgspec import UNSET
from sqlalchemy import (
    Connection,
    Select,
    Table,
    delete,
    func,
    insert,
    select,
    tuple_,
    update,
)

from argosy.store import schema
from argosy.store.audit import seal
from argosy.store.database import Database
from argosy.store.errors import ConflictError, NotFoundError
from argosy.store.organisation_scope import ORGANISATION, not_ended
from argosy.store.records import Key, Limit, Organisation, Price, Project, Record, User
from argosy.store.validation import MOST, UNIQUE, R, checked, living, noun


class Part(NamedTuple):
    """Which part of a list."""

    after: str | None = None
    """Those that come after the one with this id; None: from the first on."""
    most: int | None = None
    """At most so many; None: all."""


_TABLES: dict[type[Record], Table] = {
    Organisation: schema.organisations,
    Project: schema.projects,
    User: schema.users,
    Key: schema.keys,
    Limit: schema.limits,
    Price: schema.prices,
}


ALL = Part()


def order(kind: type[Record]) -> tuple[str, ...]:
    """Fields that lists of such records go by: the oldest come first."""
    return tuple(n for n in ("created_at", "since", "id") if n in kind.__struct_fields__)


def find(
    connection: Connection,
    kind: type[R],
    within: str | None = None,
    part: Part = ALL,
    **fields: object,
) -> list[R]:
    """The records whose fields have these values, or one of a set, in order; those of one organisation, or of all.

    Prices are the whole gateway's, and everybody may know them.
    """
    table = _TABLES[kind]
    places = [table.c[name] for name in order(kind)]
    query = select(*(table.c[name] for name in kind.__struct_fields__))
    if within is not None and kind is not Price:
        query = query.where(ORGANISATION[kind] == within)
    for name, value in fields.items():
        column = table.c[name]
        query = query.where(column.in_(value) if isinstance(value, set) else column == value)
    if part.after is not None:
        place = _place(connection, kind, query, part.after)
        query = query.where(tuple_(*places) > place)
    query = query.order_by(*places).limit(part.most)
    return [kind(**row._asdict()) for row in connection.execute(query)]


def _place(
    connection: Connection, kind: type[Record], query: Select[Any], record: str
) -> tuple[object, ...]:
    """Where the record with this id stands in the list that `query` gives. Raises ValueError when it is not in it.

    What has been deleted, as limits are, is missed by nobody: their list is in the order of ids.
    """
    table, names = _TABLES[kind], order(kind)
    if names == ("id",) and record.startswith(f"{noun(kind)}_") and record.isprintable():
        return (record,)
    columns = [table.c[name] for name in names]
    place = query.with_only_columns(*columns).where(table.c.id == record)
    found = connection.execute(place).first() if record.isprintable() else None
    if found is None:
        raise ValueError(f"There is no {record!r} in this list: take 'last_id' of a part.")
    return tuple(found)


def get(connection: Connection, kind: type[R], within: str | None, record: str) -> R:
    """The record with this id, in one organisation or in any. Raises NotFoundError.

    What cannot be written down is no id, and nothing to ask a database for: PostgreSQL takes no NUL.
    """
    found = find(connection, kind, within, id=record) if record.isprintable() else []
    if not found:
        raise NotFoundError(f"There is no {noun(kind)} with the id {record!r}.")
    return found[0]


class Change:
    """What one transaction does to the accounts, or to those of the organisation `within`. Made by `changing`."""

    def __init__(
        self, connection: Connection, actor: str, clock: Callable[[], float], within: str | None
    ) -> None:
        self.connection = connection
        self._actor = actor
        self._within = within
        state = connection.execute(select(schema.state).with_for_update()).one()
        self._version: int = state.version
        self._entries: int = state.audit_entries
        self._head: bytes = state.audit_head
        self._before = self._entries
        self.now = clock()

    def get(self, kind: type[R], record: str) -> R:
        """The record with this id. Raises NotFoundError."""
        return get(self.connection, kind, self._within, record)

    def get_living(self, kind: type[R], record: str) -> R:
        """The record with this id. Raises NotFoundError, or ConflictError when it has been ended."""
        found = self.get(kind, record)
        if not living(found, self.now):
            raise ConflictError(f"The {noun(kind)} {record} has been ended: take another one.")
        return found

    def find(self, kind: type[R], **fields: object) -> list[R]:
        """The records whose fields have these values, oldest first."""
        return find(self.connection, kind, self._within, ALL, **fields)

    def check_organisation(
        self, organisation: str, kind: type[Project | User], record: str | None
    ) -> None:
        """Raises ConflictError for a project or a user of another organisation; None passes."""
        if record is not None and self.get_living(kind, record).organisation != organisation:
            theirs = f"{record} belongs to another organisation than {organisation}"
            raise ConflictError(f"{theirs}: name one of its own.")

    def create(self, record: R) -> R:
        """Keep something new. Raises ValueError, naming the field that is wrong, or ConflictError."""
        record = checked(record)
        self._refuse_second(record)
        values = msgspec.structs.asdict(record)
        self.connection.execute(insert(_TABLES[type(record)]).values(values))
        self._log("create", record, _told(record))
        self._refuse_many(record)
        return record

    def change(self, record: R, action: str, **fields: object) -> R:
        """The record with other values in the fields that are not UNSET. Raises as `create` does."""
        given = {name: value for name, value in fields.items() if value is not UNSET}
        after = checked(msgspec.structs.replace(record, **given))
        changed = {name for name in given if getattr(record, name) != getattr(after, name)}
        if not changed:
            return record
        table = _TABLES[type(record)]
        values = {name: getattr(after, name) for name in changed}
        if changed.intersection(UNIQUE.get(type(record), ())):
            self._refuse_second(after)
            if "named_at" in table.c:
                values["named_at"] = self.now
        self.connection.execute(update(table).where(table.c.id == record.id).values(values))
        old, new = _told(record), _told(after)
        self._log(action, record, {name: [old[name], new[name]] for name in changed})
        return after

    def delete(self, record: Record) -> None:
        """Keep it no longer; what it was stays in the audit log."""
        table = _TABLES[type(record)]
        self._log("delete", record, _told(record))
        self.connection.execute(delete(table).where(table.c.id == record.id))

    def finish(self) -> None:
        """Raise the version and move the head of the audit log, if anything was changed."""
        if self._entries > self._before:
            self.connection.execute(
                update(schema.state).values(
                    version=self._version + 1, audit_entries=self._entries, audit_head=self._head
                )
            )

    def _refuse_second(self, record: Record) -> None:
        fields = {name: getattr(record, name) for name in UNIQUE.get(type(record), ())}
        for other in find(self.connection, type(record), None, ALL, **fields) if fields else ():
            if other.id != record.id and living(other, self.now):
                taken = list(fields.values())[-1]
                raise ConflictError(
                    f"Another {noun(type(record))} is called {taken!r}, {other.id}: give another name."
                )

    def _refuse_many(self, record: Record) -> None:
        kind = type(record)
        if kind not in MOST:
            return
        most, organisation, table = MOST[kind], self._organisation_of(record), _TABLES[kind]
        query = select(func.count()).select_from(table).where(*not_ended(table, self.now))
        query = query.where(ORGANISATION[kind] == organisation)
        if self.connection.execute(query).scalar_one() > most:
            has = f"{organisation} has {most} {noun(kind)}s, the most that it may have"
            raise ConflictError(f"{has}: end some that are not needed.")

    def _log(self, action: str, record: Record, details: dict[str, Any]) -> None:
        entry = {
            "entry": self._entries + 1,
            "at": self.now,
            "actor": self._actor,
            "action": f"{noun(type(record))}.{action}",
            "subject": record.id,
            "details": msgspec.json.encode(details, order="sorted").decode(),
            "organisation": self._organisation_of(record),
        }
        self._head = seal(self._head, entry)
        self._entries += 1
        self.connection.execute(insert(schema.audit).values(**entry, hash=self._head))

    def _organisation_of(self, record: Record) -> str | None:
        """Of a record that is in its table. Raises ConflictError when it is out of reach."""
        kind = type(record)
        query = select(ORGANISATION[kind]).where(_TABLES[kind].c.id == record.id)
        organisation: str | None = self.connection.execute(query).scalar_one()
        if self._within is not None and organisation != self._within:
            raise ConflictError(f"This {noun(kind)} is not one of {self._within}.")
        return organisation


@contextmanager
def changing(
    database: Database, actor: str, clock: Callable[[], float], within: str | None = None
) -> Iterator[Change]:
    """A transaction that changes accounts in the name of `actor`; only one runs at a time, in all processes.

    With `within` it finds and changes nothing but what belongs to that organisation.
    """
    if not actor:
        raise ValueError("A change needs an actor: say who makes it.")
    with database.write() as connection:
        change = Change(connection, actor, clock, within)
        yield change
        change.finish()


class Records:
    """Records of every organisation, or `within` one: what `Accounts` and `Terms` have in common.

    Each change is one transaction, with its entries in the audit log and a new version of the directory. A
    NotFoundError says that an id is unknown, a ConflictError that what there is stands in the way, and any other
    ValueError which field is wrong.
    """

    def __init__(
        self, database: Database, clock: Callable[[], float], organisation: str | None = None
    ) -> None:
        self._database = database
        self._clock = clock
        self._organisation = organisation

    def within(self, organisation: str | None) -> Self:
        """Those of one organisation, as if there were no others; None: all.

        Prices are there to be read, and nothing that is not the organisation's can be made or changed.
        """
        return type(self)(self._database, self._clock, organisation)

    def _change(self, actor: str) -> AbstractContextManager[Change]:
        return changing(self._database, actor, self._clock, self._organisation)

    def _get(self, kind: type[R], record: str) -> R:
        with self._database.read() as connection:
            return get(connection, kind, self._organisation, record)

    def _find(self, kind: type[R], part: Part = ALL, **fields: object) -> list[R]:
        """Those whose fields have the values that are given."""
        given = {name: value for name, value in fields.items() if value is not None}
        with self._database.read() as connection:
            return find(connection, kind, self._organisation, part, **given)


def _told(record: Record) -> dict[str, Any]:
    """Its fields for the audit log. A digest is no secret, but of no use there either."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    return {name: value for name, value in fields.items() if name not in {"id", "digest"}}
