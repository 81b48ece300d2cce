"""Queries for account records, and transactions that change them together with the audit log and the version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Self, TypeAlias

import msgspec
from msgspec import UNSET
from sqlalchemy import (
    Connection,
    ScalarSelect,
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
from argosy.store.records import (
    AccountRecord,
    Adapter,
    Flag,
    Key,
    Limit,
    Organisation,
    OwnerKind,
    Price,
    Project,
    Prompt,
    QualityRun,
    QualitySample,
    QualitySet,
    ReplicaSetting,
    User,
)
from argosy.store.validation import (
    END_FIELDS,
    MAX_RECORDS_PER_ORGANISATION,
    ORGANISATION_COLUMNS,
    UNIQUE_FIELDS,
    RecordT,
    active_conditions,
    is_active,
    record_noun,
    validate_record,
)


class PageRequest(NamedTuple):
    """Page of a list to read."""

    after: str | None = None
    """Id of the record before the page. None for the first page."""
    limit: int | None = None
    """Maximum number of records. None for all."""


_TABLES: dict[type[AccountRecord], Table] = {
    Organisation: schema.organisations,
    Project: schema.projects,
    User: schema.users,
    Key: schema.keys,
    Limit: schema.limits,
    Price: schema.prices,
    ReplicaSetting: schema.replica_settings,
    Adapter: schema.adapters,
    Prompt: schema.prompts,
    QualitySet: schema.quality_sets,
    QualityRun: schema.quality_runs,
    QualitySample: schema.quality_samples,
    Flag: schema.flags,
}


_OMITTED_FIELDS = {Key: "digest", Prompt: "content", QualityRun: "result"}
"""Fields that the audit log does not have."""

OWNER_TYPES: dict[OwnerKind, type[Organisation | Project | User | Key]] = {
    "organisation": Organisation,
    "project": Project,
    "user": User,
    "key": Key,
}
"""Record types of the owners of limits."""

ALL_RECORDS = PageRequest()


def sort_fields(record_type: type[AccountRecord]) -> tuple[str, ...]:
    """Fields by which lists of a record type are sorted, oldest first."""
    return tuple(
        name for name in ("created_at", "since", "id") if name in record_type.__struct_fields__
    )


def find_records(
    connection: Connection,
    record_type: type[RecordT],
    organisation_id: str | None = None,
    page: PageRequest = ALL_RECORDS,
    **fields: object,
) -> list[RecordT]:
    """Find records of one organisation, or of all for None, in sort order.

    Prices belong to the whole gateway and are visible to every organisation; replica settings are visible to none. A
    set in `fields` matches any of its values. Raises ValueError if the page continues after a record of another list.
    """
    table = _TABLES[record_type]
    sort_columns = [table.c[name] for name in sort_fields(record_type)]
    query = select(*(table.c[name] for name in record_type.__struct_fields__))
    if organisation_id is not None and record_type is not Price:
        query = query.where(ORGANISATION_COLUMNS[record_type] == organisation_id)
    for name, value in fields.items():
        column = table.c[name]
        query = query.where(column.in_(value) if isinstance(value, set) else column == value)
    if page.after is not None:
        position = _find_sort_position(connection, record_type, query, page.after)
        query = query.where(tuple_(*sort_columns) > position)
    query = query.order_by(*sort_columns).limit(page.limit)
    return [record_type(**row._asdict()) for row in connection.execute(query)]


def _find_sort_position(
    connection: Connection, record_type: type[AccountRecord], query: Select[Any], record_id: str
) -> tuple[object, ...]:
    """Return the sort key of the record with this id in the list that `query` selects.

    Lists in the order of ids, such as those of limits, can also continue after a deleted record.
    """
    table, names = _TABLES[record_type], sort_fields(record_type)
    if (
        names == ("id",)
        and record_id.startswith(f"{record_noun(record_type)}_")
        and record_id.isprintable()
    ):
        return (record_id,)
    columns = [table.c[name] for name in names]
    sort_key = query.with_only_columns(*columns).where(table.c.id == record_id)
    found = connection.execute(sort_key).first() if record_id.isprintable() else None
    if found is None:
        raise ValueError(f"There is no {record_id!r} in this list. Use 'last_id' of a page.")
    return tuple(found)


def get_record(
    connection: Connection, record_type: type[RecordT], organisation_id: str | None, record_id: str
) -> RecordT:
    """Return the record with this id, in one organisation or in any, or raise NotFoundError.

    Ids that are not printable are not looked up, because PostgreSQL rejects NUL characters.
    """
    found = (
        find_records(connection, record_type, organisation_id, id=record_id)
        if record_id.isprintable()
        else []
    )
    if not found:
        raise NotFoundError(f"There is no {record_noun(record_type)} with the id {record_id!r}.")
    return found[0]


ChangeCheck: TypeAlias = Callable[
    ["AccountTransaction", AccountRecord | None, AccountRecord | None], None
]
"""Called in the transaction of a change, before a record is written, with the record as it is stored and as it will be
(None if there is none). It raises to refuse the change."""


class AccountTransaction:
    """Changes of accounts in one transaction, optionally restricted to one organisation.

    `begin_transaction` creates instances.
    """

    def __init__(
        self,
        connection: Connection,
        actor: str,
        clock: Callable[[], float],
        organisation_id: str | None = None,
        check: ChangeCheck | None = None,
    ) -> None:
        self.connection = connection
        self._actor = actor
        self._organisation_id = organisation_id
        self._check = check
        state = connection.execute(select(schema.state).with_for_update()).one()
        self._version: int = state.version
        self._audit_entries: int = state.audit_entries
        self._audit_head: bytes = state.audit_head
        self._initial_audit_entries = self._audit_entries
        self.now = clock()

    def get_record(self, record_type: type[RecordT], record_id: str) -> RecordT:
        """Return the record with this id, or raise NotFoundError."""
        return get_record(self.connection, record_type, self._organisation_id, record_id)

    def get_active_record(self, record_type: type[RecordT], record_id: str) -> RecordT:
        """Return the record with this id. Raises NotFoundError, or ConflictError if it has ended."""
        found = self.get_record(record_type, record_id)
        if not is_active(found, self.now):
            raise ConflictError(
                f"The {record_noun(record_type)} {record_id} has ended. Use an active one."
            )
        return found

    def find_records(self, record_type: type[RecordT], **fields: object) -> list[RecordT]:
        """Find records whose fields have these values, oldest first."""
        return find_records(
            self.connection, record_type, self._organisation_id, ALL_RECORDS, **fields
        )

    def check_same_organisation(
        self, organisation: str, record_type: type[Project | User], record_id: str | None
    ) -> None:
        """Raise ConflictError if a project or user belongs to another organisation. None is accepted."""
        if (
            record_id is not None
            and self.get_active_record(record_type, record_id).organisation != organisation
        ):
            problem = f"{record_id} does not belong to the organisation {organisation}"
            raise ConflictError(f"{problem}. Choose a {record_noun(record_type)} of it.")

    def create_record(self, record: RecordT, action: str = "create") -> RecordT:
        """Insert a record. `action` is the verb for the audit log.

        Raises:
            ValueError: A field is invalid. The message names it.
            ConflictError: The name is taken, the organisation has too many records, or the record is out of reach.
        """
        record = validate_record(record)
        self._check_permission(None, record)
        self._check_unique(record)
        values = msgspec.structs.asdict(record)
        if isinstance(record, Key):
            values["organisation"] = _select_organisation(Project, record.project)
        elif isinstance(record, Limit):
            values["organisation"] = _select_organisation(
                OWNER_TYPES[record.owner_kind], record.owner
            )
        self.connection.execute(insert(_TABLES[type(record)]).values(values))
        self._append_record_entry(action, record, _to_audit_fields(record))
        self._check_record_count(record)
        return record

    def update_record(self, record: RecordT, action: str, **fields: object) -> RecordT:
        """Set the fields of a stored record that are not UNSET, and return it. Raises like `create_record`."""
        given = {name: value for name, value in fields.items() if value is not UNSET}
        after = validate_record(msgspec.structs.replace(record, **given))
        self._check_permission(record, after)
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
        self._append_record_entry(
            action, record, {name: [old[name], new[name]] for name in changed if name in old}
        )
        return after

    def end_record(self, record_type: type[RecordT], record_id: str, action: str) -> RecordT:
        """Set the time at which a record ends, unless it has ended. Raises NotFoundError."""
        found = self.get_record(record_type, record_id)
        field = END_FIELDS[record_type]
        return self.update_record(found, action, **{field: getattr(found, field) or self.now})

    def delete_record(self, record: AccountRecord) -> None:
        """Delete a record. The audit log keeps its fields."""
        self._check_permission(record, None)
        table = _TABLES[type(record)]
        self._append_record_entry("delete", record, _to_audit_fields(record))
        self.connection.execute(delete(table).where(table.c.id == record.id))

    def save_version(self) -> None:
        """Increment the version and store the head of the audit log, if this transaction changed anything."""
        if self._audit_entries > self._initial_audit_entries:
            self.connection.execute(
                update(schema.state).values(
                    version=self._version + 1,
                    audit_entries=self._audit_entries,
                    audit_head=self._audit_head,
                )
            )

    def _check_permission(self, before: AccountRecord | None, after: AccountRecord | None) -> None:
        if self._check is not None:
            self._check(self, before, after)

    def _check_unique(self, record: AccountRecord) -> None:
        fields = {name: getattr(record, name) for name in UNIQUE_FIELDS.get(type(record), ())}
        if not fields:
            return
        for other in find_records(self.connection, type(record), None, ALL_RECORDS, **fields):
            if other.id != record.id and is_active(other, self.now):
                taken = list(fields.values())[-1]
                raise ConflictError(
                    f"Another {record_noun(type(record))} is called {taken!r}, {other.id}. Choose another name."
                )

    def _check_record_count(self, record: AccountRecord) -> None:
        record_type = type(record)
        if record_type not in MAX_RECORDS_PER_ORGANISATION:
            return
        max_records, table = MAX_RECORDS_PER_ORGANISATION[record_type], _TABLES[record_type]
        organisation = self._find_organisation_id(record)
        query = select(func.count()).select_from(table).where(*active_conditions(table, self.now))
        query = query.where(ORGANISATION_COLUMNS[record_type] == organisation)
        if self.connection.execute(query).scalar_one() > max_records:
            problem = (
                f"{organisation} has {max_records} {record_noun(record_type)}s, the maximum number"
            )
            raise ConflictError(f"{problem}. End some that are no longer needed.")

    def append_decision(
        self,
        action: str,
        subject: str,
        details: dict[str, Any],
        *,
        organisation: str | None = None,
    ) -> None:
        """Add an audit entry, such as `pool.scale`, about something that is no account record."""
        self._append_audit_entry(action, subject, organisation or self._organisation_id, details)

    def _append_record_entry(
        self, action: str, record: AccountRecord, details: dict[str, Any]
    ) -> None:
        action = f"{record_noun(type(record))}.{action}"
        self._append_audit_entry(action, record.id, self._find_organisation_id(record), details)

    def _append_audit_entry(
        self, action: str, subject: str, organisation: str | None, details: dict[str, Any]
    ) -> None:
        entry = {
            "entry": self._audit_entries + 1,
            "at": self.now,
            "actor": self._actor,
            "action": action,
            "subject": subject,
            "details": msgspec.json.encode(details, order="sorted").decode(),
            "organisation": organisation,
        }
        self._audit_head = hash_entry(self._audit_head, entry)
        self._audit_entries += 1
        self.connection.execute(insert(schema.audit).values(**entry, hash=self._audit_head))

    def _find_organisation_id(self, record: AccountRecord) -> str | None:
        """Return the organisation's id of a stored record. Raises ConflictError if the record is out of reach."""
        record_type = type(record)
        query = select(_select_organisation(record_type, record.id))
        organisation: str | None = self.connection.execute(query).scalar_one()
        if self._organisation_id is not None and organisation != self._organisation_id:
            raise ConflictError(
                f"This {record_noun(record_type)} does not belong to {self._organisation_id}."
            )
        return organisation


@contextmanager
def begin_transaction(
    database: Database,
    actor: str,
    clock: Callable[[], float],
    organisation_id: str | None = None,
    check: ChangeCheck | None = None,
) -> Iterator[AccountTransaction]:
    """Open a transaction that changes accounts. Across all processes only one runs at a time.

    `actor` names who makes the change, for the audit log. With `organisation_id` only records of that organisation are
    visible and can be changed. `check` refuses what the actor may not change.

    Raises:
        ValueError: `actor` is empty.
    """
    if not actor:
        raise ValueError("An account change needs an actor. Give the name of who makes it.")
    with database.write_transaction() as connection:
        transaction = AccountTransaction(connection, actor, clock, organisation_id, check)
        yield transaction
        transaction.save_version()


class RecordTables:
    """Common base of `Accounts` and `LimitsAndPrices`, for the records of all organisations or of one.

    Each change is one transaction, which also adds entries to the audit log and a new version of the account snapshot.
    Changes raise NotFoundError for an unknown id, ConflictError for a conflict with an existing record, and another
    ValueError for an invalid field.
    """

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        organisation_id: str | None = None,
        check: ChangeCheck | None = None,
    ) -> None:
        self._database = database
        self._clock = clock
        self._organisation_id = organisation_id
        self._check = check

    def for_organisation(
        self, organisation_id: str | None, check: ChangeCheck | None = None
    ) -> Self:
        """Return a view restricted to one organisation, or to all for None, whose changes all pass `check`.

        In a restricted view prices can be read, and only records of the organisation can be created or changed.
        """
        return type(self)(self._database, self._clock, organisation_id, check)

    def _begin_transaction(self, actor: str) -> AbstractContextManager[AccountTransaction]:
        return begin_transaction(
            self._database, actor, self._clock, self._organisation_id, self._check
        )

    def _find_owner(
        self, transaction: AccountTransaction, organisation: str | None, project: str | None
    ) -> str | None:
        """Return the id of the organisation of a new record, after a check that the owners exist."""
        organisation = organisation or self._organisation_id
        if project is not None:
            owner = transaction.get_active_record(Project, project).organisation
            organisation = organisation or owner
            transaction.check_same_organisation(organisation, Project, project)
        if organisation is not None:
            transaction.get_active_record(Organisation, organisation)
        return organisation

    def _get_record(self, record_type: type[RecordT], record_id: str) -> RecordT:
        with self._database.read_transaction() as connection:
            return get_record(connection, record_type, self._organisation_id, record_id)

    def _find_records(
        self, record_type: type[RecordT], page: PageRequest = ALL_RECORDS, **fields: object
    ) -> list[RecordT]:
        """Find records whose fields have the given values. A value of None matches any."""
        given = {name: value for name, value in fields.items() if value is not None}
        with self._database.read_transaction() as connection:
            return find_records(connection, record_type, self._organisation_id, page, **given)


def _select_organisation(record_type: type[AccountRecord], record_id: str) -> ScalarSelect[str]:
    table = _TABLES[record_type]
    query = select(ORGANISATION_COLUMNS[record_type]).where(table.c.id == record_id)
    return query.scalar_subquery()


def _to_audit_fields(record: AccountRecord) -> dict[str, Any]:
    """Return the record's fields for the audit log, without its id and the omitted ones."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    omitted = {"id", _OMITTED_FIELDS.get(type(record), "id")}
    return {name: value for name, value in fields.items() if name not in omitted}
