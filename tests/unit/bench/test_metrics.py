"""Benchmark metrics on rows with known values, and the search for a rate on servers with known capacity."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.bench import (
    BenchError,
    Objectives,
    RequestRow,
    compute_stats,
    metric_values,
    parse_objectives,
    summarize,
)
from argosy.bench.objectives import MAX_TRIALS, MIN_RATE_FRACTION, search_rate
from tests.support.request_rows import request_row

samples = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


def test_latency_definitions() -> None:
    request = request_row()
    assert metric_values(request, "ttft") == pytest.approx([100])
    assert metric_values(request, "send_ttft") == pytest.approx([90])
    assert metric_values(request, "lag") == pytest.approx([10])
    assert metric_values(request, "e2e") == pytest.approx([180])
    assert metric_values(request, "tpot") == pytest.approx([20])
    assert metric_values(request, "ntpot") == pytest.approx([36])
    assert metric_values(request, "itl") == pytest.approx([20] * 4)
    assert metric_values(request, "icl") == pytest.approx([20] * 4)


def test_tokens_of_one_chunk_have_zero_latency_between_them() -> None:
    request = request_row(chunks_s=[1.1, 1.2], chunk_tokens=[2, 3], output_tokens=5, end_s=1.2)
    assert metric_values(request, "icl") == pytest.approx([100])
    assert metric_values(request, "itl") == pytest.approx([0, 100, 0, 0])
    assert metric_values(request, "tpot") == pytest.approx([25])
    single = request_row(chunks_s=[1.1], chunk_tokens=[1], output_tokens=1, end_s=1.1)
    assert metric_values(single, "tpot") == metric_values(single, "itl") == []


@given(st.lists(st.integers(1, 6), min_size=1, max_size=20), st.data())
def test_inter_token_latencies_add_up_to_the_decode_time(
    tokens: list[int], data: st.DataObject
) -> None:
    gaps = data.draw(st.lists(st.floats(0, 5), min_size=len(tokens), max_size=len(tokens)))
    at = list(itertools.accumulate(gaps, initial=1.0))[1:]
    total = sum(tokens)
    request = request_row(chunks_s=at, chunk_tokens=tokens, output_tokens=total, end_s=at[-1])
    itl = metric_values(request, "itl")
    assert len(itl) == total - 1
    assert sum(itl) == pytest.approx(1e3 * (at[-1] - at[0]), abs=1e-6)
    assert sum(metric_values(request, "icl")) == pytest.approx(sum(itl), abs=1e-6)
    if total > 1:
        assert statistics.fmean(itl) == pytest.approx(metric_values(request, "tpot")[0], abs=1e-6)


@given(samples)
def test_percentiles_are_ordered_and_within_the_sample(sample: list[float]) -> None:
    stats = compute_stats(sample)
    assert compute_stats(sorted(sample, reverse=True)).p99 == stats.p99
    ladder = [stats.min, stats.p50, stats.p90, stats.p95, stats.p99, stats.p999, stats.max]
    assert ladder == sorted(ladder)
    assert (stats.min, stats.max) == (min(sample), max(sample))
    assert stats.count == len(sample)
    assert stats.p50 == pytest.approx(statistics.median(sample))
    assert stats.mean == pytest.approx(statistics.fmean(sample), abs=1e-6)
    assert stats.std == pytest.approx(statistics.pstdev(sample), rel=1e-6, abs=1e-3)


def test_failures_and_ramps_are_excluded_from_latencies() -> None:
    rows = [
        request_row(0),
        request_row(1, outcome="error", error="http 503", chunks_s=[90.0], end_s=91.0),
        request_row(2, outcome="cancelled", error="cancelled", chunks_s=[], end_s=95.0),
        request_row(3, phase="warmup", chunks_s=[60.0]),
        request_row(4, phase="ramp", chunks_s=[60.0]),
    ]
    summary = summarize(rows)
    assert (summary.completed, summary.failed, summary.cancelled) == (1, 1, 1)
    assert summary.unmeasured == 2
    assert summary.errors == {"http 503": 1}
    assert summary.output_tokens == 5
    assert {metric: each.count for metric, each in summary.latency.items()}["ttft"] == 1
    assert summary.latency["ttft"].max == pytest.approx(100)


def test_rates_and_concurrency() -> None:
    rows = [
        request_row(0),
        request_row(1),
        request_row(
            2, scheduled_s=2.0, sent_s=2.0, end_s=3.0, chunks_s=[2.5, 3.0], chunk_tokens=None
        ),
    ]
    summary = summarize(rows)
    assert summary.duration_s == pytest.approx(2.0)
    assert summary.request_rate == pytest.approx(1.5)
    assert summary.output_token_rate == pytest.approx(7.5)
    assert summary.peak_concurrency == 2
    assert summary.mean_concurrency == pytest.approx((0.17 * 2 + 1) / 2)
    assert summary.peak_output_token_rate == pytest.approx(10)


def test_token_count_mismatches_are_counted() -> None:
    rows = [
        request_row(0, output_tokens=4),
        request_row(1, input_tokens=11),
        request_row(2, counted_by_server=False),
    ]
    summary = summarize(rows)
    assert (summary.output_mismatches, summary.input_mismatches, summary.missing_usage) == (1, 1, 1)


def test_empty_summary_is_zero() -> None:
    summary = summarize([], Objectives({"ttft": 1.0}))
    assert (summary.completed, summary.goodput, summary.attainment) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("ttft:100.1", True),
        ("ttft:99", False),
        ("tpot:20.1,e2el:181", True),
        ("tpot:20.1,e2el:179", False),
        ("itl:19", False),
        ("ntpot:37 ttft:101", True),
    ],
)
def test_objectives_are_met_within_their_limits(text: str, *, met: bool) -> None:
    assert parse_objectives(text).is_met_by(request_row()) is met
    assert not parse_objectives(text).is_met_by(request_row(outcome="error", error="cut"))


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.floats(50, 150))
def test_goodput_counts_each_good_request_once(ok: list[bool], limit_ms: float) -> None:
    rows: list[RequestRow] = [
        request_row(index, outcome="ok" if is_ok else "error", error="" if is_ok else "cut")
        for index, is_ok in enumerate(ok)
    ]
    summary = summarize(rows, Objectives({"ttft": limit_ms}))
    expected = sum(ok) if limit_ms >= metric_values(request_row(), "ttft")[0] else 0
    assert summary.good_requests == expected
    assert summary.attainment == pytest.approx(expected / len(ok))


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "tokens:5", "ttft:1,ttft:2", "tpot:nan"],
)
def test_invalid_objectives_are_rejected(text: str) -> None:
    with pytest.raises(BenchError):
        parse_objectives(text)


# --- search for the highest rate -----------------------------------------------------------------


def run_search(first: float, precision: float, capacity: float) -> tuple[float | None, list[float]]:
    trials = search_rate(first, precision)
    rate = next(trials)
    tried = []
    while True:
        tried.append(rate)
        try:
            rate = trials.send(rate <= capacity)
        except StopIteration as end:
            return end.value, tried


@given(st.floats(0.1, 100), st.floats(0.01, 0.5), st.floats(0.05, 1000))
def test_search_finds_the_capacity(first: float, precision: float, capacity: float) -> None:
    best, tried = run_search(first, precision, capacity)
    if best is None:
        assert capacity < first * MIN_RATE_FRACTION
        return
    assert best <= capacity <= best * (1 + precision) * (1 + 1e-9)
    assert len(set(tried)) == len(tried) <= MAX_TRIALS


def test_search_gives_up_at_minimum_rate_and_stops_after_max_trials() -> None:
    best, tried = run_search(1.0, 0.05, 0.0)
    assert best is None
    assert tried[-1] == MIN_RATE_FRACTION
    assert run_search(1.0, 0.05, float("inf"))[0] == 2.0 ** (MAX_TRIALS - 1)
