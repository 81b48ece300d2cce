"""Lesson on error budgets: the product's burn-rate alerts on a hard and a mild fault of the same fleet."""

from __future__ import annotations

import math
from collections import Counter

from msgspec.structs import replace

from argosy.bench import metric_values
from argosy.gateway import LessonFigure, LessonLine, LessonPlot, LessonRun
from argosy.lessons.measurement import POINTS, SEED, Observation, Values, Variant, describe_finding
from argosy.lessons.traffic import build_scenario, find_setting
from argosy.policy.objectives import (
    SLOT_S,
    Budget,
    CountHistory,
    HourCounts,
    Objective,
    ReportCoverage,
    evaluate,
)
from argosy.twin import Fault

HOUR_S = 3600
START_S = 1_000_000 * HOUR_S
"""Time of the run on the clock of the objective."""
HARD_PART = 4
"""How many times as long the mild fault lasts."""
HARD_FACTOR, MILD_FACTOR = 6.0, 2.0
SLOTS = 8
LIMIT_FACTOR = 1.5
"""Objective of the whole time of a request for each token, relative to a quiet fleet."""


def run_error_budget(lesson: str, values: Values) -> LessonRun:
    """Run both faults, and evaluate the objective at each point of the plots."""
    setting = find_setting(values, slots=SLOTS)
    mild_s = setting.duration_s * values["fault"] / 100
    scenario = build_scenario(setting, values["load"], 2)
    at_s = setting.duration_s / 5
    mild = Fault(kind="slow", at_s=at_s, duration_s=mild_s, factor=MILD_FACTOR)
    hard = replace(mild, duration_s=mild_s / HARD_PART, factor=HARD_FACTOR)
    faults = {
        "a long mild fault": (mild,),
        "a short hard fault": (hard, replace(hard, replica=1)),
    }
    seen = [
        Observation(Variant(label, replace(scenario, faults=each)))
        for label, each in faults.items()
    ]
    labels = tuple(faults)
    results = [_Evaluations(each, values["target"] / 100, at_s) for each in seen]
    x = tuple(round((index + 1) * seen[0].bucket_s, 3) for index in range(POINTS))
    figures = (
        LessonFigure("Budget that is left", "%", tuple(each.budget[-1] for each in results)),
        LessonFigure("Highest burn rate", "times", tuple(max(each.burn) for each in results)),
        LessonFigure(
            "Minutes until a person is paged", "min", tuple(each.paged_after for each in results)
        ),
        LessonFigure(
            "Requests that missed", "requests", tuple(float(each.misses) for each in results)
        ),
    )
    return LessonRun(
        lesson=lesson,
        values=dict(values),
        variants=labels,
        plots=(
            LessonPlot(
                title="Error budget that is left",
                unit="%",
                x=x,
                x_label="",
                lines=tuple(
                    LessonLine(label, tuple(each.budget))
                    for label, each in zip(labels, results, strict=True)
                ),
            ),
            LessonPlot(
                title="Burn rate of the last hour",
                unit="times",
                x=x,
                x_label="",
                lines=tuple(
                    LessonLine(label, tuple(each.burn))
                    for label, each in zip(labels, results, strict=True)
                ),
            ),
        ),
        figures=figures,
        finding=describe_finding(figures[2], labels),
        identity=f"seed {SEED}, hashes {', '.join(each.run.simulation.trace_hash[:8] for each in seen)}",
    )


class _Evaluations:
    """Evaluations of an objective over a run."""

    def __init__(self, seen: Observation, target: float, fault_at_s: float) -> None:
        quiet = [
            value
            for row in seen.completed
            if row.scheduled_s < fault_at_s
            for value in metric_values(row, "tpot")
        ]
        limit_ms = LIMIT_FACTOR * sorted(quiet)[len(quiet) // 2] if quiet else math.inf
        requests: Counter[int] = Counter()
        misses: Counter[int] = Counter()
        for row in seen.rows:
            slot = int(min(row.end_s, seen.duration_s)) // SLOT_S
            requests[slot] += 1
            tpot = metric_values(row, "tpot")
            misses[slot] += row.outcome == "error" or bool(tpot and tpot[0] > limit_ms)
        self.misses = sum(misses.values())
        objective = Objective(name="lesson", sli="latency", target=target, window_s=seen.duration_s)
        history, total = _build_history(requests, misses), sum(requests.values())
        allowed = max(1e-9, objective.budget_share * total)
        slots = range(0, int(seen.duration_s) + SLOT_S, SLOT_S)
        before = range(-24 * HOUR_S, 0, SLOT_S)
        coverage = ReportCoverage(
            {"twin": {START_S + at: False for each in (before, slots) for at in each}}
        )
        self.budget: list[float] = []
        self.burn: list[float] = []
        paged_at: int | None = None
        step = max(1, int(seen.bucket_s) // SLOT_S) * SLOT_S
        for index in range(POINTS):
            at = START_S + (index + 1) * int(seen.bucket_s) // SLOT_S * SLOT_S
            if paged_at is None:
                paged_at = _find_page(
                    objective, history, coverage, range(at - step + SLOT_S, at + 1, SLOT_S)
                )
            counts = history.count(START_S, at)
            evaluation = evaluate(objective, history, coverage, Budget(counts), at)
            self.budget.append(round(100.0 * (1.0 - counts.misses / allowed), 1))
            self.burn.append(round(evaluation.burn_rate, 2))
        self.paged_after = (
            None if paged_at is None else round((paged_at - START_S - fault_at_s) / 60, 1)
        )


def _find_page(
    objective: Objective, history: CountHistory, coverage: ReportCoverage, ends: range
) -> int | None:
    """Return the first of these times at which a person is paged."""
    for end in ends:
        evaluation = evaluate(
            objective, history, coverage, Budget(history.count(START_S, end)), end
        )
        if evaluation.is_paging or evaluation.is_outage:
            return end
    return None


def _build_history(requests: Counter[int], misses: Counter[int]) -> CountHistory:
    history = CountHistory()
    per_hour = HOUR_S // SLOT_S
    hours = sorted({slot // per_hour for slot in requests})
    for hour in hours:
        slots = sorted(slot for slot in requests if slot // per_hour == hour)
        history.replace_hour(
            START_S + hour * HOUR_S,
            [
                HourCounts(
                    [slot % per_hour for slot in slots],
                    [requests[slot] for slot in slots],
                    [misses[slot] for slot in slots],
                )
            ],
        )
    return history
