"""Archive of usage records: sums of reports, single rows, and what is found in damaged archives."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
from tests.support.usage_rows import usage_row

from argosy.store import ReportGroup, Store, UsageFilter, UsageRecord, parse_report_groups
from argosy.usage_archive import UsageArchive, UsageArchiveError

pytest.importorskip("duckdb")
DAY_S = 86_400
START = 1_735_689_600.0
GROUPS: list[list[ReportGroup]] = [
    [],
    *(parse_report_groups(each) for each in ("day", "organisation", "project,key", "model,asked")),
    parse_report_groups("day,organisation,project,key,user,model,asked,route,replica"),
]


def year_of_usage(days: int) -> list[UsageRecord]:
    """Return requests of two organisations with odd prices, also at both ends of each day."""
    chance = random.Random(7)
    rows = []
    for number in range(days * 14):
        organisation = chance.choice(("org_a", "org_a", "org_b"))
        second = chance.choice((0.0, 86_399.999, chance.uniform(0, DAY_S)))
        rows.append(
            usage_row(
                f"r{number}",
                organisation=organisation,
                project=f"{organisation}_{chance.randrange(2)}",
                user=chance.choice(("", 'Zoë, "the" first\n')),
                model=chance.choice(("big", "small")),
                status=chance.choice(("completed", "failed")),
                ended_at=START + number // 14 * DAY_S + second,
                nano_dollars=chance.choice((0, 1, 333_333_333, 2**40 + 1)),
            )
        )
    return rows


def by_request(pages: Iterable[list[UsageRecord]]) -> list[UsageRecord]:
    return sorted(chain.from_iterable(pages), key=lambda row: row.request)


@pytest.mark.parametrize(
    "days", [6, pytest.param(365, marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)])]
)
def test_sums_and_rows_are_the_same_after_a_move(store: Store, tmp_path: Path, days: int) -> None:
    rows, ledger = year_of_usage(days), store.ledger
    ledger.add_records(rows)
    filters = (
        UsageFilter(),
        UsageFilter(project="org_a_1"),
        UsageFilter(since=START + DAY_S, until=START + 4 * DAY_S, organisation="org_b"),
    )
    before = [(ledger.report(groups, each)) for groups in GROUPS for each in filters]
    listed = [by_request(ledger.iter_records(each)) for each in filters]
    archive = UsageArchive(ledger, str(tmp_path / "archive"))
    kept = START + (days - 2) * DAY_S
    moved = archive.move(kept + 5)
    assert moved == sum(row.ended_at < kept for row in rows)
    assert [ledger.report(groups, each) for groups in GROUPS for each in filters] == before
    assert [by_request(archive.iter_records(each)) for each in filters] == listed
    for_one = UsageArchive(ledger.for_organisation("org_b"), str(tmp_path / "archive"))
    own = [row for row in by_request([rows]) if row.organisation == "org_b"]
    assert by_request(for_one.iter_records()) == own
    assert archive.move(kept + 5) == 0
    late = usage_row("late", ended_at=START + 5, nano_dollars=3)
    ledger.add_records([late])
    assert archive.move(kept) == 1
    assert by_request(archive.iter_records()) == by_request([[*rows, late]])
    assert ledger.report()[0].nano_dollars == sum(row.nano_dollars for row in rows) + 3


@pytest.mark.parametrize("database_kind", ["sqlite"])
def test_damaged_or_missing_parts_are_named_and_move_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = store.ledger
    ledger.add_records(year_of_usage(2))
    archive = UsageArchive(ledger, str(tmp_path / "archive"))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "duckdb", None)
        with pytest.raises(UsageArchiveError, match=r"needs DuckDB: .*\[cold\]"):
            archive.move(START + 2 * DAY_S)
    (tmp_path / "archive").write_text("a file")
    with pytest.raises(UsageArchiveError, match="archive cannot be used"):
        archive.move(START + 2 * DAY_S)
    (tmp_path / "archive").unlink()
    assert ledger.list_parts() == []
    assert archive.move(START + 2 * DAY_S) == 28
    path = tmp_path / "archive" / ledger.list_parts()[0].key
    content = path.read_bytes()
    path.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
    with pytest.raises(UsageArchiveError, match=f"{path.name} in .* is damaged"):
        list(archive.iter_records())
    path.unlink()
    with pytest.raises(UsageArchiveError, match=f"{path.name} is not in"):
        list(archive.iter_records())
