"""Instruments: exposition equals that of prometheus_client for the same values."""

from __future__ import annotations

from collections.abc import Iterator

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from argosy.telemetry.instruments import TTFT_BUCKETS, Counter, Histogram

LABELS = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["c", 'd"\n']))
BUCKETS = st.sampled_from([TTFT_BUCKETS, (1, 2, 50, 1_000_000, 5_000_000), (0.5,)])


class SingleMetricCollector(Collector):
    def __init__(self, instrument: Counter | Histogram) -> None:
        self._instrument = instrument

    def collect(self) -> Iterator[Metric]:
        yield self._instrument.metric_family()


def exposition_lines(collector: Collector) -> list[str]:
    text = generate_latest(collector).decode()
    return sorted(line for line in text.splitlines() if "_created" not in line)


@given(st.lists(st.tuples(LABELS, st.lists(st.floats(0, 1e7), max_size=3))), BUCKETS)
def test_histogram_equals_that_of_prometheus_client(
    observed: list[tuple[tuple[str, str], list[float]]], buckets: tuple[float, ...]
) -> None:
    registry = CollectorRegistry()
    library = prometheus_client.Histogram(
        "x", "X.", ["one", "two"], buckets=buckets, registry=registry
    )
    instrument = Histogram("x", "X.", buckets, "one", "two")
    for labels, values in observed:
        instrument.observe_many(labels, ())
        library.labels(*labels)
        for value in values:
            instrument.observe(labels, value)
            library.labels(*labels).observe(value)
    assert exposition_lines(SingleMetricCollector(instrument)) == exposition_lines(registry)


@given(st.lists(st.tuples(LABELS, st.integers(0, 10))))
def test_counter_equals_that_of_prometheus_client(
    amounts: list[tuple[tuple[str, str], int]],
) -> None:
    registry = CollectorRegistry()
    library = prometheus_client.Counter("x", "X.", ["one", "two"], registry=registry)
    instrument = Counter("x", "X.", "one", "two")
    for labels, amount in amounts:
        instrument.add(labels, amount)
        library.labels(*labels).inc(amount)
    assert exposition_lines(SingleMetricCollector(instrument)) == exposition_lines(registry)


@given(st.lists(st.integers(0, 20_000)))
def test_observe_many_equals_single_observations(values: list[int]) -> None:
    single, batched = (Histogram("x", "X.", TTFT_BUCKETS, "model") for _ in range(2))
    batched.observe_many(("m",), ())
    batched.observe_many(("m",), [value / 1024 for value in values])
    single.observe_many(("m",), ())
    for value in values:
        single.observe(("m",), value / 1024)
    assert exposition_lines(SingleMetricCollector(batched)) == exposition_lines(
        SingleMetricCollector(single)
    )
