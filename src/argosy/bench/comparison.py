"""Two sides compared, each of one or more results: ratios with 95 % intervals.

One result a side: the bootstrap. Latencies: requests are resampled (all gaps of a request together), so that gaps of
one request, which are alike, do not count as independent. Token throughput: slices of the run's time are resampled.
Such an interval holds what varies within a run; what varies between runs only more runs can show.

Several results a side: each gives one number for a measure, their geometric mean is the estimate, and the interval is
that of Behrens and Fisher for the difference of two means of logarithms, whose variances are unknown and unequal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from argosy.bench.errors import BenchError
from argosy.bench.metrics import MetricName, RequestRow, metric_values, token_series
from argosy.bench.result import BenchResult, RunResult

Array = npt.NDArray[np.float64]
Statistic = Literal["mean", "p50", "p90", "p99"]
RESAMPLE_COUNT = 1000
_TIME_SLICES = 30
_QUANTILES: dict[Statistic, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_COMPARED_METRICS: tuple[MetricName, ...] = ("ttft", "tpot", "itl", "e2e")


class MeasureRatio(msgspec.Struct, frozen=True, kw_only=True):
    """B over A, with the 95 % interval."""

    load: str
    measure: str
    a: float
    b: float
    runs: tuple[int, int]
    """That a and b come from."""
    ratio: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        """1 is outside of the interval."""
        return not self.low <= 1 <= self.high


def compare_results(
    a: Sequence[BenchResult],
    b: Sequence[BenchResult],
    *,
    seed: int = 0,
    resamples: int = RESAMPLE_COUNT,
) -> list[MeasureRatio]:
    """Each measure of each load that both sides have. Raises BenchError when they have none in common.

    Where each side has one load only, these are compared whatever they are.
    """
    mine, other = _group_by_load(a), _group_by_load(b)
    pairs = [(label, points, other[label]) for label, points in mine.items() if label in other]
    if not pairs and len(mine) == len(other) == 1:
        ((x, points),), ((y, others),) = mine.items(), other.items()
        pairs = [(f"{x} / {y}", points, others)]
    if not pairs:
        raise BenchError("The two sides have no load in common: nothing can be compared.")
    dice = _Resampling(np.random.default_rng(seed), resamples)
    return [ratio for label, x, y in pairs for ratio in _compare_points(label, x, y, dice)]


def _group_by_load(results: Sequence[BenchResult]) -> dict[str, list[RunResult]]:
    found: dict[str, list[RunResult]] = {}
    for result in results:
        for point in result.runs:
            found.setdefault(point.label, []).append(point)
    return found


class _Resampling(msgspec.Struct, frozen=True):
    """How to resample."""

    rng: np.random.Generator
    resamples: int


def _compare_points(
    label: str, a: Sequence[RunResult], b: Sequence[RunResult], dice: _Resampling
) -> list[MeasureRatio]:
    mine, other = _estimate_measures(a, dice), _estimate_measures(b, dice)
    return [
        _estimate_ratio(label, measure, mine[measure], other[measure], (len(a), len(b)))
        for measure in mine
        if measure in other
    ]


def _estimate_measures(points: Sequence[RunResult], dice: _Resampling) -> dict[str, Array]:
    """By name, the estimate of each measure that every run has, then what else it could have been."""
    if len(points) == 1:
        return _estimate_run(points[0], dice)
    runs = [_estimate_run(point, _Resampling(dice.rng, 0)) for point in points]
    return {
        measure: _estimate_over_runs(np.array([run[measure][0] for run in runs]), dice)
        for measure in runs[0]
        if all(measure in run for run in runs)
    }


def _estimate_over_runs(estimates: Array, dice: _Resampling) -> Array:
    """The geometric mean, then draws from where its true value may lie: a t distribution of the logarithm."""
    logs = np.log(estimates + 1e-12)
    error = logs.std(ddof=1) / np.sqrt(len(logs))
    draws = logs.mean() + error * dice.rng.standard_t(len(logs) - 1, dice.resamples)
    # Two runs know so little that a few draws are beyond all numbers.
    means: Array = np.exp(np.concatenate([[logs.mean()], draws.clip(-200, 200)]))
    return means


def _estimate_run(point: RunResult, dice: _Resampling) -> dict[str, Array]:
    rows = point.succeeded
    if not rows:
        return {}
    measures = {"output tok/s": _resample_throughput(rows, dice)}
    for metric in _COMPARED_METRICS:
        sample = _MetricSample(rows, metric)
        if sample.size:
            for statistic, drawn in sample.bootstrap(dice).items():
                measures[f"{metric} {statistic} ms"] = drawn
    return measures


def _estimate_ratio(
    label: str, measure: str, a: Array, b: Array, runs: tuple[int, int]
) -> MeasureRatio:
    """The first of each array is the estimate, the others are resamples."""
    ratios = (b + 1e-12) / (a + 1e-12)
    low, high = np.percentile(ratios[1:], [2.5, 97.5])
    return MeasureRatio(
        load=label,
        measure=measure,
        a=float(a[0]),
        b=float(b[0]),
        runs=runs,
        ratio=float(ratios[0]),
        low=float(low),
        high=float(high),
    )


def _resample_throughput(rows: Sequence[RequestRow], dice: _Resampling) -> Array:
    start = min(row.scheduled_s for row in rows)
    width = max((max(row.end_s for row in rows) - start) / _TIME_SLICES, 1e-6)
    series = np.zeros(_TIME_SLICES)
    counted = token_series(rows, width)
    # A token on the very end falls into a slice of its own: it belongs to the last.
    for place, rate in enumerate(counted):
        series[min(place, _TIME_SLICES - 1)] += rate
    places = dice.rng.integers(_TIME_SLICES, size=(dice.resamples, _TIME_SLICES))
    return np.concatenate([[series.mean()], series[places].mean(axis=1)])


class _MetricSample:
    """The values of a metric, sorted, each with the request that it is of."""

    def __init__(self, rows: Sequence[RequestRow], metric: MetricName) -> None:
        lists = [metric_values(row, metric) for row in rows]
        owners = np.repeat(np.arange(len(rows)), [len(each) for each in lists])
        flat = np.asarray([value for each in lists for value in each], dtype=np.float64)
        order = np.argsort(flat, kind="stable")
        self._values, self._owners, self._requests = flat[order], owners[order], len(rows)

    @property
    def size(self) -> int:
        """How many values there are."""
        return len(self._values)

    def bootstrap(self, dice: _Resampling) -> dict[Statistic, Array]:
        """For each statistic the estimate, then the resamples; none for a tail of less than a request."""
        statistics: dict[Statistic, Callable[[Array], float]] = {"mean": self._mean}
        for name, share in _QUANTILES.items():
            if self._requests * (1 - share) < 1 - 1e-9:
                continue
            statistics[name] = _WeightedQuantile(self._values, share)
        drawn: dict[Statistic, list[float]] = {name: [] for name in statistics}
        chances = np.full(self._requests, 1 / self._requests)
        for draw in range(dice.resamples + 1):
            times = np.ones(self._requests)
            if draw:
                times = dice.rng.multinomial(self._requests, chances).astype(np.float64)
            weights = times[self._owners]
            if not weights.any():  # only requests without values were drawn
                weights = np.ones_like(weights)
            for name, statistic in statistics.items():
                drawn[name].append(statistic(weights))
        return {name: np.asarray(each) for name, each in drawn.items()}

    def _mean(self, weights: Array) -> float:
        return float(np.average(self._values, weights=weights))


class _WeightedQuantile:
    """A quantile of sorted values under weights: the least value with that share at or below it."""

    def __init__(self, values: Array, quantile: float) -> None:
        self._values = values
        self._quantile = quantile

    def __call__(self, weights: Array) -> float:
        below = np.cumsum(weights)
        place = int(np.searchsorted(below, self._quantile * below[-1] - 1e-9))
        return float(self._values[min(place, len(self._values) - 1)])


def format_comparison(
    a: Sequence[BenchResult], b: Sequence[BenchResult], ratios: Sequence[MeasureRatio]
) -> str:
    """The table, and what makes the two sides hard to compare."""
    lines = [
        *(f"A: {_describe_result(result)}" for result in a),
        *(f"B: {_describe_result(result)}" for result in b),
        *_list_cautions(a, b),
        "",
        f"{'load':<28}{'measure':<16}{'A':>11}{'B':>11}{'B/A':>9}   95 % interval",
    ]
    for ratio in ratios:
        mark = " *" if ratio.is_significant else ""
        lines.append(
            f"{ratio.load[:27]:<28}{ratio.measure:<16}{ratio.a:>11.2f}{ratio.b:>11.2f}"
            f"{ratio.ratio:>9.3f}   {ratio.low:.3f} - {ratio.high:.3f}{mark}"
        )
    return "\n".join([*lines, "", "* 1 lies outside of the interval"])


def _describe_result(result: BenchResult) -> str:
    return f"{result.target.model}, {result.created_at}, argosy {result.version}"


def _cached_share(results: Sequence[BenchResult]) -> float:
    summaries = [point.summary for result in results for point in result.runs]
    cached = sum(summary.cached_tokens or 0 for summary in summaries)
    return cached / max(sum(summary.input_tokens for summary in summaries), 1)


def _list_cautions(a: Sequence[BenchResult], b: Sequence[BenchResult]) -> list[str]:
    cautions = []
    plans_a, plans_b = _plan_digests(a), _plan_digests(b)
    if any(plans_b.get(label, plans) != plans for label, plans in plans_a.items()):
        cautions.append("Caution: the plans differ (seed, lengths or arrivals).")
    if len({str(result.machine.get("processor")) for result in (*a, *b)}) > 1:
        cautions.append("Caution: the load came from different machines.")
    shares = [_cached_share(results) for results in (a, b)]
    if abs(shares[0] - shares[1]) > 0.02:
        cautions.append(
            f"Caution: {shares[0]:.0%} of A's prompt tokens came from the prefix cache, and"
            f" {shares[1]:.0%} of B's (a server that has seen a seed before remembers its prompts)."
        )
    for name, results in (("A", a), ("B", b)):
        failed = sum(point.summary.failed for result in results for point in result.runs)
        if failed:
            cautions.append(f"Caution: {name} has {failed} failed requests; they are left out.")
    if (len(a) == 1) != (len(b) == 1):
        cautions.append(
            "Caution: one side is a single run; what varies between its runs is unknown."
        )
    return cautions


def _plan_digests(results: Sequence[BenchResult]) -> dict[str, set[str]]:
    points = _group_by_load(results)
    return {label: {point.plan_digest for point in each} for label, each in points.items()}
