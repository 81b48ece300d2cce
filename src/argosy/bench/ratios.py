"""Two results side by side: ratios with confidence intervals from the bootstrap.

Latencies: requests are resampled (all gaps of a request together), so that gaps of one request, which are alike, do
not count as independent. Token throughput: slices of the run's time are resampled. One run's interval holds
what varies within a run; what varies between runs only more runs can show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from argosy.bench.measure import Metric, Row, token_series, values
from argosy.bench.problem import BenchError
from argosy.bench.result import Point, Result

Array = npt.NDArray[np.float64]
Statistic = Literal["mean", "p50", "p90", "p99"]
RESAMPLES = 1000
_SLICES = 30
_QUANTILES: dict[Statistic, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_LATENCIES: tuple[Metric, ...] = ("ttft", "tpot", "itl", "e2e")


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """B over A, with the 95 % interval."""

    load: str
    measure: str
    a: float
    b: float
    ratio: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """1 is outside of the interval."""
        return not self.low <= 1 <= self.high


def compare(a: Result, b: Result, *, seed: int = 0, resamples: int = RESAMPLES) -> list[Ratio]:
    """Each measure of each load that both have. Raises BenchError when they have none in common.

    With one run each, these are compared whatever their loads are.
    """
    pairs = [(x, y) for x in a.points for y in b.points if x.label == y.label]
    if not pairs and len(a.points) == len(b.points) == 1:
        pairs = [(a.points[0], b.points[0])]
    if not pairs:
        raise BenchError("The two results have no load in common: nothing can be compared.")
    rng = np.random.default_rng(seed)
    ratios = []
    for x, y in pairs:
        label = x.label if x.label == y.label else f"{x.label} / {y.label}"
        ratios += _compare_points(label, x, y, _Dice(rng, resamples))
    return ratios


class _Dice(msgspec.Struct, frozen=True):
    """How to resample."""

    rng: np.random.Generator
    resamples: int


def _compare_points(label: str, a: Point, b: Point, dice: _Dice) -> list[Ratio]:
    mine, other = _ok(a), _ok(b)
    if not mine or not other:
        return []
    ratios = [_ratio(label, "output tok/s", *(_throughput(rows, dice) for rows in (mine, other)))]
    for metric in _LATENCIES:
        samples = [_Sample(rows, metric) for rows in (mine, other)]
        if not all(sample.size for sample in samples):
            continue
        drawn = [sample.bootstrap(dice) for sample in samples]
        ratios += [
            _ratio(label, f"{metric} {statistic} ms", drawn[0][statistic], drawn[1][statistic])
            for statistic in drawn[0]
            if statistic in drawn[1]
        ]
    return ratios


def _ok(point: Point) -> list[Row]:
    return [row for row in point.rows if row.phase == "measured" and row.outcome == "ok"]


def _ratio(label: str, measure: str, a: Array, b: Array) -> Ratio:
    """The first of each array is the estimate, the others are resamples."""
    ratios = (b + 1e-12) / (a + 1e-12)
    low, high = np.percentile(ratios[1:], [2.5, 97.5])
    return Ratio(
        load=label,
        measure=measure,
        a=float(a[0]),
        b=float(b[0]),
        ratio=float(ratios[0]),
        low=float(low),
        high=float(high),
    )


def _throughput(rows: Sequence[Row], dice: _Dice) -> Array:
    start = min(row.scheduled_s for row in rows)
    width = max((max(row.end_s for row in rows) - start) / _SLICES, 1e-6)
    series = np.zeros(_SLICES)
    counted = token_series(rows, width)
    # A token on the very end falls into a slice of its own: it belongs to the last.
    for place, rate in enumerate(counted):
        series[min(place, _SLICES - 1)] += rate
    places = dice.rng.integers(_SLICES, size=(dice.resamples, _SLICES))
    return np.concatenate([[series.mean()], series[places].mean(axis=1)])


class _Sample:
    """The values of a metric, sorted, each with the request that it is of."""

    def __init__(self, rows: Sequence[Row], metric: Metric) -> None:
        lists = [values(row, metric) for row in rows]
        owners = np.repeat(np.arange(len(rows)), [len(each) for each in lists])
        flat = np.asarray([value for each in lists for value in each], dtype=np.float64)
        order = np.argsort(flat, kind="stable")
        self._values, self._owners, self._requests = flat[order], owners[order], len(rows)

    @property
    def size(self) -> int:
        """How many values there are."""
        return len(self._values)

    def bootstrap(self, dice: _Dice) -> dict[Statistic, Array]:
        """For each statistic the estimate, then the resamples; none for a tail of less than a request."""
        statistics: dict[Statistic, Callable[[Array], float]] = {"mean": self._mean}
        for name, share in _QUANTILES.items():
            if self._requests * (1 - share) < 1 - 1e-9:
                continue
            statistics[name] = _Quantile(self._values, share)
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


class _Quantile:
    """A quantile of sorted values under weights: the least value with that share at or below it."""

    def __init__(self, values: Array, share: float) -> None:
        self._values = values
        self._share = share

    def __call__(self, weights: Array) -> float:
        below = np.cumsum(weights)
        place = int(np.searchsorted(below, self._share * below[-1] - 1e-9))
        return float(self._values[min(place, len(self._values) - 1)])


def comparison_text(a: Result, b: Result, ratios: Sequence[Ratio]) -> str:
    """The table, and what makes the two hard to compare."""
    lines = [
        f"A: {a.target.model}, {a.created}, argosy {a.version}",
        f"B: {b.target.model}, {b.created}, argosy {b.version}",
        *_cautions(a, b),
        "",
        f"{'load':<28}{'measure':<16}{'A':>11}{'B':>11}{'B/A':>9}   95 % interval",
    ]
    for ratio in ratios:
        mark = " *" if ratio.differs else ""
        lines.append(
            f"{ratio.load[:27]:<28}{ratio.measure:<16}{ratio.a:>11.2f}{ratio.b:>11.2f}"
            f"{ratio.ratio:>9.3f}   {ratio.low:.3f} - {ratio.high:.3f}{mark}"
        )
    return "\n".join([*lines, "", "* 1 lies outside of the interval"])


def _cached_share(result: Result) -> float:
    cached = sum(point.summary.cached_tokens or 0 for point in result.points)
    return cached / max(sum(point.summary.input_tokens for point in result.points), 1)


def _cautions(a: Result, b: Result) -> list[str]:
    cautions = []
    plans_a = {point.label: point.plan for point in a.points}
    plans_b = {point.label: point.plan for point in b.points}
    if any(plans_b.get(label, plan) != plan for label, plan in plans_a.items()):
        cautions.append("Caution: the plans differ (seed, lengths or arrivals).")
    if a.machine.get("processor") != b.machine.get("processor"):
        cautions.append("Caution: the load came from different machines.")
    shares = [_cached_share(result) for result in (a, b)]
    if abs(shares[0] - shares[1]) > 0.02:
        cautions.append(
            f"Caution: {shares[0]:.0%} of A's prompt tokens came from the prefix cache, and"
            f" {shares[1]:.0%} of B's (a server that has seen a seed before remembers its prompts)."
        )
    for name, result in (("A", a), ("B", b)):
        failed = sum(point.summary.failed for point in result.points)
        if failed:
            cautions.append(f"Caution: {name} has {failed} failed requests; they are left out.")
    return cautions
