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
from argosy.store.audit import hash_entry
from argosy.store.database import Database
from argosy.store.errors import ConflictError, NotFoundError
from argosy.store.organisation_scope import ORGANISATION_COLUMNS, active_conditions
from argosy.store.records import AccountRecord, Key, Limit, Organisation, Price, Project, User
from argosy.store.validation import (
    MAX_RECORDS_PER_ORGANISATION,
    UNIQUE_FIELDS,
    RecordT,
    is_active,
    record_noun,
    validate_record,
)


class PageRequest(NamedTuple):
    """Which part of a list."""

    after: str | None = None
    """Those that come after the one with this id; None: from the first on."""
    limit: int | None = None
    """At most so many; None: all."""


_TABLES: dict[type[AccountRecord], Table] = {
    Organisation: schema.organisations,
    Project: schema.projects,
    User: schema.users,
    Key: schema.keys,
    Limit: schema.limits,
    Price: schema.prices,
}


ALL_RECORDS = PageRequest()


def sort_fields(record_type: type[AccountRecord]) -> tuple[str, ...]:
    """Fields that lists of such records go by: the oldest come first."""
    return tuple(n for n in ("created_at", "since", "id") if n in record_type.__struct_fields__)


def find_records(
    connection: Connection,
    record_type: type[RecordT],
    organisation_id: str | None = None,
    page: PageRequest = ALL_RECORDS,
    **fields: object,
) -> list[RecordT]:
    """The records whose fields have these values, or one of a set, in order; those of one organisation, or of all.

    Prices are the whole gateway's, and everybody may know them.
    """
    table = _TABLES[record_type]
    places = [table.c[name] for name in sort_fields(record_type)]
    query = select(*(table.c[name] for name in record_type.__struct_fields__))
    if organisation_id is not None and record_type is not Price:
        query = query.where(ORGANISATION_COLUMNS[record_type] == organisation_id)
    for name, value in fields.items():
        column = table.c[name]
        query = query.where(column.in_(value) if isinstance(value, set) else column == value)
    if page.after is not None:
        place = _find_sort_position(connection, record_type, query, page.after)
        query = query.where(tuple_(*places) > place)
    query = query.order_by(*places).limit(page.limit)
    return [record_type(**row._asdict()) for row in connection.execute(query)]


def _find_sort_position(
    connection: Connection, record_type: type[AccountRecord], query: Select[Any], record_id: str
) -> tuple[object, ...]:
    """Where the record with this id stands in the list that `query` gives. Raises ValueError when it is not in it.

    What has been deleted, as limits are, is missed by nobody: their list is in the order of ids.
    """
    table, names = _TABLES[record_type], sort_fields(record_type)
    if (
        names == ("id",)
        and record_id.startswith(f"{record_noun(record_type)}_")
        and record_id.isprintable()
    ):
        return (record_id,)
    columns = [table.c[name] for name in names]
    place = query.with_only_columns(*columns).where(table.c.id == record_id)
    found = connection.execute(place).first() if record_id.isprintable() else None
    if found is None:
        raise ValueError(f"There is no {record_id!r} in this list: take 'last_id' of a part.")
    return tuple(found)


def get_record(
    connection: Connection, record_type: type[RecordT], organisation_id: str | None, record_id: str
) -> RecordT:
    """The record with this id, in one organisation or in any. Raises NotFoundError.

    What cannot be written down is no id, and nothing to ask a database for: PostgreSQL takes no NUL.
    """
    found = (
        find_records(connection, record_type, organisation_id, id=record_id)
        if record_id.isprintable()
        else []
    )
    if not found:
        raise NotFoundError(f"There is no {record_noun(record_type)} with the id {record_id!r}.")
    return found[0]


class AccountTransaction:
    """What one transaction does to the accounts, or to those of the organisation `within`. Made by `changing`."""

    def __init__(
        self,
        connection: Connection,
        actor: str,
        clock: Callable[[], float],
        organisation_id: str | None,
    ) -> None:
        self.connection = connection
        self._actor = actor
        self._organisation_id = organisation_id
        state = connection.execute(select(schema.state).with_for_update()).one()
        self._version: int = state.version
        self._audit_entries: int = state.audit_entries
        self._audit_head: bytes = state.audit_head
        self._initial_audit_entries = self._audit_entries
        self.now = clock()

    def get_record(self, record_type: type[RecordT], record_id: str) -> RecordT:
        """The record with this id. Raises NotFoundError."""
        return get_record(self.connection, record_type, self._organisation_id, record_id)

    def get_active_record(self, record_type: type[RecordT], record_id: str) -> RecordT:
        """The record with this id. Raises NotFoundError, or ConflictError when it has been ended."""
        found = self.get_record(record_type, record_id)
        if not is_active(found, self.now):
            raise ConflictError(
                f"The {record_noun(record_type)} {record_id} has been ended: take another one."
            )
        return found

    def find_records(self, record_type: type[RecordT], **fields: object) -> list[RecordT]:
        """The records whose fields have these values, oldest first."""
        return find_records(
            self.connection, record_type, self._organisation_id, ALL_RECORDS, **fields
        )

    def check_same_organisation(
        self, organisation: str, record_type: type[Project | User], record_id: str | None
    ) -> None:
        """Raises ConflictError for a project or a user of another organisation; None passes."""
        if (
            record_id is not None
            and self.get_active_record(record_type, record_id).organisation != organisation
        ):
            theirs = f"{record_id} belongs to another organisation than {organisation}"
            raise ConflictError(f"{theirs}: name one of its own.")

    def create_record(self, record: RecordT) -> RecordT:
        """Keep something new. Raises ValueError, naming the field that is wrong, or ConflictError."""
        record = validate_record(record)
        self._check_unique(record)
        values = msgspec.structs.asdict(record)
        self.connection.execute(insert(_TABLES[type(record)]).values(values))
        self._append_audit_entry("create", record, _to_audit_fields(record))
        self._check_record_count(record)
        return record

    def update_record(self, record: RecordT, action: str, **fields: object) -> RecordT:
        """The record with other values in the fields that are not UNSET. Raises as `create` does."""
        given = {name: value for name, value in fields.items() if value is not UNSET}
        after = validate_record(msgspec.structs.replace(record, **given))
        changed = {name for name in given if getattr(record, name) != getattr(after, name)}
        if not changed:
            return record
        table = _TABLES[type(record)]
        values = {name: getattr(after, name) for name in changed}
        if changed.intersection(UNIQUE_FIELDS.get(type(record), ())):
            self._check_unique(after)
            if "named_at" in table.c:
                values["named_at"] = self.now
        self.connection.execute(update(table).where(table.c.id == record.id).values(values))
        old, new = _to_audit_fields(record), _to_audit_fields(after)
        self._append_audit_entry(action, record, {name: [old[name], new[name]] for name in changed})
        return after

    def delete_record(self, record: AccountRecord) -> None:
        """Keep it no longer; what it was stays in the audit log."""
        table = _TABLES[type(record)]
        self._append_audit_entry("delete", record, _to_audit_fields(record))
        self.connection.execute(delete(table).where(table.c.id == record.id))

    def save_version(self) -> None:
        """Raise the version and move the head of the audit log, if anything was changed."""
        if self._audit_entries > self._initial_audit_entries:
            self.connection.execute(
                update(schema.state).values(
                    version=self._version + 1,
                    audit_entries=self._audit_entries,
                    audit_head=self._audit_head,
                )
            )

    def _check_unique(self, record: AccountRecord) -> None:
        fields = {name: getattr(record, name) for name in UNIQUE_FIELDS.get(type(record), ())}
        for other in (
            find_records(self.connection, type(record), None, ALL_RECORDS, **fields)
            if fields
            else ()
        ):
            if other.id != record.id and is_active(other, self.now):
                taken = list(fields.values())[-1]
                raise ConflictError(
                    f"Another {record_noun(type(record))} is called {taken!r}, {other.id}: give another name."
                )

    def _check_record_count(self, record: AccountRecord) -> None:
        kind = type(record)
        if kind not in MAX_RECORDS_PER_ORGANISATION:
            return
        most, organisation, table = (
            MAX_RECORDS_PER_ORGANISATION[kind],
            self._find_organisation_id(record),
            _TABLES[kind],
        )
        query = select(func.count()).select_from(table).where(*active_conditions(table, self.now))
        query = query.where(ORGANISATION_COLUMNS[kind] == organisation)
        if self.connection.execute(query).scalar_one() > most:
            has = f"{organisation} has {most} {record_noun(kind)}s, the most that it may have"
            raise ConflictError(f"{has}: end some that are not needed.")

    def _append_audit_entry(
        self, action: str, record: AccountRecord, details: dict[str, Any]
    ) -> None:
        entry = {
            "entry": self._audit_entries + 1,
            "at": self.now,
            "actor": self._actor,
            "action": f"{record_noun(type(record))}.{action}",
            "subject": record.id,
            "details": msgspec.json.encode(details, order="sorted").decode(),
            "organisation": self._find_organisation_id(record),
        }
        self._audit_head = hash_entry(self._audit_head, entry)
        self._audit_entries += 1
        self.connection.execute(insert(schema.audit).values(**entry, hash=self._audit_head))

    def _find_organisation_id(self, record: AccountRecord) -> str | None:
        """Of a record that is in its table. Raises ConflictError when it is out of reach."""
        kind = type(record)
        query = select(ORGANISATION_COLUMNS[kind]).where(_TABLES[kind].c.id == record.id)
        organisation: str | None = self.connection.execute(query).scalar_one()
        if self._organisation_id is not None and organisation != self._organisation_id:
            raise ConflictError(f"This {record_noun(kind)} is not one of {self._organisation_id}.")
        return organisation


@contextmanager
def begin_transaction(
    database: Database, actor: str, clock: Callable[[], float], organisation_id: str | None = None
) -> Iterator[AccountTransaction]:
    """A transaction that changes accounts in the name of `actor`; only one runs at a time, in all processes.

    With `within` it finds and changes nothing but what belongs to that organisation.
    """
    if not actor:
        raise ValueError("A change needs an actor: say who makes it.")
    with database.write_transaction() as connection:
        change = AccountTransaction(connection, actor, clock, organisation_id)
        yield change
        change.save_version()


class RecordTables:
    """Records of every organisation, or `within` one: what `Accounts` and `Terms` have in common.

    Each change is one transaction, with its entries in the audit log and a new version of the directory. A
    NotFoundError says that an id is unknown, a ConflictError that what there is stands in the way, and any other
    ValueError which field is wrong.
    """

    def __init__(
        self, database: Database, clock: Callable[[], float], organisation_id: str | None = None
    ) -> None:
        self._database = database
        self._clock = clock
        self._organisation_id = organisation_id

    def for_organisation(self, organisation_id: str | None) -> Self:
        """Those of one organisation, as if there were no others; None: all.

        Prices are there to be read, and nothing that is not the organisation's can be made or changed.
        """
        return type(self)(self._database, self._clock, organisation_id)

    def _begin_transaction(self, actor: str) -> AbstractContextManager[AccountTransaction]:
        return begin_transaction(self._database, actor, self._clock, self._organisation_id)

    def _get_record(self, record_type: type[RecordT], record_id: str) -> RecordT:
        with self._database.read_transaction() as connection:
            return get_record(connection, record_type, self._organisation_id, record_id)

    def _find_records(
        self, record_type: type[RecordT], page: PageRequest = ALL_RECORDS, **fields: object
    ) -> list[RecordT]:
        """Those whose fields have the values that are given."""
        given = {name: value for name, value in fields.items() if value is not None}
        with self._database.read_transaction() as connection:
            return find_records(connection, record_type, self._organisation_id, page, **given)


def _to_audit_fields(record: AccountRecord) -> dict[str, Any]:
    """Its fields for the audit log. A digest is no secret, but of no use there either."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    return {name: value for name, value in fields.items() if name not in {"id", "digest"}}
