"""Measurement of a lesson's variants: runs of the twin, and the plots and figures that are read from each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from argosy.bench import RequestRow, compute_stats, metric_values
from argosy.gateway import LessonFigure, LessonGoal, LessonLine, LessonPlot, LessonRun
from argosy.twin import Plan, Scenario, TwinRun, make_plan

SEED = 1
POINTS = 60
"""Points of a plot."""
SLOW_FACTOR = 1.5
"""A slow request takes more than this many times the first quartile of the time for each token."""
Values = Mapping[str, int]


class Variant(NamedTuple):
    """Scenario that a lesson compares with others."""

    label: str
    scenario: Scenario
    plan: Plan | None = None
    """Requests and faults in place of those that the scenario draws."""
    measured: range | None = None
    """Numbers of the requests that are measured; None for all."""
    dollars_per_hour: float = 2.0
    """Price of a replica."""


class _Sample(NamedTuple):
    """State of the fleet at one time."""

    replicas: int
    running: int
    waiting: int
    kv_percent: float


class Observation:
    """A run of a variant, and what was seen of it."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        scenario = variant.scenario
        self.plan = variant.plan or make_plan(scenario, SEED)
        self.run = TwinRun(scenario, SEED, self.plan)
        self.duration_s = scenario.duration_s
        self.bucket_s = scenario.duration_s / POINTS
        self.samples: list[_Sample] = []
        self.run.simulation.call_later(self.bucket_s, self._sample)
        failure = self.run.run()
        if failure:
            raise ValueError(f"an invariant did not hold: {failure}")
        rows = self.run.gateway.rows
        measured = variant.measured
        self.rows = [row for row in rows if measured is None or row.index in measured]
        self.completed = [row for row in self.rows if row.outcome == "ok"]

    def _sample(self) -> None:
        gateway, fleet = self.run.gateway, self.run.fleet
        ready = [each for each in fleet.processes.values() if each.state == "ready"]
        waiting = sum(len(each.queue) for each in gateway.core.queues.values())
        waiting += sum(len(each.scheduler.queue) for each in ready)
        usage = sum(each.kv_usage_ratio for each in ready) / max(1, len(ready))
        running = len(gateway.active) - waiting
        self.samples.append(_Sample(len(ready), running, waiting, 100.0 * usage))
        if len(self.samples) < POINTS and gateway.num_expected:
            self.run.simulation.call_later(self.bucket_s, self._sample)

    def values(self, metric: str) -> list[float]:
        """Return the values of a metric of the benchmark in ms, of all completed requests."""
        return [value for row in self.completed for value in metric_values(row, metric)]  # type: ignore[arg-type]

    def percentile(self, metric: str, percentile: str) -> float | None:
        """Return a percentile of a metric; None without values."""
        values = self.values(metric)
        return getattr(compute_stats(values), percentile) if values else None

    def buckets(self, rows: Sequence[RequestRow]) -> list[list[RequestRow]]:
        """Return rows by the time of their arrival."""
        found: list[list[RequestRow]] = [[] for _ in range(POINTS)]
        for row in rows:
            found[min(POINTS - 1, int(row.scheduled_s / self.bucket_s))].append(row)
        return found

    @property
    def replica_hours(self) -> float:
        """Time of all replicas."""
        return self.run.fleet.replica_s / 3600.0

    @property
    def slow(self) -> int:
        """Completed requests that took long for their length."""
        times = [metric_values(row, "tpot") for row in self.completed]
        values = sorted(value[0] for value in times if value)
        limit = SLOW_FACTOR * values[len(values) // 4] if values else 0.0
        return sum(value > limit for value in values)


def _percentile_by_time(metric: str) -> Callable[[Observation], list[float | None]]:
    def read(seen: Observation) -> list[float | None]:
        found: list[float | None] = []
        for rows in seen.buckets(seen.completed):
            values = [value for row in rows for value in metric_values(row, metric)]  # type: ignore[arg-type]
            found.append(round(compute_stats(values).p95, 1) if values else None)
        return found

    return read


def _read_samples(name: str) -> Callable[[Observation], list[float | None]]:
    def read(seen: Observation) -> list[float | None]:
        found: list[float | None] = [round(float(getattr(each, name)), 1) for each in seen.samples]
        return found + [None] * (POINTS - len(found))

    return read


def _cached_by_time(seen: Observation) -> list[float | None]:
    return [
        round(100.0 * sum(row.cached_tokens or 0 for row in rows) / total, 1) if total else None
        for rows in seen.buckets(seen.completed)
        for total in [sum(row.input_tokens or 0 for row in rows)]
    ]


def _failed_by_time(seen: Observation) -> list[float | None]:
    failed = [row for row in seen.rows if row.outcome == "error"]
    return [float(len(rows)) for rows in seen.buckets(failed)]


def _tokens_by_time(seen: Observation) -> list[float | None]:
    tokens = [0.0] * POINTS
    for row in seen.completed:
        bucket = int(row.end_s / seen.bucket_s)
        if bucket < POINTS:
            tokens[bucket] += row.output_tokens / seen.bucket_s
    return [round(value, 1) for value in tokens]


PLOTS: Mapping[str, tuple[str, str, Callable[[Observation], list[float | None]]]] = {
    "ttft": ("TTFT, 95th percentile", "ms", _percentile_by_time("ttft")),
    "tpot": ("Time per output token, 95th percentile", "ms", _percentile_by_time("tpot")),
    "waiting": ("Requests that wait", "", _read_samples("waiting")),
    "running": ("Requests that run", "", _read_samples("running")),
    "replicas": ("Replicas that serve", "", _read_samples("replicas")),
    "kv": ("KV cache in use", "%", _read_samples("kv_percent")),
    "cached": ("Prompt tokens from the cache", "%", _cached_by_time),
    "failed": ("Requests that fail", "", _failed_by_time),
    "tokens": ("Output", "tokens/s", _tokens_by_time),
}
"""Plots over time by name: title, unit and reader."""

FIGURES: Mapping[str, tuple[str, str, Callable[[Observation], float | None]]] = {
    "ttft_p50": ("TTFT, median", "ms", lambda seen: seen.percentile("ttft", "p50")),
    "ttft_p95": ("TTFT, 95th percentile", "ms", lambda seen: seen.percentile("ttft", "p95")),
    "tpot_p50": ("Time per token, median", "ms", lambda seen: seen.percentile("tpot", "p50")),
    "tpot_p99": ("Time per token, 99th", "ms", lambda seen: seen.percentile("tpot", "p99")),
    "completed": ("Completed", "requests", lambda seen: len(seen.completed)),
    "failed": (
        "Failed",
        "requests",
        lambda seen: sum(row.outcome == "error" for row in seen.rows),
    ),
    "slow": ("Slow answers", "requests", lambda seen: seen.slow),
    "tokens": (
        "Output",
        "tokens/s",
        lambda seen: (
            sum(row.output_tokens for row in seen.completed) / seen.run.simulation.elapsed_s
        ),
    ),
    "cached": (
        "Prompt tokens from the cache",
        "%",
        lambda seen: (
            100.0
            * sum(row.cached_tokens or 0 for row in seen.completed)
            / max(1, sum(row.input_tokens or 0 for row in seen.completed))
        ),
    ),
    "utilisation": (
        "Replicas compute",
        "%",
        lambda seen: 100.0 * seen.run.fleet.busy_s / max(1e-9, seen.run.fleet.replica_s),
    ),
    "cost": ("Cost", "$", lambda seen: seen.replica_hours * seen.variant.dollars_per_hour),
}
"""Figures by name: label, unit and reader."""


def run_variants(
    lesson: str,
    values: Values,
    variants: Sequence[Variant],
    *,
    plots: Sequence[str],
    figure: str,
    goals: Callable[[Observation], tuple[LessonGoal, ...]] | None = None,
) -> LessonRun:
    """Run the variants of a lesson.

    Args:
        lesson: Id of the lesson.
        values: Values of its controls.
        variants: What it compares. The last is the better one.
        plots: Names of its plots.
        figure: Name of the figure that its finding compares.
        goals: Returns the goals of the last variant.
    """
    seen = [Observation(variant) for variant in variants]
    labels = tuple(variant.label for variant in variants)
    last = seen[-1]
    built = tuple(
        LessonPlot(
            title=PLOTS[name][0],
            unit=PLOTS[name][1],
            x=tuple(round((index + 1) * last.bucket_s, 3) for index in range(POINTS)),
            x_label="",
            lines=tuple(
                LessonLine(each.variant.label, tuple(PLOTS[name][2](each))) for each in seen
            ),
        )
        for name in plots
    )
    figures = {
        name: LessonFigure(label, unit, tuple(_round(read(each)) for each in seen))
        for name, (label, unit, read) in FIGURES.items()
    }
    hashes = ", ".join(each.run.simulation.trace_hash[:8] for each in seen)
    return LessonRun(
        lesson=lesson,
        values=dict(values),
        variants=labels,
        plots=built,
        figures=tuple(figures.values()),
        goals=() if goals is None else goals(last),
        finding=describe_finding(figures[figure], labels),
        identity=f"seed {SEED}, hashes {hashes}, {sum(len(each.rows) for each in seen):,} requests",
    )


def describe_finding(figure: LessonFigure, labels: Sequence[str]) -> str:
    """Return the sentence that compares a figure of all variants."""
    parts = [
        f"{show_value(value, figure.unit)} with {label}"
        for value, label in zip(figure.values, labels, strict=True)
    ]
    return f"{figure.label}: {', '.join(parts)}."


def show_value(value: float | None, unit: str) -> str:
    """Return a value with its unit."""
    if value is None:
        return "none"
    if unit == "$":
        return f"${value:,.2f}"
    digits = 0 if abs(value) >= 100 or value == int(value) else 1
    return f"{value:,.{digits}f} {unit}".strip()


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
