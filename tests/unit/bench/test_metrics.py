"""What the measures mean, on rows whose values are known."""

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
from tests.support.request_rows import row

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


def test_definitions() -> None:
    one = row()
    assert metric_values(one, "ttft") == pytest.approx([100])
    assert metric_values(one, "send_ttft") == pytest.approx([90])
    assert metric_values(one, "lag") == pytest.approx([10])
    assert metric_values(one, "e2e") == pytest.approx([180])
    assert metric_values(one, "tpot") == pytest.approx([20])
    assert metric_values(one, "ntpot") == pytest.approx([36])
    assert metric_values(one, "itl") == pytest.approx([20] * 4)
    assert metric_values(one, "icl") == pytest.approx([20] * 4)


def test_tokens_of_one_chunk_have_no_gap_between_them() -> None:
    one = row(chunks_s=[1.1, 1.2], chunk_tokens=[2, 3], output_tokens=5, end_s=1.2)
    assert metric_values(one, "icl") == pytest.approx([100])
    assert metric_values(one, "itl") == pytest.approx([0, 100, 0, 0])
    assert metric_values(one, "tpot") == pytest.approx([25])


def test_one_token_has_no_gap() -> None:
    one = row(chunks_s=[1.1], chunk_tokens=[1], output_tokens=1, end_s=1.1)
    assert metric_values(one, "tpot") == metric_values(one, "itl") == []


@given(st.lists(st.integers(1, 6), min_size=1, max_size=20), st.data())
def test_gaps_add_up_to_the_time_after_the_first_token(
    tokens: list[int], data: st.DataObject
) -> None:
    gaps = data.draw(st.lists(st.floats(0, 5), min_size=len(tokens), max_size=len(tokens)))
    at = list(itertools.accumulate(gaps, initial=1.0))[1:]
    total = sum(tokens)
    one = row(chunks_s=at, chunk_tokens=tokens, output_tokens=total, end_s=at[-1])
    itl = metric_values(one, "itl")
    assert len(itl) == total - 1
    assert sum(itl) == pytest.approx(1e3 * (at[-1] - at[0]), abs=1e-6)
    assert sum(metric_values(one, "icl")) == pytest.approx(sum(itl), abs=1e-6)
    if total > 1:
        assert statistics.fmean(itl) == pytest.approx(metric_values(one, "tpot")[0], abs=1e-6)


@given(numbers)
def test_percentiles_are_ordered_and_within(sample: list[float]) -> None:
    found = compute_stats(sample)
    ladder = [found.min, found.p50, found.p90, found.p95, found.p99, found.p999, found.max]
    assert ladder == sorted(ladder)
    assert (found.min, found.max) == (min(sample), max(sample))
    assert found.count == len(sample)
    assert found.p50 == pytest.approx(statistics.median(sample))
    assert found.mean == pytest.approx(statistics.fmean(sample), abs=1e-6)
    assert found.std == pytest.approx(statistics.pstdev(sample), rel=1e-6, abs=1e-3)


@given(numbers, st.randoms())
def test_percentiles_do_not_depend_on_the_order(sample: list[float], random: object) -> None:
    shuffled = sorted(sample, reverse=True)
    assert compute_stats(shuffled).p99 == compute_stats(sample).p99


def test_failures_and_ramps_are_in_no_latency() -> None:
    rows = [
        row(0),
        row(1, outcome="error", error="http 503", chunks_s=[90.0], end_s=91.0),
        row(2, outcome="cancelled", error="cancelled", chunks_s=[], end_s=95.0),
        row(3, phase="warmup", chunks_s=[60.0]),
        row(4, phase="ramp", chunks_s=[60.0]),
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
        row(0),
        row(1),
        row(2, scheduled_s=2.0, sent_s=2.0, end_s=3.0, chunks_s=[2.5, 3.0], chunk_tokens=None),
    ]
    summary = summarize(rows)
    assert summary.duration_s == pytest.approx(2.0)
    assert summary.request_rate == pytest.approx(1.5)
    assert summary.output_token_rate == pytest.approx(7.5)
    assert summary.peak_concurrency == 2
    assert summary.mean_concurrency == pytest.approx((0.17 * 2 + 1) / 2)
    assert summary.peak_output_token_rate == pytest.approx(10)


def test_counts_that_do_not_match_are_counted() -> None:
    rows = [row(0, output_tokens=4), row(1, input_tokens=11), row(2, counted_by_server=False)]
    summary = summarize(rows)
    assert (summary.output_mismatches, summary.input_mismatches, summary.missing_usage) == (1, 1, 1)


def test_nothing_measured_is_no_crash() -> None:
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
def test_objectives(text: str, *, met: bool) -> None:
    assert parse_objectives(text).is_met_by(row()) is met
    assert not parse_objectives(text).is_met_by(row(outcome="error", error="cut"))


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.floats(50, 150))
def test_goodput_counts_each_good_request_once(ok: list[bool], limit_ms: float) -> None:
    rows: list[RequestRow] = [
        row(place, outcome="ok" if fine else "error", error="" if fine else "cut")
        for place, fine in enumerate(ok)
    ]
    summary = summarize(rows, Objectives({"ttft": limit_ms}))
    expected = sum(ok) if limit_ms >= metric_values(row(), "ttft")[0] else 0
    assert summary.good_requests == expected
    assert summary.attainment == pytest.approx(expected / len(ok))


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "tokens:5", "ttft:1,ttft:2", "tpot:nan"],
)
def test_objectives_that_are_none(text: str) -> None:
    with pytest.raises(BenchError):
        parse_objectives(text)
