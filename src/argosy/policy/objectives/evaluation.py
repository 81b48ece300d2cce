"""Evaluates one objective: the budget that is left, the burn rates in all windows, and sentences that explain them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from argosy.policy.objectives.burn_rates import BURN_WINDOWS, OUTAGE_WINDOW, BurnWindow
from argosy.policy.objectives.classification import SLOW
from argosy.policy.objectives.count_history import HOUR_S, CountHistory, Counts
from argosy.policy.objectives.coverage import ReportCoverage
from argosy.policy.objectives.objective import Objective

MIN_BUDGET_REQUESTS = 100
"""Fewer requests within the window say nothing about a budget."""


class Budget(NamedTuple):
    """Counts of an objective within its window."""

    counts: Counts
    causes: Mapping[str, int] = {}
    """Misses by cause."""

    def remaining(self, objective: Objective) -> float | None:
        """Return the part of the budget that is left, from 1 to below 0; None with too few requests to know."""
        if self.counts.requests < MIN_BUDGET_REQUESTS:
            return None
        return 1.0 - self.counts.miss_rate / objective.budget_share

    def spent_by(self, objective: Objective, misses: int) -> float | None:
        """Return the part of the whole budget that some of its misses are; None with too few requests to know."""
        if self.counts.requests < MIN_BUDGET_REQUESTS:
            return None
        return misses / (self.counts.requests * objective.budget_share)


class BudgetImpact(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an objective's error budget that was spent since a time."""

    objective: str
    misses: int
    """Misses since then, at most of the last three days."""
    spent: float | None = None
    """Part of the whole budget that these misses are; None with too few requests to know."""
    remaining: float | None = None
    """Part of the budget that is left, which may be negative; None if it is not known."""


class Evaluation(NamedTuple):
    """Result for one objective at one time. Of a condition, None means that too few reports are there to decide."""

    is_paging: bool | None
    """Whether the budget burns so fast that a person has to act now."""
    is_ticketing: bool | None
    """Whether it burns so fast that a person has to act within days."""
    is_outage: bool | None
    """Whether half of all requests miss."""
    burn_rate: float
    """Multiple of the rate at which the budget lasts for its window, over the last hour."""
    empty_in_s: float | None
    """Time until the budget is spent at this rate; None if it is not, or if the budget is unknown."""
    last_hour: Counts


def evaluate(
    objective: Objective,
    history: CountHistory,
    coverage: ReportCoverage,
    budget: Budget,
    end: int,
) -> Evaluation:
    """Evaluate the windows that end at `end`, a multiple of `SLOT_S` in seconds since the epoch."""

    def is_firing(severity: str) -> bool | None:
        windows = [each for each in BURN_WINDOWS if each.severity == severity]
        results = [_is_firing(each, objective, history, coverage, end) for each in windows]
        return True if True in results else None if None in results else False

    last_hour = history.count(end - HOUR_S, end)
    burn_rate = last_hour.miss_rate / objective.budget_share
    remaining = budget.remaining(objective)
    empty_in_s = None
    if remaining is not None and burn_rate > 0:
        empty_in_s = max(0.0, remaining) * objective.window_s / burn_rate
    return Evaluation(
        is_paging=is_firing("page"),
        is_ticketing=is_firing("ticket"),
        is_outage=_is_firing(OUTAGE_WINDOW, objective, history, coverage, end),
        burn_rate=burn_rate,
        empty_in_s=empty_in_s,
        last_hour=last_hour,
    )


def _is_firing(
    window: BurnWindow,
    objective: Objective,
    history: CountHistory,
    coverage: ReportCoverage,
    end: int,
) -> bool | None:
    if not coverage.covers(end - window.short_s, end):
        return None
    threshold = window.max_miss_rate(objective.budget_share)
    short = history.count(end - window.short_s, end)
    if not short.miss_rate > threshold:
        return False
    long = history.count(end - window.long_s, end)
    return long.miss_rate > threshold and long.misses >= window.min_misses


def explain(objective: Objective, evaluation: Evaluation, budget: Budget) -> str:
    """Return the sentences that explain the burn rate and the budget."""
    unit = "tokens" if objective.sli == "itl" else "requests"
    hour = evaluation.last_hour
    if not hour.requests:
        recent = f"No {unit} in the last hour."
    elif not hour.misses:
        recent = f"All {hour.requests:,} {unit} of the last hour were good."
    else:
        recent = f"{hour.misses:,} of {hour.requests:,} {unit} missed in the last hour"
        recent += f", {evaluation.burn_rate:.3g} times the rate that the budget permits."
    remaining = budget.remaining(objective)
    days = f"{objective.window_s / 86_400:g}-day"
    if remaining is None:
        state = f"The {days} budget is unknown before {MIN_BUDGET_REQUESTS} {unit}."
    elif remaining <= -1:
        state = f"The {days} budget is spent {1 - remaining:.0f} times over."
    elif remaining <= 0:
        state = f"The {days} budget is spent ({remaining:.0%} left)."
    elif evaluation.empty_in_s is None or evaluation.empty_in_s > objective.window_s:
        state = f"{remaining:.0%} of the {days} budget is left."
    else:
        left = format_duration(evaluation.empty_in_s)
        state = f"At this rate the {days} budget ({remaining:.0%} left) is gone in {left}."
    return f"{recent} {state}{_explain_causes(budget)}"


def _explain_causes(budget: Budget) -> str:
    if not budget.causes:
        return ""
    cause = max(sorted(budget.causes), key=lambda each: budget.causes[each])
    share = budget.causes[cause] / sum(budget.causes.values())
    reason = "were too slow" if cause == SLOW else f"ended with {cause}"
    return f" {share:.0%} of its misses {reason}."


def format_duration(duration_s: float) -> str:
    """Return a time in its two largest units, such as `2 h 10 min`."""
    minutes = math.ceil(duration_s / 60)
    parts = {"d": minutes // 1440, "h": minutes // 60 % 24, "min": minutes % 60}
    if parts["d"]:
        del parts["min"]
    return " ".join(f"{count} {unit}" for unit, count in parts.items() if count) or "0 min"
