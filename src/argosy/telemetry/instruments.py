"""Numbers that are counted with one addition each, and made into Prometheus' families when somebody asks.

A token passes here, so there are no locks and no objects for each label: one thread counts, and whoever reads, in any
thread, takes what is there. What is not counted is a gauge of the moment. Names follow the Prometheus guidelines, so
that `promtool check metrics` is content.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
"""Values, in the order of the names that a family was made with."""


class CounterChild:
    """That of one set of label values."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class Counter:
    """A sum for each set of label values.

    Args:
        name: The family's name, without the suffix `_total`.
        help_text: Text of the HELP line.
        labels: Label names, in the order of the label values.
        divisor: How many counted units make one exposed unit. Counting stays in integers.
    """

    def __init__(self, name: str, help_text: str, *labels: str, divisor: int = 1) -> None:
        self._name, self._help_text, self._label_names = name, help_text, labels
        self._divisor = divisor
        self._children: defaultdict[LabelValues, CounterChild] = defaultdict(CounterChild)

    def child(self, label_values: LabelValues) -> CounterChild:
        """Where these are counted, for who counts them often; they are shown from now on, be it 0."""
        return self._children[label_values]

    def add(self, label_values: LabelValues, amount: float = 1) -> None:
        """Count; what was counted once is shown, be it 0."""
        self._children[label_values].value += amount

    def metric_family(self) -> Metric:
        """As Prometheus has it."""
        shown = CounterMetricFamily(self._name, self._help_text, labels=self._label_names)
        for labels, counted in list(self._children.items()):
            shown.add_metric(labels, counted.value / self._divisor)
        return shown


class Histogram:
    """How values are spread over buckets, for each set of label values."""

    def __init__(self, name: str, help_text: str, buckets: Sequence[float], *labels: str) -> None:
        self._name, self._help_text, self._label_names = name, help_text, labels
        self._buckets = buckets
        self._bounds = [*map(floatToGoString, buckets), "+Inf"]
        self._counts: defaultdict[LabelValues, list[int]] = defaultdict(
            lambda: [0] * len(self._bounds)
        )
        self._sums: defaultdict[LabelValues, float] = defaultdict(float)

    def observe(self, label_values: LabelValues, value: float) -> None:
        """Count a value."""
        self._counts[label_values][bisect_left(self._buckets, value)] += 1
        self._sums[label_values] += value

    def observe_many(self, label_values: LabelValues, values: Sequence[float]) -> None:
        """Count values, of which there may be none: most of many are in the same few buckets."""
        counts, buckets, ordered = self._counts[label_values], self._buckets, sorted(values)
        counted = 0
        while counted < len(ordered):
            bucket = bisect_left(buckets, ordered[counted])
            bound = buckets[bucket] if bucket < len(buckets) else math.inf
            upto = bisect_right(ordered, bound, counted)
            counts[bucket] += upto - counted
            counted = upto
        self._sums[label_values] += sum(values)

    def metric_family(self) -> Metric:
        """As Prometheus has it."""
        shown = HistogramMetricFamily(self._name, self._help_text, labels=self._label_names)
        for labels, counts in list(self._counts.items()):
            below = zip(self._bounds, accumulate(counts), strict=True)
            shown.add_metric(labels, list(below), self._sums[labels])
        return shown


def gauge_family(
    name: str, help_text: str, values: Mapping[LabelValues, float], *labels: str
) -> Metric:
    """Numbers of the moment, one for each set of label values."""
    shown = GaugeMetricFamily(name, help_text, labels=labels)
    for each, value in values.items():
        shown.add_metric(each, value)
    return shown
