"""Ledger on both databases: each request counts once, and each report sums its records exactly."""

from __future__ import annotations

import csv
import io
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import msgspec
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, event
from tests.integration.store.conftest import ACTOR, RULES, START
from tests.support import store_process
from tests.support.database_work import count_rows_read
from tests.support.fake_clock import FakeClock
from tests.support.usage_rows import usage_row

from argosy.store import (
    Project,
    RecordOrder,
    ReportGroup,
    Store,
    UsageFilter,
    UsageRecord,
    UsageReportRow,
    ledger,
    open_store,
)

DAY = 86_400.0
MIDNIGHT = START // DAY * DAY
ROUTING_FIELDS = ("model", "asked", "route", "replica")
OWNER_FIELDS = ("organisation", "project", "key", "user")
GROUPS: tuple[ReportGroup, ...] = ("day", *OWNER_FIELDS, *ROUTING_FIELDS)  # type: ignore[assignment]
SUMMED_FIELDS = ("input_tokens", "cached_tokens", "output_tokens", "nano_dollars")

names = st.sampled_from(["", "a", "b"])
counts = st.integers(0, 2**40)
record_fields = st.fixed_dictionaries(
    {
        **dict.fromkeys(("project", "key", "user", *ROUTING_FIELDS), names),
        **dict.fromkeys(SUMMED_FIELDS, counts),
        "ended_at": st.floats(MIDNIGHT - DAY, MIDNIGHT + 2 * DAY).map(lambda at: round(at, 3)),
    }
)
filters = st.builds(
    lambda routing, **others: UsageFilter(**routing, **others),
    routing=st.dictionaries(st.sampled_from(ROUTING_FIELDS), names, max_size=2),
    since=st.none() | st.sampled_from([MIDNIGHT - 1, MIDNIGHT, MIDNIGHT + 9000.5]),
    until=st.none() | st.sampled_from([MIDNIGHT, MIDNIGHT + DAY, MIDNIGHT + DAY + 0.5]),
    project=st.none() | names,
    user=st.none() | names,
)
groupings = st.lists(st.sampled_from(GROUPS), max_size=4, unique=True)
organisation_numbers = itertools.count()

# Each example uses an organisation of its own, so that all of them share one store.
sharing_a_store = settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def build_rows(organisation: str, drawn: Sequence[dict[str, object]]) -> list[UsageRecord]:
    return [
        usage_row(f"{organisation}-{number}", organisation=organisation, **fields)
        for number, fields in enumerate(drawn)
    ]


def compute_report(
    rows: Sequence[UsageRecord],
    groups: Sequence[ReportGroup],
    is_included: Callable[[UsageRecord], bool] = lambda _: True,
) -> list[UsageReportRow]:
    """Reference implementation of a report."""
    sums: dict[tuple[str, ...], dict[str, int]] = {} if groups else {(): zero_sums()}
    for row in filter(is_included, rows):
        day = datetime.fromtimestamp(row.ended_at, UTC).date().isoformat()
        fields = {**msgspec.structs.asdict(row), "day": day}
        total = sums.setdefault(tuple(fields[group] for group in groups), zero_sums())
        total["requests"] += 1
        for name in SUMMED_FIELDS:
            total[name] += fields[name]
    return [
        UsageReportRow(**dict(zip(groups, group, strict=True)), **sums[group])  # type: ignore[arg-type]
        for group in sorted(sums)
    ]


def zero_sums() -> dict[str, int]:
    return dict.fromkeys(("requests", *SUMMED_FIELDS), 0)


def matches(row: UsageRecord, where: UsageFilter) -> bool:
    fields = (*OWNER_FIELDS, *ROUTING_FIELDS)
    return (
        all(getattr(where, name) in {None, getattr(row, name)} for name in fields)
        and (where.since is None or row.ended_at >= where.since)
        and (where.until is None or row.ended_at < where.until)
    )


def list_records(store: Store, where: UsageFilter) -> list[UsageRecord]:
    return list(itertools.chain(*store.ledger.iter_records(where)))


# --- records and reports -------------------------------------------------------------------------


def test_repeated_record_counts_once(store: Store) -> None:
    rows = [usage_row(f"r{number}", nano_dollars=2**50 + 1) for number in range(1203)]
    assert store.ledger.add_records(rows[:700]) == 700
    assert store.ledger.add_records([*rows, *rows[:3]]) == 503
    assert store.ledger.add_records([]) == 0
    assert store.ledger.report() == [
        UsageReportRow(
            requests=1203,
            input_tokens=12_030,
            cached_tokens=4812,
            output_tokens=3609,
            nano_dollars=1203 * (2**50 + 1),
        )
    ]


def test_records_added_by_several_processes_count_once(
    store: Store, url: str, store_processes: store_process.StoreProcesses
) -> None:
    """Two processes add 200 records each and have 100 in common."""
    added = store_processes.run(store_process.add_records, url, 100, 200)
    assert sum(added) == 300
    assert store.ledger.report()[0].requests == 300


@sharing_a_store
@given(drawn=st.lists(record_fields, max_size=30), groups=groupings, where=filters)
def test_report_sums_the_matching_records(
    store: Store, drawn: list[dict[str, object]], groups: list[ReportGroup], where: UsageFilter
) -> None:
    organisation = f"org{next(organisation_numbers)}"
    rows = build_rows(organisation, drawn)
    assert store.ledger.add_records(rows) == len(rows)
    where = msgspec.structs.replace(where, organisation=organisation)
    expected = compute_report(rows, groups, lambda row: matches(row, where))
    assert store.ledger.report(groups, where) == expected
    in_order = sorted(rows, key=lambda row: (row.ended_at, row.request))
    assert list_records(store, where) == [row for row in in_order if matches(row, where)]


def test_unusual_text_rejects_no_record(store: Store) -> None:
    texts = ("a\0b", "\ud800", "é" * 3000, "x" * 9000, "' --", "\u202e", "good")
    rows = [
        usage_row(str(number), **dict.fromkeys((*OWNER_FIELDS, *ROUTING_FIELDS), text))
        for number, text in enumerate(texts)
    ]
    assert store.ledger.add_records(rows) == len(rows)
    assert store.ledger.roll_up(START + 2 * DAY) == len(rows)
    assert store.ledger.report()[0].requests == len(rows)


@RULES
def test_scoped_ledger_holds_one_organisations_usage(store: Store) -> None:
    later = MIDNIGHT + DAY + 1
    rows = [usage_row(f"r{n}", organisation=name) for n, name in enumerate("aabc")]
    rows.append(usage_row("r4", organisation="a", ended_at=later))
    store.ledger.add_records(rows)
    scoped = store.ledger.for_organisation("a")
    for _ in range(2):
        (total,) = scoped.report()
        assert total.requests == 3
        own = UsageFilter(organisation="a")
        assert scoped.report(["organisation"]) == store.ledger.report(["organisation"], own)
        assert scoped.report(["key"], UsageFilter(organisation="b")) == []
        store.ledger.roll_up(MIDNIGHT + DAY)
    assert [row.request for page in scoped.iter_records() for row in page] == ["r4"]
    assert len("".join(scoped.export_csv(UsageFilter(organisation="b"))).splitlines()) == 1


@RULES
def test_report_with_more_rows_than_the_maximum_is_rejected(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_REPORT_ROWS", 3)
    store.ledger.add_records([usage_row(f"r{number}", key=f"k{number}") for number in range(4)])
    assert len(store.ledger.report(["project"])) == 1
    with pytest.raises(ValueError, match="more than 3 rows"):
        store.ledger.report(["key"])
    assert sum(len(page) for page in store.ledger.iter_records()) == 4


# --- roll-up of old days -------------------------------------------------------------------------


@sharing_a_store
@given(drawn=st.lists(record_fields, max_size=30), groups=groupings, days=st.integers(0, 3))
def test_roll_up_preserves_totals(
    store: Store, drawn: list[dict[str, object]], groups: list[ReportGroup], days: int
) -> None:
    organisation = f"org{next(organisation_numbers)}"
    rows = build_rows(organisation, drawn)
    store.ledger.add_records(rows[::2])
    store.ledger.roll_up(MIDNIGHT + days * DAY)
    store.ledger.add_records(rows[1::2])  # some are late records of days that are rolled up
    before = MIDNIGHT + days * DAY + 0.5
    store.ledger.roll_up(before)
    where = UsageFilter(organisation=organisation)
    assert store.ledger.report(groups, where) == compute_report(rows, groups)
    assert {row.request for row in list_records(store, where)} == {
        row.request for row in rows if row.ended_at >= before // DAY * DAY
    }
    one_day = UsageFilter(organisation=organisation, since=MIDNIGHT, until=MIDNIGHT + DAY)
    expected = compute_report(rows, groups, lambda row: matches(row, one_day))
    assert store.ledger.report(groups, one_day) == expected


def test_roll_up_lets_others_write_between_batches(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[list[UsageReportRow]] = []

    def use_store(_: float) -> None:
        store.accounts.create_organisation(f"meanwhile {len(reports)}", actor=ACTOR)
        reports.append(store.ledger.report(["day", "model"]))

    monkeypatch.setattr(ledger, "ROLL_UP_BATCH_ROWS", 3)
    monkeypatch.setattr(time, "sleep", use_store)
    ended = [MIDNIGHT + n // 2 for n in range(10)] + [MIDNIGHT + DAY] * 8
    store.ledger.add_records([usage_row(f"r{n}", ended_at=at) for n, at in enumerate(ended)])
    before = store.ledger.report(["day", "model"])
    assert store.ledger.roll_up(MIDNIGHT) == 0
    assert store.ledger.roll_up(MIDNIGHT + 2 * DAY) == len(ended)
    assert len(reports) == 2
    assert all(report == before for report in [*reports, store.ledger.report(["day", "model"])])
    assert list(store.ledger.iter_records()) == []


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_records_added_during_a_roll_up_are_kept_without_waiting(store: Store, url: str) -> None:
    other = open_store(f"{url}&options=-c%20lock_timeout%3D1s")
    late_rows = {"INSERT": usage_row("before the sums"), "DELETE": usage_row("before the removal")}

    def add_late_row(_: Connection, __: Any, statement: str, *___: object) -> None:  # noqa: ANN401 - a cursor
        row = late_rows.pop(statement.partition(" ")[0], None)
        if row is not None:
            other.ledger.add_records([row])

    store.ledger.add_records([usage_row("first")])
    event.listen(Engine, "before_cursor_execute", add_late_row)
    try:
        assert store.ledger.roll_up(START + DAY) == 3
    finally:
        event.remove(Engine, "before_cursor_execute", add_late_row)
        other.close()
    assert store.ledger.report()[0].requests == 3
    assert list(store.ledger.iter_records()) == []


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_roll_up_does_not_wait_for_a_vacuum(store: Store, url: str) -> None:
    store.ledger.add_records([usage_row("first")])
    with (
        closing(open_store(f"{url}&options=-c%20lock_timeout%3D1s")) as impatient,
        psycopg.connect(url) as vacuum,
    ):
        vacuum.execute("LOCK TABLE usage IN SHARE UPDATE EXCLUSIVE MODE")  # the lock of VACUUM
        assert impatient.ledger.roll_up(START + DAY) == 1


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_concurrent_roll_ups_remove_each_record_once(
    store: Store, url: str, store_processes: store_process.StoreProcesses
) -> None:
    rows = [usage_row(f"r{number}", ended_at=START + number) for number in range(400)]
    store.ledger.add_records(rows)
    removed = store_processes.run(store_process.roll_up, url, START + 2 * DAY, 50)
    assert sum(removed) == 400
    assert store.ledger.report()[0].requests == 400


# --- sums by owner, for limits -------------------------------------------------------------------


def sum_cost(rows: Sequence[UsageReportRow]) -> int:
    return sum(row.nano_dollars for row in rows)


def test_usage_is_summed_by_owner_and_model_since_a_time(store: Store) -> None:
    store.ledger.add_records(
        [
            usage_row("1", key="k", ended_at=START - 1, nano_dollars=1),
            usage_row("2", key="k", ended_at=START, nano_dollars=2),
            usage_row("3", key="k", ended_at=START + 9, nano_dollars=4, model="n"),
            usage_row("4", key="other", ended_at=START + 9, nano_dollars=8),
        ]
    )
    first, second = store.ledger.sum_by_owner("key", ["k"], START)["k"]
    assert first.nano_dollars == 2
    assert second == UsageReportRow(
        key="k",
        model="n",
        requests=1,
        input_tokens=10,
        cached_tokens=4,
        output_tokens=3,
        nano_dollars=4,
    )
    sums = store.ledger.sum_by_owner("key", ["k", "other", "absent"], START - 5)
    assert {key: sum_cost(rows) for key, rows in sums.items()} == {"k": 7, "other": 8}
    (rows,) = store.ledger.sum_by_owner("organisation", ["org_a"], START - 5).values()
    assert sum(row.requests for row in rows) == 4
    assert not store.ledger.sum_by_owner("user", ["absent"], 0)


@pytest.mark.parametrize("scale", [100, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_more_owners_than_fit_a_query_are_summed(
    store: Store, monkeypatch: pytest.MonkeyPatch, scale: int
) -> None:
    """All owners together also have more rows than a report may."""
    for name in ("MAX_OWNERS_PER_QUERY", "MAX_REPORT_ROWS"):
        monkeypatch.setattr(ledger, name, getattr(ledger, name) // scale)
    keys = [f"k{number}" for number in range(12_000 // scale)]
    store.ledger.add_records([usage_row(key, key=key, nano_dollars=1) for key in keys])
    sums = store.ledger.sum_by_owner("key", keys, 0)
    assert {key: sum_cost(rows) for key, rows in sums.items()} == dict.fromkeys(keys, 1)


@RULES
def test_requests_without_a_result_are_not_charged(store: Store) -> None:
    empty: dict[str, Any] = {"key": "k", "input_tokens": 0, "output_tokens": 0}
    store.ledger.add_records(
        [
            usage_row("refused", status="refused", **empty),
            usage_row("cancelled in the queue", status="cancelled", replica="", **empty),
            usage_row("cancelled on a replica", status="cancelled", **empty),
            usage_row("failed", **empty | {"status": "failed", "output_tokens": 1}),
            usage_row("interrupted", status="interrupted", replica="", key="k"),
        ]
    )
    for _ in range(2):
        ((charged,),) = store.ledger.sum_by_owner("key", ["k"], 0).values()
        assert charged.requests == 3
        (total,) = store.ledger.report()
        assert total.requests == 5
        store.ledger.roll_up(START + DAY)


@RULES
def test_key_usage_includes_the_keys_it_was_rotated_from(
    store: Store, clock: FakeClock, project: Project
) -> None:
    accounts = store.accounts
    keys = [accounts.create_key(project.id, "k", actor=ACTOR)[0].id]
    for _ in range(2):
        clock.now += 100
        keys.append(accounts.rotate_key(keys[-1], 0, actor=ACTOR)[0].id)
    store.ledger.add_records(
        [
            usage_row(key, key=key, ended_at=clock.now, nano_dollars=10**n)
            for n, key in enumerate(keys)
        ]
    )
    accounts.revoke_key(keys[1], actor=ACTOR)
    sums = store.ledger.sum_by_owner("key", keys, START)
    assert [sum_cost(sums[key]) for key in keys] == [1, 11, 111]
    sums = store.ledger.sum_by_owner("key", [keys[2]], START + 101)
    costs = {key: sum_cost(rows) for key, rows in sums.items()}
    assert costs == {keys[2]: 110}, "the first key had ended before"


# --- CSV export ----------------------------------------------------------------------------------


def export(store: Store, where: UsageFilter = ledger.ALL_USAGE) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO("".join(store.ledger.export_csv(where)), newline="")))


@RULES
def test_csv_cells_are_neither_formulas_nor_line_ends(store: Store) -> None:
    cells = {user: f"'{user}" for user in ("=1+2", "+49", "-1", "@SUM(A1)", "\t=1")}
    cells["a\rb"] = "a b"
    store.ledger.add_records([usage_row(user, user=user, nano_dollars=-1) for user in cells])
    lines = export(store)
    assert {line["user"] for line in lines} == set(cells.values())
    assert {line["nano_dollars"] for line in lines} == {"-1"}


def test_csv_has_every_record_and_field(store: Store) -> None:
    """Many records end at the same time, on both sides of a page boundary."""
    rows = [
        usage_row(f"r{number:05}", ended_at=START + number // 700, model='m,"x"\n')
        for number in range(2 * ledger.PAGE_ROWS + 100)
    ]
    store.ledger.add_records(rows[::-1])
    store.ledger.add_records([usage_row("later", ended_at=START + 1000)])
    where = UsageFilter(until=START + 1000)
    assert len(list(store.ledger.export_csv(where))) > 3
    lines = export(store, where)
    assert tuple(lines[0]) == UsageRecord.__struct_fields__
    assert lines[0]["started_at"].endswith(".000000Z")
    for line in lines:
        for field in ("started_at", "ended_at"):
            line[field] = str(datetime.fromisoformat(line[field]).timestamp())
    assert [msgspec.convert(line, UsageRecord, strict=False) for line in lines] == rows


@pytest.mark.parametrize("database_kind", ["sqlite"])
def test_late_page_reads_no_more_rows_than_an_early_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export of several months has thousands of pages."""
    monkeypatch.setattr(ledger, "PAGE_ROWS", 50)
    rows = [usage_row(f"r{number:05}", ended_at=START + number) for number in range(5000)]
    store.ledger.add_records(rows)
    rows_by_page, queries = [], 0
    where = UsageFilter(since=START, until=START + len(rows))
    with count_rows_read() as rows_read:
        for page in store.ledger.iter_records(where):
            assert len(page) == 50
            rows_by_page.append(max(rows_read[queries:]))
            queries = len(rows_read)
    assert len(rows_by_page) == 100
    assert rows_by_page[-2] < 2 * rows_by_page[1]


def test_rare_records_are_found_in_pages_that_read_a_bounded_number_of_rows(
    store: Store, database_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_SCANNED_ROWS", 100)
    rows = [
        usage_row(
            f"r{number:04}",
            ended_at=START + number // 2,
            started_at=START + number // 2 - (60 if number in {3, 333} else 1),
        )
        for number in range(1000)
    ]
    store.ledger.add_records(rows)
    found, pages, before = [], 0, None
    with count_rows_read() as rows_read:
        while before is not None or not pages:
            page = store.ledger.list_latest(min_duration_s=30.0, before=before, limit=1)
            found += [record.request for record in page.records]
            pages, before = pages + 1, page.before
    assert found == ["r0333", "r0003"]
    assert 10 <= pages <= 13
    if database_kind == "sqlite":  # PostgreSQL reads the whole of a table as small as this one
        assert max(rows_read) < 500
    everything = store.ledger.list_latest(limit=1000)
    assert [record.request for record in everything.records] == [
        row.request for row in reversed(rows)
    ]


@pytest.mark.parametrize("is_descending", [True, False])
def test_latest_records_are_sorted_in_pages(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_descending: bool
) -> None:
    monkeypatch.setattr(ledger, "MAX_SCANNED_ROWS", 40)
    rows = [
        usage_row(
            f"r{number:04}",
            ended_at=START + number,
            started_at=START + number - 0.1 * (number * 7 % 5),
            nano_dollars=number * 11 % 13,
            model="a" if number % 4 else "b",
        )
        for number in range(60)
    ]
    store.ledger.add_records(rows)
    quantities: dict[RecordOrder, Callable[[UsageRecord], float]] = {
        "duration_s": lambda row: row.ended_at - row.started_at,
        "nano_dollars": lambda row: row.nano_dollars,
    }
    for order, quantity in quantities.items():
        found: list[UsageRecord] = []
        has_more = True
        while has_more:
            page = store.ledger.list_sorted(
                UsageFilter(model="a"),
                order,
                is_descending=is_descending,
                after=found[-1] if found else None,
                limit=7,
            )
            found, has_more = [*found, *page.records], page.has_more
            assert page.searched_from == rows[20].ended_at
        expected = [row for row in rows[20:] if row.model == "a"]
        expected.sort(
            key=lambda row: (quantity(row), row.ended_at, row.request),
            reverse=is_descending,
        )
        assert found == expected
