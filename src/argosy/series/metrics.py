"""Metrics that a query may ask for, computed from the columns of a frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from argosy.series.frame import SeriesFrame
from argosy.series.log_histogram import Floats, decode_counts, percentiles
from argosy.series.schema import SCHEMAS, Schema, ScopeKind

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
NANODOLLARS_PER_DOLLAR = 10**9
_ERRORS = ("refused", "limited", "failed")
_NAN = float("nan")

_SIGNIFICANT_DIGITS = 6


class _Source:
    """Frame from which several metrics are computed."""

    def __init__(self, frame: SeriesFrame) -> None:
        self.values = frame.values
        self.covered_s = frame.covered_s
        self._histograms = frame.histograms
        self._cumulative: dict[str, Floats] = {}

    def cumulative(self, histogram: str) -> Floats:
        """Return the cumulative counts of a histogram, which its quantiles share."""
        if histogram not in self._cumulative:
            self._cumulative[histogram] = decode_counts(self._histograms[histogram]).cumsum(axis=1)
        return self._cumulative[histogram]


Compute = Callable[[_Source], Floats]


def metric_names(kind: ScopeKind) -> list[str]:
    """Return the names of a scope's metrics, in the order of the documentation."""
    return list(_METRICS[kind])


def check_metrics(kind: ScopeKind, names: Sequence[str]) -> None:
    """Check the names of metrics.

    Raises:
        ValueError: A scope of this kind has no metric of a name.
    """
    unknown = next((name for name in names if name not in _METRICS[kind]), None)
    if unknown is not None:
        known = ", ".join(_METRICS[kind])
        raise ValueError(
            f"metrics: {unknown[:100]!r} is no metric of a {kind}. Use some of {known}."
        )


def compute_metrics(
    kind: ScopeKind, names: Sequence[str], frame: SeriesFrame
) -> dict[str, list[float | None]]:
    """Return the values of metrics by name. Gaps are None."""
    source = _Source(frame)
    return {name: _to_list(_METRICS[kind][name](source)) for name in names}


def needed_histograms(kind: ScopeKind, names: Sequence[str]) -> list[str]:
    """Return the histograms that the metrics need."""
    return [
        histogram
        for histogram in SCHEMAS[kind].histograms
        if any(f"{histogram}_{quantile}_s" in names for quantile in QUANTILES)
    ]


def _to_list(values: Floats) -> list[float | None]:
    """Convert to a list with None for NaN and six significant digits, which keeps answers small."""
    is_number = np.isfinite(values) & (values != 0)
    exponents = np.zeros(len(values))
    np.log10(np.abs(values), out=exponents, where=is_number)
    shifts = _SIGNIFICANT_DIGITS - 1 - np.floor(exponents)
    # Powers of ten are exact up to 10**22, so that the quotient is the nearest number with these digits.
    up, down = 10.0 ** np.clip(shifts, 0, 22), 10.0 ** np.clip(-shifts, 0, 22)
    rounded = (np.round(values / down * up) / up * down).astype(object)
    rounded[np.isnan(values)] = None
    found: list[float | None] = rounded.tolist()
    return found


def _column(schema: Schema, name: str) -> Compute:
    index = schema.columns.index(name)
    return lambda source: source.values[:, index]


def _rate(column: Compute, divisor: float = 1.0) -> Compute:
    return lambda source: _divide(column(source) / divisor, source.covered_s)


def _sum(*columns: Compute) -> Compute:
    return lambda source: np.sum([column(source) for column in columns], axis=0)


def _ratio(part: Compute, other: Compute) -> Compute:
    return lambda source: _divide(part(source), part(source) + other(source))


def _divide(values: Floats, divisors: Floats) -> Floats:
    return np.divide(values, divisors, out=np.full_like(values, _NAN), where=divisors > 0)


def _quantile(histogram: str, quantile: float) -> Compute:
    return lambda source: percentiles(source.cumulative(histogram), quantile)


def _build_metrics(schema: Schema) -> dict[str, Compute]:
    columns = {name: _column(schema, name) for name in schema.columns}
    errors = [columns[name] for name in _ERRORS if name in columns]
    metrics = {"errors_per_s": _rate(_sum(*errors))}
    for name in schema.counters:
        if name == "cost_nano_dollars":
            metrics["cost_dollars_per_s"] = _rate(columns[name], NANODOLLARS_PER_DOLLAR)
        else:
            metrics[f"{name}_per_s"] = _rate(columns[name])
    metrics["cache_hit_ratio"] = _ratio(columns["cached_tokens"], columns["input_tokens"])
    if "passed_grades" in columns:
        grades = columns["passed_grades"], columns["failed_grades"]
        metrics["quality_pass_ratio"] = _ratio(*grades)
    metrics |= {gauge.name: columns[gauge.name] for gauge in schema.gauges}
    for histogram in schema.histograms:
        for name, quantile in QUANTILES.items():
            metrics[f"{histogram}_{name}_s"] = _quantile(histogram, quantile)
    return metrics | {name: columns[name] for name in schema.counters}


_METRICS: dict[ScopeKind, dict[str, Compute]] = {
    kind: _build_metrics(schema) for kind, schema in SCHEMAS.items()
}
