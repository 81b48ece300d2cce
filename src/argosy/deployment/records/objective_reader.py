"""Reads the counts of service level objectives from the store, and evaluates budgets and burn rates."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection

import msgspec

from argosy.policy.objectives import (
    HOUR_S,
    SLOT_S,
    Budget,
    BudgetImpact,
    CountHistory,
    Counts,
    Evaluation,
    Objective,
    ReportCoverage,
    evaluate,
    explain,
)
from argosy.store import MissDetails, ObjectiveHours

SETTLE_S = 3
"""Time that gateways need to write a slot after its end."""
HISTORY_S = 73 * HOUR_S
"""Time of which slots are read: the longest window of burn rates, and the hour in which it starts."""
LATE_S = 300
"""Time at the start of an hour in which the hour before is read again."""
COVERAGE_S = 7 * HOUR_S
"""Time of which reports are read: the longest of the short windows, and the hour in which it starts."""
BUDGET_INTERVAL_S = 30.0
"""Interval at which budgets are read."""


class ObjectiveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of an objective."""

    objective: Objective
    evaluation: Evaluation
    budget: Budget
    problem: str
    """Why the counts are not complete, so that nothing can be decided; empty if they are."""

    @property
    def remaining(self) -> float | None:
        """Part of the budget that is left; None if it is not known."""
        return self.budget.remaining(self.objective)

    @property
    def explanation(self) -> str:
        """Sentences that explain burn rate and budget."""
        return explain(self.objective, self.evaluation, self.budget)


class ObjectiveReader:
    """Reads and evaluates the objectives of one fleet. Thread-safe. Every call may block on the database.

    The first call reads three days, and later ones the current hour and the one before.
    """

    def __init__(self, store: ObjectiveHours, fleet: str) -> None:
        self._store = store
        self._fleet = fleet
        self._lock = threading.Lock()
        self._histories: defaultdict[str, CountHistory] = defaultdict(CountHistory)
        self._reports: defaultdict[str, dict[int, bool]] = defaultdict(dict)
        self._whole_read_at = float("-inf")
        self._budgets: dict[Objective, Budget] = {}
        self._budgets_read_at = float("-inf")

    def read(self, objectives: Collection[Objective], now: float) -> list[ObjectiveStatus]:
        """Return the state of objectives at `now`, in seconds since the epoch.

        Raises:
            StoreError: The store cannot be used.
        """
        end = int(now - SETTLE_S) // SLOT_S * SLOT_S
        with self._lock:
            self._read_slots(end)
            budgets = self._read_budgets(objectives, now)
            coverage = ReportCoverage(self._reports)
            problem = coverage.find_problem(end)
            return [
                ObjectiveStatus(
                    objective=each,
                    evaluation=evaluate(
                        each, self._histories[each.id], coverage, budgets[each], end
                    ),
                    budget=budgets[each],
                    problem=problem,
                )
                for each in objectives
            ]

    def read_details(self, objective: Objective, now: float) -> MissDetails:
        """Return what the misses within the window of an objective have in common.

        Raises:
            StoreError: The store cannot be used.
        """
        since = int(now - objective.window_s) // HOUR_S * HOUR_S
        details = self._store.read_details(self._fleet, since, [objective.id])
        return details.get(objective.id) or MissDetails()

    def read_budgets(
        self, objectives: Collection[Objective], now: float
    ) -> dict[Objective, float | None]:
        """Return the part of each budget that is left; None if it is not known.

        Raises:
            StoreError: The store cannot be used.
        """
        with self._lock:
            budgets = self._read_budgets(objectives, now)
        return {each: budgets[each].remaining(each) for each in objectives}

    def read_impact(
        self, objectives: Collection[Objective], since: float, now: float
    ) -> list[BudgetImpact]:
        """Return what each objective has lost since a time of the last three days.

        Raises:
            StoreError: The store cannot be used.
        """
        end = int(now - SETTLE_S) // SLOT_S * SLOT_S
        start = int(max(since, now - HISTORY_S)) // SLOT_S * SLOT_S
        with self._lock:
            self._read_slots(end)
            budgets = self._read_budgets(objectives, now)
            misses = {
                each: self._histories[each.id].count(start, end).misses for each in objectives
            }
        return [
            BudgetImpact(
                objective=each.name,
                misses=misses[each],
                spent=budgets[each].spent_by(each, misses[each]),
                remaining=budgets[each].remaining(each),
            )
            for each in objectives
        ]

    def _read_slots(self, end: int) -> None:
        """Read the hours that may have changed. A gateway without the store may write older ones later."""
        monotonic, hour = time.monotonic(), end - end % HOUR_S
        is_whole = monotonic - self._whole_read_at >= HOUR_S
        is_new_hour = end - hour < LATE_S
        since = hour - (HISTORY_S if is_whole else HOUR_S if is_new_hour else 0)
        rows = defaultdict(list)
        reports: defaultdict[str, dict[int, bool]] = defaultdict(dict)
        for row in self._store.read_slots(self._fleet, since):
            if row.objective:
                rows[row.objective, row.hour].append(row.counts)
            elif row.hour >= hour - COVERAGE_S:
                for slot, stopped in zip(row.counts.slots, row.counts.misses, strict=True):
                    reports[row.gateway][row.hour + slot * SLOT_S] = bool(stopped)
        if is_whole:
            self._histories.clear()
            self._reports.clear()
            self._whole_read_at = monotonic
        for (objective, start), parts in rows.items():
            self._histories[objective].replace_hour(start, parts)
        for gateway, slots in reports.items():
            self._reports[gateway].update(slots)

    def _read_budgets(
        self, objectives: Collection[Objective], now: float
    ) -> dict[Objective, Budget]:
        monotonic = time.monotonic()
        is_known = all(each in self._budgets for each in objectives)
        if is_known and monotonic - self._budgets_read_at < BUDGET_INTERVAL_S:
            return self._budgets
        by_window: defaultdict[float, list[Objective]] = defaultdict(list)
        for each in objectives:
            by_window[each.window_s].append(each)
        budgets = {}
        for window_s, members in by_window.items():
            since = int(now - window_s) // HOUR_S * HOUR_S
            ids = [each.id for each in members]
            sums = self._store.sum_counts(self._fleet, since, ids)
            details = self._store.read_details(self._fleet, since, ids)
            for each in members:
                causes = details[each.id].causes if each.id in details else {}
                budgets[each] = Budget(Counts(*sums.get(each.id, ())), causes)
        self._budgets, self._budgets_read_at = budgets, monotonic
        return budgets
