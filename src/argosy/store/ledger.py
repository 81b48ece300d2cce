"""The ledger: what every request used. Rows are added once, summed for reports and budgets, and forgotten by day.

A row counts for the moment when its request ended; days are those of UTC.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Select,
    Table,
    and_,
    cast,
    delete,
    func,
    or_,
    select,
    text,
    tuple_,
    union_all,
)
from sqlalchemy.dialects import postgresql, sqlite

from argosy.store import schema
from argosy.store.csv_export import format_csv, format_csv_time
from argosy.store.database import Database
from argosy.store.records import OwnerKind, UsageRecord

ReportGroup = Literal[
    "day", "organisation", "project", "key", "user", "model", "asked", "route", "replica"
]
"""What a report may be by."""

DAY_S = 86_400
INSERT_BATCH_ROWS = 500
PAGE_ROWS = 1000
MAX_TEXT_CHARS = 200
"""Characters of a text."""
ROLL_UP_BATCH_ROWS = 5000
ROLL_UP_PAUSE_S = 0.25
"""After so many rows, others have so long to write: those who wait for an SQLite file look each 0.1 s."""
MAX_REPORT_ROWS = 10_000
"""Of one report."""
MAX_OWNERS_PER_QUERY = 5000
"""Who are asked for at a time."""

_REPORT_GROUPS: tuple[ReportGroup, ...] = get_args(ReportGroup)
_SUMMED_COLUMNS = ("input_tokens", "cached_tokens", "output_tokens", "nano_dollars")
_INSERT_BY_DIALECT: dict[str, Callable[[Table], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}
_COLUMNS = (*UsageRecord.__struct_fields__, "day")
_days = schema.usage_days.c
RequestCount = tuple[ColumnElement[Any], ColumnElement[Any]]
"""Which of them are counted as such: of rows, and of days that have been forgotten."""
_ALL_REQUESTS: RequestCount = (func.count(), func.sum(_days.requests))
_CHARGED_REQUESTS: RequestCount = (
    func.count().filter(
        or_(
            schema.usage.c.output_tokens > 0,
            and_(schema.usage.c.status.not_in(("failed", "refused")), schema.usage.c.replica != ""),
        )
    ),
    func.sum(_days.requests - _days.unanswered),
)
"""Requests that count against limits: not those that got nothing because of us, or never went to a replica."""
_COLUMN_NAMES = ", ".join(f'"{name}"' for name in _COLUMNS)
_INSERT_SQL = {
    dialect: f"INSERT INTO usage ({_COLUMN_NAMES}) VALUES ({', '.join([mark] * len(_COLUMNS))}) "  # noqa: S608
    "ON CONFLICT (request) DO NOTHING"
    for dialect, mark in (("sqlite", "?"), ("postgresql", "%s"))
}
"""Written out: SQLAlchemy would take as long for the parameters of a row as SQLite for the row.

Named, the conflict needs the primary key, which a table has not had back while a backup is put back: rows that came
before those of the backup could be lost.
"""


class UsageFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rows count: all, as far as nothing is given."""

    since: float | None = None
    """Ended at this moment or later; seconds since the epoch."""
    until: float | None = None
    """Ended before."""
    organisation: str | None = None
    """Ids, and below names, as in UsageRow."""
    project: str | None = None
    key: str | None = None
    user: str | None = None
    model: str | None = None
    asked: str | None = None
    route: str | None = None
    replica: str | None = None


class UsageTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What some requests used together."""

    requests: int = 0
    input_tokens: int = 0
    """Cached ones included."""
    cached_tokens: int = 0
    output_tokens: int = 0
    nano_dollars: int = 0


class UsageReportRow(UsageTotals, frozen=True, kw_only=True):
    """The sum of one group. What the report is not by is None."""

    day: str | None = None
    """As in 2026-11-21."""
    organisation: str | None = None
    project: str | None = None
    key: str | None = None
    user: str | None = None
    model: str | None = None
    asked: str | None = None
    route: str | None = None
    replica: str | None = None


ALL_USAGE = UsageFilter()


def parse_report_groups(text: str) -> list[ReportGroup]:
    """What a report is to be by, of names with commas between: each once. Raises ValueError for a name that is none."""
    known: dict[str, ReportGroup] = {group: group for group in _REPORT_GROUPS}
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    unknown = names.keys() - known.keys()
    if unknown:
        raise ValueError(f"A report is by {', '.join(_REPORT_GROUPS)}; not by {min(unknown)!r}.")
    return [known[name] for name in names]


class Ledger:
    """Adds, sums and forgets rows."""

    def __init__(self, database: Database, organisation_id: str | None = None) -> None:
        self._database = database
        self._organisation_id = organisation_id

    def for_organisation(self, organisation_id: str | None) -> Ledger:
        """The same, telling the rows of one organisation as if there were no others; None: all."""
        return Ledger(self._database, organisation_id)

    def add_records(self, records: Sequence[UsageRecord]) -> int:
        """Keep the rows whose request is not known yet, and return how many they were.

        Rows may be offered again, by several processes at a time; each counts once, until its day is forgotten.
        """
        new = 0
        for start in range(0, len(records), INSERT_BATCH_ROWS):
            # Sorted, so that two processes with the same rows wait for each other, not crosswise.
            batch = sorted(records[start : start + INSERT_BATCH_ROWS], key=lambda row: row.request)
            with self._database.write_transaction() as connection:
                done = connection.exec_driver_sql(
                    _INSERT_SQL[connection.dialect.name],
                    [_to_insert_values(row) for row in batch],
                    execution_options={"preserve_rowcount": True},
                )
                new += done.rowcount
        return new

    def report(
        self, group_by: Sequence[ReportGroup] = (), where: UsageFilter = ALL_USAGE
    ) -> list[UsageReportRow]:
        """Sums by group, in the order of the groups; without groups, one row. Raises ValueError for too many rows.

        Of a day that has been forgotten only the whole is known: it counts if it begins in the time asked for.
        """
        rows = self._query_report(group_by, where, _ALL_REQUESTS)
        if len(rows) > MAX_REPORT_ROWS:
            remedy = "Ask for less time, or by less; or for the ledger's own rows, as CSV."
            raise ValueError(f"The report has more than {MAX_REPORT_ROWS} rows. {remedy}")
        return rows

    def _query_report(
        self,
        groups: Sequence[ReportGroup],
        where: UsageFilter,
        request_count: RequestCount,
        owners: Sequence[str] | None = None,
    ) -> list[UsageReportRow]:
        """The same, however many, of these of the first group; `requests` says which rows are counted as such."""

        def owner_conditions(table: Table) -> list[ColumnElement[bool]]:
            some = [] if owners is None else [table.c[groups[0]].in_(owners)]
            return some + self._owner_conditions(table, where)

        both = union_all(
            _select_sums(
                schema.usage,
                request_count[0],
                groups,
                _ended_at_conditions(where) + owner_conditions(schema.usage),
            ),
            _select_sums(
                schema.usage_days,
                request_count[1],
                groups,
                _day_conditions(where) + owner_conditions(schema.usage_days),
            ),
        ).subquery()
        columns = [both.c[name] for name in groups]
        sums = [
            cast(func.coalesce(func.sum(both.c[name]), 0), BigInteger).label(name)
            for name in ("requests", *_SUMMED_COLUMNS)
        ]
        query = select(*columns, *sums).group_by(*columns).order_by(*columns)
        if owners is None:
            query = query.limit(MAX_REPORT_ROWS + 1)
        with self._database.read_transaction() as connection:
            return [_to_report_row(row._asdict()) for row in connection.execute(query)]

    def sum_by_owner(
        self, owner_kind: OwnerKind, owners: Collection[str], since: float
    ) -> dict[str, list[UsageReportRow]]:
        """What each of the owners with these ids used since a moment, as limits count it: rows for each model.

        Who used nothing is left out. A key used also what those did that it was rotated from. A request for which
        nothing was done is none.
        """
        lines = (
            self._find_rotated_keys(owners, since)
            if owner_kind == "key"
            else {one: [one] for one in owners}
        )
        heirs: dict[str, list[str]] = {}
        for owner, line in lines.items():
            for one in line:
                heirs.setdefault(one, []).append(owner)
        found: dict[str, list[UsageReportRow]] = {}
        ids, where = list(heirs), UsageFilter(since=since)
        for start in range(0, len(ids), MAX_OWNERS_PER_QUERY):
            among = ids[start : start + MAX_OWNERS_PER_QUERY]
            for row in self._query_report((owner_kind, "model"), where, _CHARGED_REQUESTS, among):
                for owner in heirs[getattr(row, owner_kind)]:
                    found.setdefault(owner, []).append(row)
        return found

    def iter_records(self, where: UsageFilter = ALL_USAGE) -> Iterator[list[UsageRecord]]:
        """The rows themselves, by the time they ended, page by page; no transaction is open in between."""
        table = schema.usage
        columns = [table.c[name] for name in UsageRecord.__struct_fields__]
        query = select(*columns).where(*self._owner_conditions(table, where))
        query = query.order_by(table.c.ended_at, table.c.request).limit(PAGE_ROWS)
        page, after = query.where(*_ended_at_conditions(where)), None
        # Beside where a page begins, SQLite would go by this, over all rows since then for each page.
        where = msgspec.structs.replace(where, since=None)
        while True:
            with self._database.read_transaction() as connection:
                rows = [UsageRecord(**row._asdict()) for row in connection.execute(page)]
            if rows:
                yield rows
            if len(rows) < PAGE_ROWS:
                return
            after = (rows[-1].ended_at, rows[-1].request)
            page = query.where(
                *_ended_at_conditions(where), tuple_(table.c.ended_at, table.c.request) > after
            )

    def export_csv(self, where: UsageFilter = ALL_USAGE) -> Iterator[str]:
        """The rows as CSV text, a piece at a time: a line of names, then the fields of each UsageRow.

        Moments are in ISO 8601.
        """
        yield format_csv([UsageRecord.__struct_fields__])
        for page in self.iter_records(where):
            yield format_csv(map(_to_csv_row, page))

    def export_report_csv(
        self, group_by: Sequence[ReportGroup], where: UsageFilter = ALL_USAGE
    ) -> str:
        """A report as CSV text: a line of names, then one for each group. Raises ValueError as `report` does."""
        names = (*group_by, *UsageTotals.__struct_fields__)
        rows = self.report(group_by, where)
        return format_csv([names, *([getattr(row, name) for name in names] for row in rows)])

    def roll_up(self, before: float) -> int:
        """Keep of the days that ended before a moment only the sums, and return how many rows went.

        A row that is offered again after that counts twice: keep more days than a gateway may be cut off.
        """
        kept_from = before // DAY_S * DAY_S
        gone = 0
        while (oldest := self._find_oldest()) is not None and oldest < kept_from:
            if gone:
                time.sleep(ROLL_UP_PAUSE_S)
            gone += self._roll_up_batch(kept_from)
        return gone

    def _find_rotated_keys(self, owners: Collection[str], since: float) -> dict[str, list[str]]:
        """Each of the keys with these ids, and those it was rotated from that still worked at a moment or later."""
        keys = schema.keys.c
        query = select(keys.replaced_by, keys.id)
        query = query.where(keys.replaced_by.is_not(None), keys.expires_at >= since)
        with self._database.read_transaction() as connection:
            before = {row.replaced_by: row.id for row in connection.execute(query)}
        lines = {key: [key] for key in owners}
        for line in lines.values():
            while line[-1] in before:
                line.append(before[line[-1]])
        return lines

    def _owner_conditions(self, table: Table, where: UsageFilter) -> list[ColumnElement[bool]]:
        asked = {name: getattr(where, name) for name in _REPORT_GROUPS if name != "day"}
        owned = [table.c[name] == value for name, value in asked.items() if value is not None]
        if self._organisation_id is not None:
            owned.append(table.c.organisation == self._organisation_id)
        return owned

    def _find_oldest(self) -> float | None:
        with self._database.read_transaction() as connection:
            oldest = select(func.min(schema.usage.c.ended_at))
            ended_at: float | None = connection.execute(oldest).scalar_one()
            return ended_at

    def _roll_up_batch(self, midnight: float) -> int:
        """Forget the first of what ended before; not all at a time, so that nobody has to wait long."""
        rows, days = schema.usage, schema.usage_days
        past = rows.c.ended_at < midnight
        with self._database.write_transaction(
            is_snapshot=True
        ) as connection:  # what comes meanwhile stays
            if connection.dialect.name == "postgresql":
                # Only who forgets waits here: a lock of `usage` would wait for its VACUUM, and who adds rows for both.
                connection.execute(text("LOCK TABLE usage_days IN SHARE ROW EXCLUSIVE MODE"))
            ended = select(rows.c.ended_at).where(past).order_by(rows.c.ended_at)
            last = connection.execute(ended.offset(ROLL_UP_BATCH_ROWS - 1).limit(1)).scalar()
            if last is not None:
                past = rows.c.ended_at <= last
            insert = _INSERT_BY_DIALECT[connection.dialect.name](days)
            sums = _select_sums(rows, func.count(), _REPORT_GROUPS, [past])
            sums = sums.add_columns(func.count() - _CHARGED_REQUESTS[0])
            counted = ("requests", *_SUMMED_COLUMNS, "unanswered")
            connection.execute(
                insert.from_select([*_REPORT_GROUPS, *counted], sums).on_conflict_do_update(
                    index_elements=list(_REPORT_GROUPS),
                    set_={name: days.c[name] + insert.excluded[name] for name in counted},
                )
            )
            return connection.execute(delete(rows).where(past)).rowcount


def _select_sums(
    table: Table,
    request_count: ColumnElement[Any],
    groups: Sequence[ReportGroup],
    where: Sequence[ColumnElement[bool]],
) -> Select[Any]:
    columns = [table.c[name] for name in groups]
    counted = [cast(func.sum(table.c[name]), BigInteger).label(name) for name in _SUMMED_COLUMNS]
    asked = select(*columns, cast(request_count, BigInteger).label("requests"), *counted)
    return asked.where(*where).group_by(*columns)


def _ended_at_conditions(where: UsageFilter) -> list[ColumnElement[bool]]:
    ended_at = schema.usage.c.ended_at
    since = [] if where.since is None else [ended_at >= where.since]
    return since if where.until is None else [*since, ended_at < where.until]


def _day_conditions(where: UsageFilter) -> list[ColumnElement[bool]]:
    """The days that begin within the time asked for."""
    day = schema.usage_days.c.day
    since = [] if where.since is None else [day >= math.ceil(where.since / DAY_S)]
    return since if where.until is None else [*since, day < math.ceil(where.until / DAY_S)]


def _to_csv_row(row: UsageRecord) -> list[object]:
    moments = {
        "started_at": format_csv_time(row.started_at),
        "ended_at": format_csv_time(row.ended_at),
    }
    return [*(msgspec.structs.asdict(row) | moments).values()]


def _to_insert_values(row: UsageRecord) -> tuple[Any, ...]:
    """The row as `_ADD` takes it. One bad text must not keep the others of its batch out for ever."""
    values = (*msgspec.structs.astuple(row), int(row.ended_at // DAY_S))
    texts = [value for value in values if isinstance(value, str)]
    if "".join(texts).isprintable() and max(map(len, texts)) <= MAX_TEXT_CHARS:
        return values
    return tuple(_sanitize_text(value) if isinstance(value, str) else value for value in values)


def _sanitize_text(value: str) -> str:
    """Without what a database refuses: NUL, halves of surrogate pairs, and too much for an index."""
    if value.isprintable() and len(value) <= MAX_TEXT_CHARS:
        return value
    return value.replace("\0", "").encode("utf-8", "replace").decode()[:MAX_TEXT_CHARS]


def _to_report_row(values: dict[str, Any]) -> UsageReportRow:
    if "day" in values:
        values["day"] = datetime.fromtimestamp(values["day"] * DAY_S, UTC).date().isoformat()
    return UsageReportRow(**values)
