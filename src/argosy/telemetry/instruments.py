"""Counters and histograms with cheap recording, and their scrape as Prometheus metric families.

Recording happens for every token, so it uses no locks and no label objects. One thread records, and a scrape in any
thread reads the current values. Gauges are built at the scrape. Names follow the Prometheus guidelines, so that
`promtool check metrics` passes.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

METRICS_CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
PHASE_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

LabelValues = tuple[str, ...]
"""Label values in the order of the family's label names."""


class CounterChild:
    """Counter of one set of label values."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class Counter:
    """Sum for each set of label values.

    Args:
        name: Family name without `_total`.
        help_text: Text of the HELP line.
        labels: Names in the order of the label values.
        divisor: Counted units per exposed unit. Counting stays in integers.
    """

    def __init__(self, name: str, help_text: str, *labels: str, divisor: int = 1) -> None:
        self._name, self._help_text, self._label_names = name, help_text, labels
        self._divisor = divisor
        self._children: defaultdict[LabelValues, CounterChild] = defaultdict(CounterChild)

    def child(self, label_values: LabelValues) -> CounterChild:
        """Return the child of the label values for frequent use; the exposition contains it even at 0."""
        return self._children[label_values]

    def add(self, label_values: LabelValues, amount: float = 1) -> None:
        """Add `amount`; the exposition then contains the label values even at 0."""
        self._children[label_values].value += amount

    def values(self) -> list[tuple[LabelValues, float]]:
        """Return the sum for each set of label values."""
        return [(label_values, child.value) for label_values, child in self._children.items()]

    def metric_family(self) -> Metric:
        """Return the Prometheus metric family."""
        family = CounterMetricFamily(self._name, self._help_text, labels=self._label_names)
        for label_values, child in list(self._children.items()):
            family.add_metric(label_values, child.value / self._divisor)
        return family


class Histogram:
    """Distribution of values over buckets, for each set of label values."""

    def __init__(self, name: str, help_text: str, buckets: Sequence[float], *labels: str) -> None:
        self._name, self._help_text, self._label_names = name, help_text, labels
        self._buckets = buckets
        self._bounds = [*map(floatToGoString, buckets), "+Inf"]
        self._counts: defaultdict[LabelValues, list[int]] = defaultdict(
            lambda: [0] * len(self._bounds)
        )
        self._sums: defaultdict[LabelValues, float] = defaultdict(float)

    def observe(self, label_values: LabelValues, value: float) -> None:
        """Record a value."""
        self._counts[label_values][bisect_left(self._buckets, value)] += 1
        self._sums[label_values] += value

    def observe_many(self, label_values: LabelValues, values: Sequence[float]) -> None:
        """Record any number of values, including none.

        Sorting them first is fast, because many values fall into few buckets.
        """
        counts, buckets, ordered = self._counts[label_values], self._buckets, sorted(values)
        start = 0
        while start < len(ordered):
            bucket = bisect_left(buckets, ordered[start])
            bound = buckets[bucket] if bucket < len(buckets) else math.inf
            end = bisect_right(ordered, bound, start)
            counts[bucket] += end - start
            start = end
        self._sums[label_values] += sum(values)

    def metric_family(self) -> Metric:
        """Return the Prometheus metric family."""
        family = HistogramMetricFamily(self._name, self._help_text, labels=self._label_names)
        for label_values, counts in list(self._counts.items()):
            cumulative = zip(self._bounds, accumulate(counts), strict=True)
            family.add_metric(label_values, list(cumulative), self._sums[label_values])
        return family


def gauge_family(
    name: str, help_text: str, values: Mapping[LabelValues, float], *labels: str
) -> Metric:
    """Return a gauge family with one current value for each set of label values."""
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


class CoalescedScrape:
    """Result of `render`, computed once for all concurrent callers. Not thread-safe: use it from one event loop."""

    def __init__(self, render: Callable[[], Coroutine[None, None, bytes]]) -> None:
        self._render = render
        self._task: asyncio.Task[bytes] | None = None

    async def get_text(self) -> bytes:
        """Return the result of the running `render` call, or of a new one if none is running.

        A cancelled caller does not cancel the rendering for the others. Exceptions of `render` propagate.
        """
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._render())
        return await asyncio.shield(self._task)
