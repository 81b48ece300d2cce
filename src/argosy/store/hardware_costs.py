"""Costs of a fleet's hardware by day, as its controller records them, and their division among projects."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import msgspec
from sqlalchemy import select

from argosy.policy import HardwareUse, attribute_cost, weighted_tokens
from argosy.store import schema
from argosy.store.database import Database, conflict_aware_insert
from argosy.store.fleet_store import IDLE_TIMEOUT_S, FleetLease, require_leader
from argosy.store.ledger import DAY_S, MAX_REPORT_ROWS, Ledger, UsageFilter, UsageReportRow

_days = schema.hardware_days.c
CostOwner = tuple[str, str, str]
"""Model, organisation and project."""
_SUMS = ("replica_ms", "busy_ms", "nano_dollars")


class HardwareDay(HardwareUse, frozen=True, kw_only=True):
    """Cost of the replicas of one pool on one day."""

    day: int
    """Day since the epoch (UTC)."""
    pool: str
    model: str


class CostRow(msgspec.Struct, frozen=True):
    """A project's bill for a model, beside the cost that it caused. Both are in nano-dollars."""

    model: str
    organisation: str = ""
    project: str = ""
    """Empty for usage without a project, and for idle time."""
    is_idle: bool = False
    """Whether the row is the cost of the time in which replicas of the model ran no request."""
    billed: int = 0
    caused: int = 0


class DayDivision(NamedTuple):
    """Division of the cost of hardware of one day. Amounts are in nano-dollars, and sum to the cost."""

    caused: Mapping[CostOwner, int]
    service: Mapping[CostOwner, int]
    """Weighted tokens."""
    idle: Mapping[str, int]
    """Cost of the time in which replicas of a model ran no request, by model."""


class HardwareCosts:
    """Recorded costs of hardware. Every call may block on the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, lease: FleetLease, uses: Sequence[HardwareDay]) -> None:
        """Add costs to those of their days. Raises DeposedError, and adds nothing, if another controller leads."""
        with self._database.write_transaction(idle_timeout_s=IDLE_TIMEOUT_S) as connection:
            require_leader(connection, lease)
            for use in uses:
                insert = conflict_aware_insert(connection, schema.hardware_days)
                values = msgspec.structs.asdict(use) | {"fleet": lease.fleet}
                connection.execute(
                    insert.values(values).on_conflict_do_update(
                        index_elements=["day", "fleet", "pool", "model"],
                        set_={name: _days[name] + insert.excluded[name] for name in _SUMS},
                    )
                )

    def list_days(self, since: float, until: float) -> list[HardwareDay]:
        """Return the costs of the days that the time from `since` to before `until` touches, of all fleets, by day."""
        query = (
            select(*(_days[name] for name in HardwareDay.__struct_fields__))
            .where(_days.day >= int(since // DAY_S), _days.day < math.ceil(until / DAY_S))
            .order_by(_days.day)
        )
        with self._database.read_transaction() as connection:
            return [HardwareDay(**row._asdict()) for row in connection.execute(query)]


def compare_costs(
    ledger: Ledger, hardware: HardwareCosts, since: float, until: float
) -> list[CostRow]:
    """Return what projects were billed beside what they caused, for the days that the time range touches.

    The cost of busy replicas of a day is divided by weighted tokens: uncached input and output tokens. The sums of both
    columns are exact. Days without a recorded cost of hardware have only what was billed.

    Raises:
        ValueError: The result would have more than `MAX_REPORT_ROWS` rows.
    """
    costs = sum_hardware_days(hardware.list_days(since, until))
    billed: Counter[CostOwner] = Counter()
    caused: Counter[CostOwner] = Counter()
    idle: Counter[str] = Counter()
    for number, rows in _iter_days(ledger, since, until):
        for row in rows:
            billed[cost_owner(row)] += row.nano_dollars
        if len(billed) > MAX_REPORT_ROWS:
            raise ValueError(f"There are more than {MAX_REPORT_ROWS} rows. Choose a shorter time.")
        division = divide_day(rows, costs.pop(number, {}))
        caused.update(division.caused)
        idle.update(division.idle)
    for uses in costs.values():  # days without requests
        idle.update(divide_day([], uses).idle)
    return [
        *(
            CostRow(*owner, billed=cost, caused=caused[owner])
            for owner, cost in sorted(billed.items())
        ),
        *(
            CostRow(model, is_idle=True, caused=cost)
            for model, cost in sorted(idle.items())
            if cost
        ),
    ]


def sum_hardware_days(days: Iterable[HardwareDay]) -> dict[int, dict[str, HardwareUse]]:
    """Return the use of hardware by day and model, over all pools."""
    sums: dict[int, dict[str, HardwareUse]] = {}
    for day in days:
        models = sums.setdefault(day.day, {})
        models[day.model] = _add(models.get(day.model, HardwareUse()), day)
    return sums


def divide_day(rows: Iterable[UsageReportRow], uses: Mapping[str, HardwareUse]) -> DayDivision:
    """Divide the cost of hardware of a day among those who caused it.

    Args:
        rows: Usage of the day by model, organisation and project.
        uses: Use of hardware by model.
    """
    services: dict[str, dict[CostOwner, int]] = {model: {} for model in uses}
    for row in rows:
        services.setdefault(row.model or "", {})[cost_owner(row)] = count_service(row)
    caused: dict[CostOwner, int] = {}
    idle = {}
    for model, service in services.items():
        parts, idle[model] = attribute_cost(uses.get(model, HardwareUse()), service)
        caused |= parts
    by_owner = {owner: each for service in services.values() for owner, each in service.items()}
    return DayDivision(caused, by_owner, idle)


def cost_owner(row: UsageReportRow) -> CostOwner:
    """Return who caused the cost of a row."""
    return row.model or "", row.organisation or "", row.project or ""


def _iter_days(
    ledger: Ledger, since: float, until: float
) -> Iterator[tuple[int, list[UsageReportRow]]]:
    """Yield each day with usage, and its sums by model and project."""
    pages = ledger.iter_report(
        ("model", "organisation", "project"), UsageFilter(since=since, until=until)
    )
    rows = (row for page in pages for row in page)
    for day, group in groupby(rows, attrgetter("day")):
        start = datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp()
        yield int(start // DAY_S), list(group)


def count_service(row: UsageReportRow) -> int:
    """Return the weighted tokens by which the cost of busy replicas is divided."""
    uncached = max(0, row.input_tokens - row.cached_tokens)
    return int(weighted_tokens(uncached, row.output_tokens))


def _add(total: HardwareUse, use: HardwareUse) -> HardwareUse:
    return HardwareUse(**{name: getattr(total, name) + getattr(use, name) for name in _SUMS})
