"""What is counted here is shown as the library's own metrics would show it, without their locks."""

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


class Shown(Collector):
    def __init__(self, counted: Counter | Histogram) -> None:
        self._counted = counted

    def collect(self) -> Iterator[Metric]:
        yield self._counted.metric_family()


def lines(shown: Collector) -> list[str]:
    text = generate_latest(shown).decode()
    return sorted(line for line in text.splitlines() if "_created" not in line)


@given(st.lists(st.tuples(LABELS, st.lists(st.floats(0, 1e7), max_size=3))), BUCKETS)
def test_a_histogram_is_the_librarys(
    observed: list[tuple[tuple[str, str], list[float]]], buckets: tuple[float, ...]
) -> None:
    theirs = CollectorRegistry()
    library = prometheus_client.Histogram(
        "x", "X.", ["one", "two"], buckets=buckets, registry=theirs
    )
    ours = Histogram("x", "X.", buckets, "one", "two")
    for labels, values in observed:
        ours.observe_many(labels, ())
        library.labels(*labels)
        for value in values:
            ours.observe(labels, value)
            library.labels(*labels).observe(value)
    assert lines(Shown(ours)) == lines(theirs)


@given(st.lists(st.tuples(LABELS, st.integers(0, 10))))
def test_a_counter_is_the_librarys(counted: list[tuple[tuple[str, str], int]]) -> None:
    theirs = CollectorRegistry()
    library = prometheus_client.Counter("x", "X.", ["one", "two"], registry=theirs)
    ours = Counter("x", "X.", "one", "two")
    for labels, amount in counted:
        ours.add(labels, amount)
        library.labels(*labels).inc(amount)
    assert lines(Shown(ours)) == lines(theirs)


@given(st.lists(st.integers(0, 20_000)))
def test_several_values_at_once_are_as_many_one_by_one(values: list[int]) -> None:
    one_by_one, at_once = (Histogram("x", "X.", TTFT_BUCKETS, "model") for _ in range(2))
    at_once.observe_many(("m",), ())
    at_once.observe_many(("m",), [value / 1024 for value in values])
    one_by_one.observe_many(("m",), ())
    for value in values:
        one_by_one.observe(("m",), value / 1024)
    assert lines(Shown(at_once)) == lines(Shown(one_by_one))
