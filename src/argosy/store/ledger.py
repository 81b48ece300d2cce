"""The ledger of usage: records are added once, summed for reports and limits, and rolled up by day.

A record counts at the time when its request ended. Days are UTC days.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Row,
    Select,
    Subquery,
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
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from argosy.policy import (
    MAX_OUTLIERS_PER_DAY,
    OUTLIER_FACTOR,
    OUTLIER_FLOOR_NANO_DOLLARS,
    OUTLIER_MIN_REQUESTS,
    OUTLIER_PERIOD_S,
)
from argosy.protocol import TokenUsage
from argosy.store import schema
from argosy.store.csv_export import format_csv, format_csv_time
from argosy.store.database import Database, conflict_aware_insert
from argosy.store.records import OwnerKind, UsageRecord, UsageStatus

ReportGroup = Literal[
    "day", "organisation", "project", "key", "user", "model", "asked", "route", "replica"
]
"""Field by which a usage report can be grouped."""

DAY_S = 86_400
INSERT_BATCH_ROWS = 500
PAGE_ROWS = 1000
MAX_TEXT_CHARS = 200
"""Maximum number of characters stored of each text."""
ROLL_UP_BATCH_ROWS = 5000
ROLL_UP_PAUSE_S = 0.25
"""Pause after each `ROLL_UP_BATCH_ROWS` rows, so that others can write. SQLite writers that wait poll every 0.1 s."""
MAX_REPORT_ROWS = 10_000
"""Maximum number of rows of one report."""
REPORT_PAGE_ROWS = 2000
"""Rows that `Ledger.iter_report` holds in memory."""
MAX_SCANNED_ROWS = 100_000
"""Maximum number of records that a page of a list without an index for its filter is searched for."""
MAX_OWNERS_PER_QUERY = 5000
"""Maximum number of owner ids in one query."""

_RECORD_COLUMNS = tuple(schema.usage.c[name] for name in UsageRecord.__struct_fields__)
_UNINDEXED_FIELDS = ("model", "asked", "route", "replica")
_REPORT_GROUPS: tuple[ReportGroup, ...] = get_args(ReportGroup)
_SUMMED_COLUMNS = ("input_tokens", "cached_tokens", "output_tokens", "nano_dollars")
_COLUMNS = (*UsageRecord.__struct_fields__, "day")
_days = schema.usage_days.c
RequestCount = tuple[ColumnElement[Any], ColumnElement[Any]]
"""Aggregates that count requests: over single records, and over daily sums."""
_ALL_REQUESTS: RequestCount = (func.count(), func.sum(_days.requests))
_IS_CHARGED = or_(
    schema.usage.c.output_tokens > 0,
    and_(schema.usage.c.status.not_in(("failed", "refused")), schema.usage.c.replica != ""),
)
"""Requests without output count only if they were sent to a replica and neither failed nor were refused."""
_IS_ONLINE = schema.usage.c.service_tier != "batch"
_LIMITED_REQUESTS: RequestCount = (
    func.count().filter(_IS_CHARGED, _IS_ONLINE),
    func.sum(_days.requests - _days.unanswered),
)
"""Requests that count against limits. Lines of batches only use budgets, but daily sums have them too."""
_COLUMN_NAMES = ", ".join(f'"{name}"' for name in _COLUMNS)
_INSERT_SQL = {
    dialect: f"INSERT INTO usage ({_COLUMN_NAMES}) VALUES ({', '.join([mark] * len(_COLUMNS))}) "  # noqa: S608
    "ON CONFLICT (request) DO NOTHING"
    for dialect, mark in (("sqlite", "?"), ("postgresql", "%s"))
}
"""Insert statements by dialect.

They are plain SQL because SQLAlchemy would need as much time for the parameters of a row as SQLite for the row. The
conflict target is named so that the insert fails while a restore has not yet created the primary key. Otherwise rows
added before those of the backup could be lost.
"""


class UsageFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter of usage records. A field that is None matches all records."""

    since: float | None = None
    """Only requests that ended at this time or later, in seconds since the epoch."""
    until: float | None = None
    """Only requests that ended before this time."""
    organisation: str | None = None
    """Id of an organisation. The fields below are ids and names as in `UsageRecord`."""
    project: str | None = None
    key: str | None = None
    user: str | None = None
    model: str | None = None
    asked: str | None = None
    route: str | None = None
    replica: str | None = None


class LatestRecords(NamedTuple):
    """Page of single records, latest end first."""

    records: list[UsageRecord]
    before: tuple[float, str] | None
    """End time and id of the record after which the next page begins. None if there is none."""


class UsageTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Total usage of a group of requests."""

    requests: int = 0
    input_tokens: int = 0
    """Prompt tokens, including cached ones."""
    cached_tokens: int = 0
    output_tokens: int = 0
    nano_dollars: int = 0


class UsageReportRow(UsageTotals, frozen=True, kw_only=True):
    """Total usage of one group of a report. Fields that the report is not grouped by are None."""

    day: str | None = None
    """ISO 8601 date, such as 2026-11-21."""
    organisation: str | None = None
    project: str | None = None
    key: str | None = None
    user: str | None = None
    model: str | None = None
    asked: str | None = None
    route: str | None = None
    replica: str | None = None


class ColdPart(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the archive with single records of one day, which the ledger has as sums only."""

    key: str
    """Path in the archive."""
    organisation: str
    day: int
    """Days since the epoch."""
    rows: int
    nano_dollars: int
    """Cost of the records."""
    size_bytes: int
    sha256: str


RecordOrder = Literal[
    "duration_s", "input_tokens", "cached_tokens", "output_tokens", "nano_dollars"
]
"""Quantity by which single records can be sorted."""


class SortedRecords(NamedTuple):
    """Page of single records that are sorted by a quantity."""

    records: list[UsageRecord]
    has_more: bool
    searched_from: float | None
    """End time of the oldest record that was sorted. None if all were."""


ALL_USAGE = UsageFilter()


def insert_records(connection: Connection, records: Sequence[UsageRecord]) -> int:
    """Insert records as `Ledger.add_records`, in the caller's transaction."""
    if not records:
        return 0
    # Sorted, so that two processes that add the same records cannot deadlock.
    result = connection.exec_driver_sql(
        _INSERT_SQL[connection.dialect.name],
        [_to_insert_values(record) for record in sorted(records, key=lambda each: each.request)],
        execution_options={"preserve_rowcount": True},
    )
    return result.rowcount


def parse_report_groups(text: str) -> list[ReportGroup]:
    """Parse comma-separated names of report groups, dropping duplicates.

    Raises:
        ValueError: A name is not a `ReportGroup`.
    """
    known: dict[str, ReportGroup] = {group: group for group in _REPORT_GROUPS}
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    unknown = names.keys() - known.keys()
    if unknown:
        raise ValueError(
            f"A report can be grouped by {', '.join(_REPORT_GROUPS)}, not by {min(unknown)!r}."
        )
    return [known[name] for name in names]


class Ledger:
    """Usage records in the database. Adds, sums, exports and rolls up records."""

    def __init__(self, database: Database, organisation_id: str | None = None) -> None:
        self._database = database
        self._organisation_id = organisation_id

    def for_organisation(self, organisation_id: str | None) -> Ledger:
        """Return a ledger restricted to the records of one organisation, or to all for None."""
        return Ledger(self._database, organisation_id)

    def add_records(self, records: Sequence[UsageRecord]) -> int:
        """Insert the records whose request is not in the ledger yet.

        Records may be added repeatedly and by several processes at the same time. Each counts once until its day is
        rolled up.

        Returns:
            The number of new records.
        """
        inserted = 0
        for start in range(0, len(records), INSERT_BATCH_ROWS):
            with self._database.write_transaction() as connection:
                inserted += insert_records(connection, records[start : start + INSERT_BATCH_ROWS])
        return inserted

    def report(
        self, group_by: Sequence[ReportGroup] = (), where: UsageFilter = ALL_USAGE
    ) -> list[UsageReportRow]:
        """Sum usage by group, sorted by the groups. Without groups the report has one row.

        Only the totals of rolled-up days are known. Such a day counts if it begins within the time range of `where`.

        Raises:
            ValueError: The report would have more than `MAX_REPORT_ROWS` rows.
        """
        rows = self._query_report(group_by, where, _ALL_REQUESTS)
        if len(rows) > MAX_REPORT_ROWS:
            remedy = "Choose a shorter time, fewer groups, or the CSV export of single records."
            raise ValueError(f"The report has more than {MAX_REPORT_ROWS} rows. {remedy}")
        return rows

    def _query_report(
        self,
        groups: Sequence[ReportGroup],
        where: UsageFilter,
        request_count: RequestCount,
        owners: Sequence[str] | None = None,
        after: Sequence[str] | None = None,
        limit: int = MAX_REPORT_ROWS + 1,
    ) -> list[UsageReportRow]:
        """Sum usage by group. If `owners` restrict the first group, without the limit on rows.

        The report begins after the row whose groups begin with the values `after`.
        """

        def owner_conditions(table: Table) -> list[ColumnElement[bool]]:
            conditions: list[ColumnElement[bool]] = []
            if owners is not None:
                conditions.append(table.c[groups[0]].in_(owners))
            if after is not None:
                reached = tuple_(*(table.c[name] for name in groups[: len(after)]))
                conditions.append(reached > tuple(after))
            return conditions + self._owner_conditions(table, where)

        combined = union_all(
            _select_sums(
                schema.usage,
                request_count[0],
                groups,
                _ended_at_conditions(where) + owner_conditions(schema.usage),
                _IS_ONLINE if request_count is _LIMITED_REQUESTS else None,
            ),
            _select_sums(
                schema.usage_days,
                request_count[1],
                groups,
                _day_conditions(where) + owner_conditions(schema.usage_days),
            ),
        ).subquery()
        columns = [combined.c[name] for name in groups]
        sums = [
            cast(func.coalesce(func.sum(combined.c[name]), 0), BigInteger).label(name)
            for name in ("requests", *_SUMMED_COLUMNS)
        ]
        query = select(*columns, *sums).group_by(*columns).order_by(*columns)
        if owners is None:
            query = query.limit(limit)
        with self._database.read_transaction() as connection:
            return [_to_report_row(row._asdict()) for row in connection.execute(query)]

    def iter_report(
        self, group_by: Sequence[ReportGroup], where: UsageFilter = ALL_USAGE
    ) -> Iterator[list[UsageReportRow]]:
        """Yield the report of each day in pages, by day and then by `group_by`, which has no day.

        The range of `where` is extended to whole days. No transaction is open between pages.
        """
        groups: list[ReportGroup] = [*group_by, "day"]
        until = math.inf if where.until is None else where.until
        begin = self._find_day(0 if where.since is None else int(where.since // DAY_S))
        while begin is not None and begin * DAY_S < until:
            day = msgspec.structs.replace(
                where, since=float(begin * DAY_S), until=float((begin + 1) * DAY_S)
            )
            after: list[str] | None = None
            while True:
                rows = self._query_report(
                    groups, day, _ALL_REQUESTS, after=after, limit=REPORT_PAGE_ROWS
                )
                if rows:
                    yield rows
                if len(rows) < REPORT_PAGE_ROWS:
                    break
                after = [getattr(rows[-1], name) for name in group_by]
            begin = self._find_day(begin + 1)

    def _find_day(self, first: int) -> int | None:
        """Return the first day with usage of any owner, from `first` on, in days since the epoch."""
        rows, days = schema.usage.c, schema.usage_days.c
        with self._database.read_transaction() as connection:
            ended_at = connection.execute(
                select(func.min(rows.ended_at)).where(rows.ended_at >= first * DAY_S)
            ).scalar()
            day = connection.execute(select(func.min(days.day)).where(days.day >= first)).scalar()
        found = [] if ended_at is None else [int(ended_at // DAY_S)]
        return min(found if day is None else [*found, int(day)], default=None)

    def sum_by_owner(
        self, owner_kind: OwnerKind, owners: Collection[str], since: float
    ) -> dict[str, list[UsageReportRow]]:
        """Sum the usage of owners since a time, by model, as limits count it.

        The usage of a key includes that of the keys that it replaced by rotation. Requests that are not charged are not
        counted, and lines of batches only by their cost, see `_LIMITED_REQUESTS`.

        Returns rows by model for each owner id. Owners without usage are left out.
        """
        lineages = (
            self._find_rotated_keys(owners, since)
            if owner_kind == "key"
            else {owner: [owner] for owner in owners}
        )
        owners_by_id: dict[str, list[str]] = {}
        for owner, lineage in lineages.items():
            for ancestor in lineage:
                owners_by_id.setdefault(ancestor, []).append(owner)
        found: dict[str, list[UsageReportRow]] = {}
        ids, where = list(owners_by_id), UsageFilter(since=since)
        for start in range(0, len(ids), MAX_OWNERS_PER_QUERY):
            batch = ids[start : start + MAX_OWNERS_PER_QUERY]
            for row in self._query_report((owner_kind, "model"), where, _LIMITED_REQUESTS, batch):
                for owner in owners_by_id[getattr(row, owner_kind)]:
                    found.setdefault(owner, []).append(row)
        return found

    def iter_records(self, where: UsageFilter = ALL_USAGE) -> Iterator[list[UsageRecord]]:
        """Yield single records in pages, sorted by end time. No transaction is open between pages."""
        table = schema.usage
        query = select(*_RECORD_COLUMNS).where(*self._owner_conditions(table, where))
        query = query.order_by(table.c.ended_at, table.c.request).limit(PAGE_ROWS)
        page_query, after = query.where(*_ended_at_conditions(where)), None
        # With both conditions SQLite would use `since` instead of the page start and scan all rows for each page.
        where = msgspec.structs.replace(where, since=None)
        while True:
            with self._database.read_transaction() as connection:
                records = _to_records(connection.execute(page_query))
            if records:
                yield records
            if len(records) < PAGE_ROWS:
                return
            after = (records[-1].ended_at, records[-1].request)
            page_query = query.where(
                *_ended_at_conditions(where), tuple_(table.c.ended_at, table.c.request) > after
            )

    def list_latest(
        self,
        where: UsageFilter = ALL_USAGE,
        *,
        status: UsageStatus | None = None,
        min_duration_s: float = 0.0,
        before: tuple[float, str] | None = None,
        limit: int = 200,
    ) -> LatestRecords:
        """Return single records, latest end first.

        At most `MAX_SCANNED_ROWS` records are searched, so a page may have less than `limit` records, or none, although
        there are older ones. Only those are returned that come after the end time and id `before` in the list.
        """
        scanned, found, conditions = self._select_latest(where, status, min_duration_s, before)
        query = _latest_first(select(found).where(*conditions), found.c) if conditions else scanned
        with self._database.read_transaction() as connection:
            rows = connection.execute(query.limit(limit + 1)).all()
            records = _to_records(rows[:limit])
            if len(rows) > limit:
                return LatestRecords(records, (records[-1].ended_at, records[-1].request))
            if not conditions:
                return LatestRecords(records, None)
            last = connection.execute(_select_end(found)).first()
        return LatestRecords(records, None if last is None else (last.ended_at, last.request))

    def list_sorted(
        self,
        where: UsageFilter,
        order: RecordOrder,
        *,
        is_descending: bool = True,
        status: UsageStatus | None = None,
        min_duration_s: float = 0.0,
        after: UsageRecord | None = None,
        limit: int = 200,
    ) -> SortedRecords:
        """Return single records, sorted by a quantity. No more than the latest `MAX_SCANNED_ROWS` records are sorted.

        Records with an equal quantity are sorted by their end and id. `after` is the last record of the page before.
        """
        _, found, conditions = self._select_latest(where, status, min_duration_s, None)
        value = found.c.ended_at - found.c.started_at if order == "duration_s" else found.c[order]
        keys = [value, found.c.ended_at, found.c.request]
        if after is not None:
            reached = (_get_quantity(after, order), after.ended_at, after.request)
            position = tuple_(*keys)
            conditions.append(position < reached if is_descending else position > reached)
        query = select(found).where(*conditions).limit(limit + 1)
        query = query.order_by(*(key.desc() if is_descending else key for key in keys))
        with self._database.read_transaction() as connection:
            records = _to_records(connection.execute(query))
            end = connection.execute(_select_end(found)).first()
        return SortedRecords(
            records[:limit], len(records) > limit, None if end is None else end.ended_at
        )

    def _select_latest(
        self,
        where: UsageFilter,
        status: UsageStatus | None,
        min_duration_s: float,
        before: tuple[float, str] | None,
    ) -> tuple[Select[Any], Subquery, list[ColumnElement[bool]]]:
        """Select the latest `MAX_SCANNED_ROWS` records by index. Returns also the conditions that have no index."""
        table = schema.usage
        indexed = msgspec.structs.replace(where, **dict.fromkeys(_UNINDEXED_FIELDS))
        scanned = select(*_RECORD_COLUMNS).where(
            *self._owner_conditions(table, indexed), *_ended_at_conditions(where)
        )
        if before is not None:
            scanned = scanned.where(tuple_(table.c.ended_at, table.c.request) < before)
        scanned = _latest_first(scanned, table.c).limit(MAX_SCANNED_ROWS)
        found = scanned.subquery()
        conditions: list[ColumnElement[bool]] = [
            found.c[name] == getattr(where, name)
            for name in _UNINDEXED_FIELDS
            if getattr(where, name) is not None
        ]
        if status is not None:
            conditions.append(found.c.status == status)
        if min_duration_s > 0:
            conditions.append(found.c.ended_at - found.c.started_at >= min_duration_s)
        return scanned, found, conditions

    def find_record(self, requests: Sequence[str]) -> UsageRecord | None:
        """Return the record of the first request that has one. None if none has, or its day was rolled up."""
        table = schema.usage
        query = select(*_RECORD_COLUMNS).where(
            table.c.request.in_(requests), *self._owner_conditions(table, ALL_USAGE)
        )
        with self._database.read_transaction() as connection:
            return next(iter(_to_records(connection.execute(query.limit(1)))), None)

    def find_cost_outliers(self, now: float) -> list[tuple[UsageRecord, int, TokenUsage]]:
        """Return the records before `now` whose cost is an outlier of their project and model, latest day first.

        Each has the 99th percentile of the cost and the mean tokens of its project and model. At most
        `MAX_SCANNED_ROWS` records are read, and `MAX_OUTLIERS_PER_DAY` of a day are returned, the most expensive ones.
        """
        where = UsageFilter(since=now - OUTLIER_PERIOD_S, until=now)
        scanned = self._select_latest(where, None, 0.0, None)[1].c
        group = (scanned.project, scanned.model)
        sums = [
            func.sum(scanned[name]).over(partition_by=group).label(f"sum_{name}")
            for name in ("input_tokens", "cached_tokens", "output_tokens")
        ]
        ranked = select(
            *scanned,
            *sums,
            func.row_number()
            .over(partition_by=group, order_by=scanned.nano_dollars.desc())
            .label("place"),
            func.count().over(partition_by=group).label("requests"),
        ).subquery()
        at_p99 = ranked.c.place == ranked.c.requests // 100 + 1
        limits = (
            select(ranked.c.project, ranked.c.model, ranked.c.nano_dollars.label("p99"))
            .where(at_p99, ranked.c.requests >= OUTLIER_MIN_REQUESTS)
            .subquery()
        )
        is_same = and_(ranked.c.project == limits.c.project, ranked.c.model == limits.c.model)
        query = select(ranked, limits.c.p99).join(limits, is_same)
        query = query.where(
            ranked.c.nano_dollars > OUTLIER_FACTOR * limits.c.p99,
            ranked.c.nano_dollars >= OUTLIER_FLOOR_NANO_DOLLARS,
        ).order_by(ranked.c.nano_dollars.desc(), ranked.c.request)
        by_day: dict[int, list[tuple[UsageRecord, int, TokenUsage]]] = {}
        with self._database.read_transaction() as connection:
            for row in connection.execute(query).mappings():  # at most 1 % of the records
                record = UsageRecord(**{name: row[name] for name in UsageRecord.__struct_fields__})
                prompt, cached, output = (int(row[each.name]) // row["requests"] for each in sums)
                typical = TokenUsage(prompt, cached, output)
                of_day = by_day.setdefault(int(record.ended_at // DAY_S), [])
                of_day.append((record, int(row["p99"]), typical))
        days = sorted(by_day, reverse=True)
        return [each for day in days for each in by_day[day][:MAX_OUTLIERS_PER_DAY]]

    def count_recent(self, model: str, since: float, max_records: int) -> dict[str, int]:
        """Count requests of a model that ended at `since` or later, by their status.

        At most `max_records` of all models are read, latest first, which bounds the time.
        """
        table = schema.usage
        recent = (
            select(table.c.model, table.c.status)
            .where(table.c.ended_at >= since)
            .order_by(table.c.ended_at.desc())
            .limit(max_records)
            .subquery()
        )
        query = (
            select(recent.c.status, func.count())
            .where(recent.c.model == model)
            .group_by(recent.c.status)
        )
        with self._database.read_transaction() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def export_csv(
        self, where: UsageFilter = ALL_USAGE, pages: Iterable[list[UsageRecord]] | None = None
    ) -> Iterator[str]:
        """Yield single records as pieces of CSV text: a header, then the fields of each `UsageRecord`.

        Times are in ISO 8601. The `pages` of an archive are written instead of those of the ledger.
        """
        yield format_csv([UsageRecord.__struct_fields__])
        for page in self.iter_records(where) if pages is None else pages:
            yield format_csv(map(_to_csv_row, page))

    def export_report_csv(
        self, group_by: Sequence[ReportGroup], where: UsageFilter = ALL_USAGE
    ) -> str:
        """Format a report as CSV text: a header, then one line for each group. Raises ValueError like `report`."""
        names = (*group_by, *UsageTotals.__struct_fields__)
        rows = self.report(group_by, where)
        return format_csv([names, *([getattr(row, name) for name in names] for row in rows)])

    def roll_up(self, before: float) -> int:
        """Replace the records of whole days that ended before a time by daily sums.

        A record that is added again later counts twice. Therefore keep records for more days than a gateway may be
        disconnected from the database.

        Args:
            before: Time in seconds since the epoch.

        Returns:
            The number of removed records.
        """
        return self._roll_up(before // DAY_S * DAY_S, [])

    def roll_up_project(self, project: str, before: float) -> int:
        """Replace the records of one project that ended before a time by daily sums, also of a part of a day.

        It is subject to the same conditions as `roll_up`.
        """
        return self._roll_up(before, [schema.usage.c.project == project])

    def _roll_up(self, before: float, where: list[ColumnElement[bool]]) -> int:
        oldest = select(func.min(schema.usage.c.ended_at)).where(*where)
        removed = 0
        while True:
            with self._database.read_transaction() as connection:
                ended_at = connection.execute(oldest).scalar_one()
            if ended_at is None or ended_at >= before:
                return removed
            if removed:
                time.sleep(ROLL_UP_PAUSE_S)
            removed += self._roll_up_batch(before, where)

    def read_oldest(self, before: float, limit: int) -> list[UsageRecord]:
        """Return the first records of the oldest day of an organisation, of whole days that ended before a time."""
        rows = schema.usage.c
        order = rows.ended_at, rows.request
        oldest = select(rows.organisation, rows.day).where(rows.ended_at < before // DAY_S * DAY_S)
        with self._database.read_transaction() as connection:
            first = connection.execute(oldest.order_by(*order).limit(1)).first()
            if first is None:
                return []
            of_day = and_(rows.organisation == first.organisation, *_day_bounds(first.day))
            query = select(*_RECORD_COLUMNS).where(of_day).order_by(*order).limit(limit)
            return _to_records(connection.execute(query))

    def replace_by_part(self, part: ColdPart, last: UsageRecord) -> bool:
        """List a part of the archive, and replace its records by daily sums, in one transaction.

        Args:
            part: The part, which has the first records of its organisation and day.
            last: Last record of the part, by end time and id.

        Returns:
            False, without any change, if the ledger has other records than the part by now.
        """
        rows = schema.usage.c
        past = and_(
            rows.organisation == part.organisation,
            *_day_bounds(part.day),
            tuple_(rows.ended_at, rows.request) <= (last.ended_at, last.request),
        )
        sums = select(func.count(), func.sum(rows.nano_dollars)).where(past)
        with self._database.write_transaction(is_snapshot=True) as connection:
            _lock_days(connection)
            found = connection.execute(sums).one()
            if (found[0], int(found[1] or 0)) != (part.rows, part.nano_dollars):
                return False
            _replace_by_sums(connection, past)
            connection.execute(schema.cold_parts.insert(), msgspec.structs.asdict(part))
        return True

    def list_parts(self, where: UsageFilter = ALL_USAGE) -> list[ColdPart]:
        """List the parts of the archive that may have records of an organisation and time, from old to new."""
        table, conditions = schema.cold_parts.c, list[ColumnElement[bool]]()
        organisation = where.organisation or self._organisation_id
        if organisation is not None:
            conditions.append(table.organisation == organisation)
        if where.since is not None:
            conditions.append(table.day >= int(where.since // DAY_S))
        if where.until is not None:
            conditions.append(table.day <= int(where.until // DAY_S))
        query = select(schema.cold_parts).where(*conditions).order_by(table.day, table.key)
        with self._database.read_transaction() as connection:
            return [ColdPart(**row._asdict()) for row in connection.execute(query)]

    def _find_rotated_keys(self, owners: Collection[str], since: float) -> dict[str, list[str]]:
        """Return for each key id itself and its predecessors by rotation that were valid at `since` or later."""
        keys = schema.keys.c
        query = select(keys.replaced_by, keys.id)
        query = query.where(keys.replaced_by.is_not(None), keys.expires_at >= since)
        with self._database.read_transaction() as connection:
            predecessors = {row.replaced_by: row.id for row in connection.execute(query)}
        lineages = {key: [key] for key in owners}
        for lineage in lineages.values():
            while lineage[-1] in predecessors:
                lineage.append(predecessors[lineage[-1]])
        return lineages

    def _owner_conditions(self, table: Table, where: UsageFilter) -> list[ColumnElement[bool]]:
        values = {name: getattr(where, name) for name in _REPORT_GROUPS if name != "day"}
        conditions = [table.c[name] == value for name, value in values.items() if value is not None]
        if self._organisation_id is not None:
            conditions.append(table.c.organisation == self._organisation_id)
        return conditions

    def _roll_up_batch(self, before: float, where: list[ColumnElement[bool]]) -> int:
        """Roll up the oldest records that ended before a time. Batches keep the lock times of other writers short."""
        rows = schema.usage
        past = and_(rows.c.ended_at < before, *where)
        # A snapshot, so that records added meanwhile are neither summed nor deleted.
        with self._database.write_transaction(is_snapshot=True) as connection:
            _lock_days(connection)
            end_times = select(rows.c.ended_at).where(past).order_by(rows.c.ended_at)
            last = connection.execute(end_times.offset(ROLL_UP_BATCH_ROWS - 1).limit(1)).scalar()
            if last is not None:
                past = and_(rows.c.ended_at <= last, *where)
            return _replace_by_sums(connection, past)


def _lock_days(connection: Connection) -> None:
    """Let other roll-ups wait, before the snapshot of a transaction begins."""
    if connection.dialect.name == "postgresql":
        # A lock on `usage` would wait for its VACUUM and block inserts.
        connection.execute(text("LOCK TABLE usage_days IN SHARE ROW EXCLUSIVE MODE"))


def _replace_by_sums(connection: Connection, past: ColumnElement[bool]) -> int:
    """Replace records by daily sums, and return their number. The transaction is a snapshot after `_lock_days`."""
    rows, days = schema.usage, schema.usage_days
    insert = conflict_aware_insert(connection, days)
    sums = _select_sums(rows, func.count(), _REPORT_GROUPS, [past])
    sums = sums.add_columns(func.count() - func.count().filter(_IS_CHARGED))
    summed = ("requests", *_SUMMED_COLUMNS, "unanswered")
    connection.execute(
        insert.from_select([*_REPORT_GROUPS, *summed], sums).on_conflict_do_update(
            index_elements=list(_REPORT_GROUPS),
            set_={name: days.c[name] + insert.excluded[name] for name in summed},
        )
    )
    return connection.execute(delete(rows).where(past)).rowcount


def _day_bounds(day: int) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    ended_at = schema.usage.c.ended_at
    return ended_at >= day * DAY_S, ended_at < (day + 1) * DAY_S


def _select_sums(
    table: Table,
    request_count: ColumnElement[Any],
    groups: Sequence[ReportGroup],
    where: Sequence[ColumnElement[bool]],
    with_tokens: ColumnElement[bool] | None = None,
) -> Select[Any]:
    """Return the query of sums by group. Only rows `with_tokens` count with their tokens; None for all."""
    columns = [table.c[name] for name in groups]
    sums = {name: func.sum(table.c[name]) for name in _SUMMED_COLUMNS}
    summed = [
        cast(
            total if with_tokens is None or name == "nano_dollars" else total.filter(with_tokens),
            BigInteger,
        ).label(name)
        for name, total in sums.items()
    ]
    query = select(*columns, cast(request_count, BigInteger).label("requests"), *summed)
    return query.where(*where).group_by(*columns)


def _ended_at_conditions(where: UsageFilter) -> list[ColumnElement[bool]]:
    ended_at = schema.usage.c.ended_at
    since = [] if where.since is None else [ended_at >= where.since]
    return since if where.until is None else [*since, ended_at < where.until]


def _day_conditions(where: UsageFilter) -> list[ColumnElement[bool]]:
    """Conditions for days that begin within the time range."""
    day = schema.usage_days.c.day
    since = [] if where.since is None else [day >= math.ceil(where.since / DAY_S)]
    return since if where.until is None else [*since, day < math.ceil(where.until / DAY_S)]


def _to_csv_row(record: UsageRecord) -> list[object]:
    times = {
        "started_at": format_csv_time(record.started_at),
        "ended_at": format_csv_time(record.ended_at),
    }
    return [*(msgspec.structs.asdict(record) | times).values()]


def _to_insert_values(record: UsageRecord) -> tuple[Any, ...]:
    """Return the parameters of `_INSERT_SQL`, sanitized so that one bad text does not block its batch for ever."""
    values = (*msgspec.structs.astuple(record), int(record.ended_at // DAY_S))
    texts = [value for value in values if isinstance(value, str)]
    if "".join(texts).isprintable() and max(map(len, texts)) <= MAX_TEXT_CHARS:
        return values
    return tuple(_sanitize_text(value) if isinstance(value, str) else value for value in values)


def _sanitize_text(value: str) -> str:
    """Remove what databases reject: NUL, lone surrogates, and text that is too long for an index."""
    if value.isprintable() and len(value) <= MAX_TEXT_CHARS:
        return value
    return value.replace("\0", "").encode("utf-8", "replace").decode()[:MAX_TEXT_CHARS]


def _to_records(rows: Iterable[Row[Any]]) -> list[UsageRecord]:
    return [UsageRecord(**row._asdict()) for row in rows]


def _to_report_row(values: dict[str, Any]) -> UsageReportRow:
    if "day" in values:
        values["day"] = datetime.fromtimestamp(values["day"] * DAY_S, UTC).date().isoformat()
    return UsageReportRow(**values)


def _get_quantity(record: UsageRecord, order: RecordOrder) -> float:
    """Return the quantity of a record that an order sorts by."""
    if order == "duration_s":
        return record.ended_at - record.started_at
    quantity: int = getattr(record, order)
    return quantity


def _select_end(found: Subquery) -> Select[Any]:
    """Select the oldest of the scanned records if there may be older ones."""
    return _latest_first(select(found), found.c).offset(MAX_SCANNED_ROWS - 1).limit(1)


def _latest_first(query: Select[Any], columns: ReadOnlyColumnCollection[str, Any]) -> Select[Any]:
    return query.order_by(columns.ended_at.desc(), columns.request.desc())
