"""The ledger on both databases: each request counts once, and every sum is that of its rows."""

from __future__ import annotations

import csv
import io
import itertools
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, event
from tests.integration.store.conftest import START, Clock, at_once
from tests.support.usage_rows import usage_row

from argosy.store import (
    ReportGroup,
    Store,
    UsageFilter,
    UsageRecord,
    UsageReportRow,
    open_store,
    parse_report_groups,
)
from argosy.store import ledger as usage_module
from argosy.store.ledger import PAGE_ROWS

DAY = 86_400.0
MIDNIGHT = START // DAY * DAY
WAYS = ("model", "asked", "route", "replica")
OWNERS = ("organisation", "project", "key", "user")
GROUPS: tuple[ReportGroup, ...] = ("day", *OWNERS, *WAYS)  # type: ignore[assignment]
COUNTED = ("input_tokens", "cached_tokens", "output_tokens", "nano_dollars")

names = st.sampled_from(["", "a", "b"])
counts = st.integers(0, 2**40)
facts = st.fixed_dictionaries(
    {
        **dict.fromkeys(("project", "key", "user", *WAYS), names),
        **dict.fromkeys(COUNTED, counts),
        "ended_at": st.floats(MIDNIGHT - DAY, MIDNIGHT + 2 * DAY).map(lambda at: round(at, 3)),
    }
)
filters = st.builds(
    lambda way, **others: UsageFilter(**way, **others),
    way=st.dictionaries(st.sampled_from(WAYS), names, max_size=2),
    since=st.none() | st.sampled_from([MIDNIGHT - 1, MIDNIGHT, MIDNIGHT + 9000.5]),
    until=st.none() | st.sampled_from([MIDNIGHT, MIDNIGHT + DAY, MIDNIGHT + DAY + 0.5]),
    project=st.none() | names,
    user=st.none() | names,
)
groupings = st.lists(st.sampled_from(GROUPS), max_size=4, unique=True)
fresh = itertools.count()

on_one_store = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def rows_of(organisation: str, drawn: Sequence[dict[str, object]]) -> list[UsageRecord]:
    return [
        usage_row(f"{organisation}-{number}", organisation=organisation, **fields)
        for number, fields in enumerate(drawn)
    ]


def fold(
    rows: Sequence[UsageRecord],
    groups: Sequence[ReportGroup],
    counts: Callable[[UsageRecord], bool],
) -> list[UsageReportRow]:
    """The report, as its definition says."""
    sums: dict[tuple[str, ...], dict[str, int]] = {} if groups else {(): _none()}
    for row in filter(counts, rows):
        fields = {**msgspec.structs.asdict(row), "day": day_of(row)}
        total = sums.setdefault(tuple(fields[group] for group in groups), _none())
        total["requests"] += 1
        for name in COUNTED:
            total[name] += fields[name]
    return [
        UsageReportRow(**dict(zip(groups, group, strict=True)), **sums[group])  # type: ignore[arg-type]
        for group in sorted(sums)
    ]


def _none() -> dict[str, int]:
    return dict.fromkeys(("requests", *COUNTED), 0)


def day_of(row: UsageRecord) -> str:
    return datetime.fromtimestamp(row.ended_at, UTC).date().isoformat()


def passes(row: UsageRecord, where: UsageFilter) -> bool:
    owned = all(getattr(where, name) in {None, getattr(row, name)} for name in (*OWNERS, *WAYS))
    return (
        owned
        and (where.since is None or row.ended_at >= where.since)
        and (where.until is None or row.ended_at < where.until)
    )


def test_a_row_counts_once(store: Store) -> None:
    rows = [usage_row(f"r{number}") for number in range(1203)]
    assert store.ledger.add_records(rows[:700]) == 700
    assert store.ledger.add_records([*rows, *rows[:3]]) == 503
    assert store.ledger.add_records([]) == 0
    assert store.ledger.report() == [
        UsageReportRow(
            requests=1203,
            input_tokens=12_030,
            cached_tokens=4812,
            output_tokens=3609,
            nano_dollars=842_100,
        )
    ]


def test_rows_offered_by_several_processes_count_once(store: Store, url: str) -> None:
    """Each offers 200, of which the next one has 100 as well."""
    new = at_once(3, "add", url, 100, 200)
    assert sum(map(int, new)) == 400
    assert store.ledger.report()[0].requests == 400


@on_one_store
@given(drawn=st.lists(facts, max_size=30), groups=groupings, where=filters)
def test_a_report_is_a_fold_over_the_rows(
    store: Store, drawn: list[dict[str, object]], groups: list[ReportGroup], where: UsageFilter
) -> None:
    organisation = f"org{next(fresh)}"
    rows = rows_of(organisation, drawn)
    assert store.ledger.add_records(rows) == len(rows)
    where = msgspec.structs.replace(where, organisation=organisation)
    expected = fold(rows, groups, lambda row: passes(row, where))
    assert store.ledger.report(groups, where) == expected
    kept = sorted(rows, key=lambda row: (row.ended_at, row.request))
    assert list(itertools.chain(*store.ledger.iter_records(where))) == [
        row for row in kept if passes(row, where)
    ]


@on_one_store
@given(drawn=st.lists(facts, max_size=30), groups=groupings, days=st.integers(0, 3))
def test_totals_stay_when_rows_are_forgotten(
    store: Store, drawn: list[dict[str, object]], groups: list[ReportGroup], days: int
) -> None:
    organisation = f"org{next(fresh)}"
    rows = rows_of(organisation, drawn)
    store.ledger.add_records(rows[::2])
    store.ledger.roll_up(MIDNIGHT + days * DAY)
    store.ledger.add_records(rows[1::2])  # late ones, of days that have been forgotten
    before = MIDNIGHT + days * DAY + 0.5
    store.ledger.roll_up(before)
    where = UsageFilter(organisation=organisation)
    assert store.ledger.report(groups, where) == fold(rows, groups, lambda _: True)
    kept = list(itertools.chain(*store.ledger.iter_records(where)))
    assert {row.request for row in kept} == {
        row.request for row in rows if row.ended_at >= before // DAY * DAY
    }
    whole_days = UsageFilter(organisation=organisation, since=MIDNIGHT, until=MIDNIGHT + DAY)
    assert store.ledger.report(groups, whole_days) == fold(
        rows, groups, lambda row: passes(row, whole_days)
    )


def test_forgetting_tells_how_many_rows_went(store: Store) -> None:
    store.ledger.add_records(
        [usage_row(f"r{n}", ended_at=MIDNIGHT + n * DAY / 2) for n in range(6)]
    )
    assert store.ledger.roll_up(MIDNIGHT) == 0
    assert store.ledger.roll_up(MIDNIGHT + 2 * DAY) == 4
    assert store.ledger.roll_up(MIDNIGHT + 2 * DAY) == 0


def test_others_write_while_much_is_forgotten_and_totals_stay(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[UsageReportRow]] = []

    def others(_: float) -> None:
        store.accounts.create_organisation(f"meanwhile {len(seen)}", actor="test")
        seen.append(store.ledger.report(["day", "model"]))

    monkeypatch.setattr(usage_module, "ROLL_UP_BATCH_ROWS", 3)
    monkeypatch.setattr(time, "sleep", others)
    ended = [MIDNIGHT + n // 2 for n in range(10)] + [MIDNIGHT + DAY] * 8
    store.ledger.add_records([usage_row(f"r{n}", ended_at=at) for n, at in enumerate(ended)])
    before = store.ledger.report(["day", "model"])
    assert store.ledger.roll_up(MIDNIGHT + 2 * DAY) == len(ended)
    assert len(seen) == 2
    assert all(told == before for told in [*seen, store.ledger.report(["day", "model"])])
    assert list(store.ledger.iter_records()) == []


def test_what_an_owner_spent(store: Store) -> None:
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
    spent = store.ledger.sum_by_owner("key", ["k", "other", "nobody"], START - 5)
    assert {key: money(rows) for key, rows in spent.items()} == {"k": 7, "other": 8}
    (whole,) = store.ledger.sum_by_owner("organisation", ["org_a"], START - 5).values()
    assert sum(row.requests for row in whole) == 4
    assert not store.ledger.sum_by_owner("user", ["nobody"], 0)


def test_what_more_owners_spent_than_are_asked_for_at_a_time(store: Store) -> None:
    keys = [f"k{number}" for number in range(12_000)]
    store.ledger.add_records([usage_row(key, key=key, nano_dollars=1) for key in keys])
    spent = store.ledger.sum_by_owner("key", keys, 0)
    assert {key: money(rows) for key, rows in spent.items()} == dict.fromkeys(keys, 1)


def test_what_got_nothing_because_of_us_is_not_spent(store: Store) -> None:
    nothing: dict[str, Any] = {"key": "k", "input_tokens": 0, "output_tokens": 0}
    store.ledger.add_records(
        [
            usage_row("refused", status="refused", **nothing),
            usage_row("left the queue", status="cancelled", replica="", **nothing),
            usage_row("left its replica", status="cancelled", **nothing),
            usage_row("broke", **nothing | {"status": "failed", "output_tokens": 1}),
            usage_row("died with us", status="interrupted", replica="", key="k"),
        ]
    )
    for _ in range(2):
        ((counted,),) = store.ledger.sum_by_owner("key", ["k"], 0).values()
        assert counted.requests == 3
        (whole,) = store.ledger.report()
        assert whole.requests == 5
        store.ledger.roll_up(START + DAY)


def test_what_a_key_spent_is_also_what_it_was_rotated_from_did(store: Store, clock: Clock) -> None:
    accounts = store.accounts
    organisation = accounts.create_organisation("o", actor="me").id
    project = accounts.create_project(organisation, "p", actor="me").id
    line = [accounts.create_key(project, "k", actor="me")[0].id]
    for _ in range(2):
        clock.now += 100
        line.append(accounts.rotate_key(line[-1], 0, actor="me")[0].id)
    store.ledger.add_records(
        [
            usage_row(key, key=key, ended_at=clock.now, nano_dollars=10**n)
            for n, key in enumerate(line)
        ]
    )
    accounts.revoke_key(line[1], actor="me")
    spent = store.ledger.sum_by_owner("key", line, START)
    assert [money(spent[key]) for key in line] == [1, 11, 111]
    spent = store.ledger.sum_by_owner("key", [line[2]], START + 101)
    assert {key: money(rows) for key, rows in spent.items()} == {line[2]: 110}, (
        "the first had ended"
    )


def money(rows: Sequence[UsageReportRow]) -> int:
    return sum(row.nano_dollars for row in rows)


@pytest.mark.parametrize(
    ("user", "told"),
    [
        *((user, f"'{user}") for user in ("=1+2", "+49", "-1", "@SUM(A1)", "\t=1")),
        ("a\rb", "a b"),
    ],
)
def test_no_cell_of_a_csv_is_a_formula_or_ends_the_line(store: Store, user: str, told: str) -> None:
    store.ledger.add_records([usage_row("1", user=user, nano_dollars=-1)])
    (line,) = csv.DictReader(io.StringIO("".join(store.ledger.export_csv()), newline=""))
    assert (line["user"], line["nano_dollars"]) == (told, "-1")


def test_reports_say_what_they_can_be_by() -> None:
    assert parse_report_groups(" model,day, model,") == ["model", "day"]
    with pytest.raises(ValueError, match=r"A report can be grouped by day, .*not by 'week'"):
        parse_report_groups("day,week")


def test_csv_has_every_row_and_field(store: Store) -> None:
    """Many end at the same moment, on both sides of a page's end."""
    rows = [
        usage_row(f"r{number:05}", ended_at=START + number // 700, model='m,"x"\n')
        for number in range(2 * PAGE_ROWS + 100)
    ]
    store.ledger.add_records(rows[::-1])
    store.ledger.add_records([usage_row("later", ended_at=START + 1000)])
    pieces = list(store.ledger.export_csv(UsageFilter(until=START + 1000)))
    assert len(pieces) > 3
    header, *lines = csv.reader(io.StringIO("".join(pieces), newline=""))
    assert tuple(header) == UsageRecord.__struct_fields__
    cells = [dict(zip(header, line, strict=True)) for line in lines]
    for cell in cells:
        for moment in ("started_at", "ended_at"):
            cell[moment] = str(datetime.fromisoformat(cell[moment]).timestamp())
    assert [msgspec.convert(cell, UsageRecord, strict=False) for cell in cells] == rows


def test_a_late_page_of_a_csv_takes_no_more_than_an_early_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Months of rows have thousands of pages; SQLite tells the steps that one took."""
    monkeypatch.setattr(usage_module, "PAGE_ROWS", 50)
    store = open_store(f"sqlite:///{tmp_path}/store.db")
    store.migrate()
    rows = [usage_row(f"r{number:05}", ended_at=START + number) for number in range(5000)]
    store.ledger.add_records(rows)
    steps = list[int]()

    def count() -> None:
        steps[-1] += 1

    def begin(connection: Connection, *_: object) -> None:
        steps.append(0)
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(count, 10)

    event.listen(Engine, "before_cursor_execute", begin)
    taken = []
    try:
        for page in store.ledger.iter_records(UsageFilter(since=START, until=START + len(rows))):
            assert len(page) == 50
            taken.append(max(steps))
            steps.clear()
    finally:
        event.remove(Engine, "before_cursor_execute", begin)
        store.close()
    assert len(taken) == 100
    assert taken[-2] < 2 * taken[1]


def test_csv_tells_moments_as_people_and_programs_read_them(store: Store) -> None:
    row = usage_row("1", started_at=0.0, ended_at=START + 0.25)
    store.ledger.add_records([row])
    (line,) = csv.DictReader(io.StringIO("".join(store.ledger.export_csv())))
    assert line["started_at"] == "1970-01-01T00:00:00.000000Z"
    assert line["ended_at"].endswith(".250000Z")
    assert datetime.fromisoformat(line["ended_at"]) == datetime.fromtimestamp(row.ended_at, UTC)


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "é" * 3000, "x" * 9000, "' --", "\u202e"])
def test_no_text_keeps_its_batch_out(store: Store, text: str) -> None:
    names = dict.fromkeys((*OWNERS, *WAYS), text)
    assert store.ledger.add_records([usage_row("bad", **names), usage_row("good")]) == 2
    assert store.ledger.roll_up(START + 2 * DAY) == 2
    assert store.ledger.report()[0].requests == 2


def test_sums_may_be_large(store: Store) -> None:
    store.ledger.add_records([usage_row(str(number), nano_dollars=2**60) for number in range(7)])
    assert store.ledger.report()[0].nano_dollars == 7 * 2**60


def test_within_an_organisation_there_is_only_its_own_use(store: Store) -> None:
    later = MIDNIGHT + DAY + 1
    rows = [usage_row(f"r{n}", organisation=name) for n, name in enumerate("aabc")]
    rows.append(usage_row("r4", organisation="a", ended_at=later))
    store.ledger.add_records(rows)
    own = store.ledger.for_organisation("a")
    for _ in range(2):
        (total,) = own.report()
        assert total.requests == 3
        assert own.report(["organisation"]) == store.ledger.report(
            ["organisation"], UsageFilter(organisation="a")
        )
        assert own.report(["key"], UsageFilter(organisation="b")) == []
        store.ledger.roll_up(MIDNIGHT + DAY)  # and in the sums that are left
    assert [row.request for page in own.iter_records() for row in page] == ["r4"]
    assert len("".join(own.export_csv(UsageFilter(organisation="b"))).splitlines()) == 1


def test_a_report_has_no_more_rows_than_anybody_reads(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.store.ledger.MAX_REPORT_ROWS", 3)
    store.ledger.add_records([usage_row(f"r{number}", key=f"k{number}") for number in range(4)])
    assert len(store.ledger.report(["project"])) == 1
    with pytest.raises(ValueError, match="more than 3 rows"):
        store.ledger.report(["key"])
    assert sum(len(page) for page in store.ledger.iter_records()) == 4
