"""Comparison of two sides of one or more results each: ratios with 95 % confidence intervals.

A side with one result is resampled by the bootstrap. For latencies requests are resampled with all their gaps, because
the gaps of one request are not independent. For token throughput slices of the run's time are resampled. The interval
covers the variation within a run. Variation between runs is only visible with several results.

A side with several results contributes one value per result and measure. The estimate is their geometric mean. The
interval is the Behrens-Fisher interval for the difference of two log means with unknown and unequal variances.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Ratio B/A of a measure, with its 95 % interval."""

    load: str
    measure: str
    a: float
    b: float
    runs: tuple[int, int]
    """Number of runs behind a and b."""
    ratio: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        """Whether 1 is outside the interval."""
        return not self.low <= 1 <= self.high


def compare_results(
    a: Sequence[BenchResult],
    b: Sequence[BenchResult],
    *,
    seed: int = 0,
    resamples: int = RESAMPLE_COUNT,
) -> list[MeasureRatio]:
    """Compare each measure of each load that both sides have. Side A is the denominator of the ratios.

    If each side has only one load, the two loads are compared even if they differ. Raises BenchError if the sides have
    no load in common.
    """
    loads_a, loads_b = _group_by_load(a), _group_by_load(b)
    pairs = [(label, runs, loads_b[label]) for label, runs in loads_a.items() if label in loads_b]
    if not pairs and len(loads_a) == len(loads_b) == 1:
        ((label_a, runs_a),), ((label_b, runs_b),) = loads_a.items(), loads_b.items()
        pairs = [(f"{label_a} / {label_b}", runs_a, runs_b)]
    if not pairs:
        raise BenchError("The two sides have no load in common, so nothing can be compared.")
    resampling = _Resampling(np.random.default_rng(seed), resamples)
    ratios = []
    for label, runs_a, runs_b in pairs:
        estimates_a = _estimate_measures(runs_a, resampling)
        estimates_b = _estimate_measures(runs_b, resampling)
        runs = len(runs_a), len(runs_b)
        ratios += [
            _estimate_ratio(label, measure, estimates_a[measure], estimates_b[measure], runs)
            for measure in estimates_a
            if measure in estimates_b
        ]
    return ratios


def _group_by_load(results: Sequence[BenchResult]) -> dict[str, list[RunResult]]:
    runs_by_load: dict[str, list[RunResult]] = {}
    for result in results:
        for run in result.runs:
            runs_by_load.setdefault(run.label, []).append(run)
    return runs_by_load


class _Resampling(msgspec.Struct, frozen=True):
    """Parameters of the resampling."""

    rng: np.random.Generator
    resamples: int


def _estimate_measures(runs: Sequence[RunResult], resampling: _Resampling) -> dict[str, Array]:
    """Return the estimate and its resamples by measure, for the measures that all runs have."""
    if len(runs) == 1:
        return _estimate_run(runs[0], resampling)
    estimates = [_estimate_run(run, _Resampling(resampling.rng, 0)) for run in runs]
    return {
        measure: _estimate_over_runs(np.array([each[measure][0] for each in estimates]), resampling)
        for measure in estimates[0]
        if all(measure in each for each in estimates)
    }


def _estimate_over_runs(estimates: Array, resampling: _Resampling) -> Array:
    """Return the geometric mean, then draws of its true value: a t distribution of the logarithm."""
    logs = np.log(estimates + 1e-12)
    error = logs.std(ddof=1) / np.sqrt(len(logs))
    draws = logs.mean() + error * resampling.rng.standard_t(len(logs) - 1, resampling.resamples)
    # With two runs the t distribution has such wide tails that some draws would overflow.
    means: Array = np.exp(np.concatenate([[logs.mean()], draws.clip(-200, 200)]))
    return means


def _estimate_run(run: RunResult, resampling: _Resampling) -> dict[str, Array]:
    rows = run.succeeded
    if not rows:
        return {}
    measures = {"output tok/s": _resample_throughput(rows, resampling)}
    for metric in _COMPARED_METRICS:
        for statistic, drawn in _bootstrap(rows, metric, resampling).items():
            measures[f"{metric} {statistic} ms"] = drawn
    return measures


def _estimate_ratio(
    label: str, measure: str, a: Array, b: Array, runs: tuple[int, int]
) -> MeasureRatio:
    """Return the ratio B/A. The first value of each array is the estimate, the others are resamples."""
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


def _resample_throughput(rows: Sequence[RequestRow], resampling: _Resampling) -> Array:
    start = min(row.scheduled_s for row in rows)
    width = max((max(row.end_s for row in rows) - start) / _TIME_SLICES, 1e-6)
    series = np.zeros(_TIME_SLICES)
    rates = token_series(rows, width)
    # A token at the very end has a slice index of its own, and belongs to the last slice.
    for index, rate in enumerate(rates):
        series[min(index, _TIME_SLICES - 1)] += rate
    indices = resampling.rng.integers(_TIME_SLICES, size=(resampling.resamples, _TIME_SLICES))
    return np.concatenate([[series.mean()], series[indices].mean(axis=1)])


def _bootstrap(
    rows: Sequence[RequestRow], metric: MetricName, resampling: _Resampling
) -> dict[Statistic, Array]:
    """Return arrays by statistic: the estimate, then the resamples.

    A quantile whose tail holds less than one request is left out.
    """
    lists = [metric_values(row, metric) for row in rows]
    owners = np.repeat(np.arange(len(rows)), [len(each) for each in lists])
    flat = np.asarray([value for each in lists for value in each], dtype=np.float64)
    if not len(flat):
        return {}
    order = np.argsort(flat, kind="stable")
    values, owners = flat[order], owners[order]
    quantiles = {
        name: quantile
        for name, quantile in _QUANTILES.items()
        if len(rows) * (1 - quantile) >= 1 - 1e-9
    }
    drawn: dict[Statistic, list[float]] = {name: [] for name in ("mean", *quantiles)}
    probabilities = np.full(len(rows), 1 / len(rows))
    for draw in range(resampling.resamples + 1):
        counts = np.ones(len(rows))
        if draw:
            counts = resampling.rng.multinomial(len(rows), probabilities).astype(np.float64)
        weights = counts[owners]
        if not weights.any():  # all drawn requests have no values
            weights = np.ones_like(weights)
        drawn["mean"].append(float(np.average(values, weights=weights)))
        below = np.cumsum(weights)
        for name, quantile in quantiles.items():
            # The smallest value with this share of the weight at or below it.
            index = int(np.searchsorted(below, quantile * below[-1] - 1e-9))
            drawn[name].append(float(values[min(index, len(values) - 1)]))
    return {name: np.asarray(each) for name, each in drawn.items()}


def format_comparison(
    a: Sequence[BenchResult], b: Sequence[BenchResult], ratios: Sequence[MeasureRatio]
) -> str:
    """Return the table of ratios, after cautions about differences between the two sides."""
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
    return "\n".join([*lines, "", "* 1 is outside the interval"])


def _describe_result(result: BenchResult) -> str:
    return f"{result.target.model}, {result.created_at}, argosy {result.version}"


def _cached_share(results: Sequence[BenchResult]) -> float:
    summaries = [run.summary for result in results for run in result.runs]
    cached = sum(summary.cached_tokens or 0 for summary in summaries)
    return cached / max(sum(summary.input_tokens for summary in summaries), 1)


def _list_cautions(a: Sequence[BenchResult], b: Sequence[BenchResult]) -> list[str]:
    cautions = []
    plans_a, plans_b = _plan_digests(a), _plan_digests(b)
    if any(plans_b.get(label, plans) != plans for label, plans in plans_a.items()):
        cautions.append("Caution: the plans differ (seed, lengths or arrivals).")
    if len({str(result.machine.get("processor")) for result in (*a, *b)}) > 1:
        cautions.append("Caution: the load was generated on different machines.")
    shares = [_cached_share(results) for results in (a, b)]
    if abs(shares[0] - shares[1]) > 0.02:
        cautions.append(
            f"Caution: {shares[0]:.0%} of A's prompt tokens came from the prefix cache, and"
            f" {shares[1]:.0%} of B's (a server that has seen a seed before has its prompts cached)."
        )
    for name, results in (("A", a), ("B", b)):
        failed = sum(run.summary.failed for result in results for run in result.runs)
        if failed:
            cautions.append(f"Caution: {name} has {failed} failed requests, which are excluded.")
    if (len(a) == 1) != (len(b) == 1):
        cautions.append(
            "Caution: one side is a single run, so the variation between its runs is unknown."
        )
    return cautions


def _plan_digests(results: Sequence[BenchResult]) -> dict[str, set[str]]:
    runs_by_load = _group_by_load(results)
    return {label: {run.plan_digest for run in runs} for label, runs in runs_by_load.items()}
