"""Comparison, reports and exports of benchmark results."""

from __future__ import annotations

import csv
import io
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from argosy.bench import (
    ArrivalProcess,
    BenchError,
    BenchResult,
    LoadSpec,
    Objectives,
    compare_results,
    format_comparison,
    format_csv,
    format_prometheus,
    load_result,
    render_html_report,
    render_text_report,
    save_result,
)
from tests.support.request_rows import bench_result, request_row, scaled_row

compare = partial(compare_results, resamples=100)


def noisy_result(factor: float, seed: int, count: int = 60) -> BenchResult:
    rng = np.random.default_rng(seed)
    return bench_result(
        [scaled_row(n, factor * each) for n, each in enumerate(rng.gamma(20, 0.05, count))]
    )


@pytest.mark.parametrize("runs", [(1, 1), (2, 3)])
def test_result_equals_itself(runs: tuple[int, int]) -> None:
    bench = noisy_result(1.0, 0)
    sides = [[bench] * count for count in runs]
    ratios = compare(*sides)
    assert ratios == compare(*sides), "the seed determines the resamples"
    for ratio in ratios:
        assert ratio.runs == runs
        assert ratio.ratio == pytest.approx(1)
        assert ratio.low - 1e-6 <= 1 <= ratio.high + 1e-6
        if runs != (1, 1):
            assert ratio.high - ratio.low < 1e-6
        else:
            assert not ratio.is_significant


def test_slowdown_is_significant_in_every_latency() -> None:
    ratios = {
        each.measure: each for each in compare([noisy_result(1.0, 1)], [noisy_result(1.5, 2)])
    }
    for measure in ("ttft mean ms", "ttft p50 ms", "tpot mean ms", "itl mean ms", "e2e p50 ms"):
        assert ratios[measure].is_significant
        assert ratios[measure].low < 1.5 < ratios[measure].high


def test_intervals_have_their_nominal_coverage() -> None:
    covered = 0
    for trial in range(20):
        a, b = noisy_result(1.0, 2 * trial, 40), noisy_result(1.2, 2 * trial + 1, 40)
        ratios = compare([a], [b])
        mean = next(each for each in ratios if each.measure == "ttft mean ms")
        covered += mean.low <= 1.2 <= mean.high
    assert covered >= 17  # 19 are expected


def test_several_runs_per_side_cover_run_to_run_variance() -> None:
    rng = np.random.default_rng(0)
    covered = {1: 0, 4: 0}
    for trial in range(12):
        sides = [
            [
                noisy_result(factor * each, 9 * trial + n, 20)
                for n, each in enumerate(rng.gamma(25, 0.04, 4))
            ]
            for factor in (1.0, 1.2)
        ]
        for runs in covered:
            ratios = compare(sides[0][:runs], sides[1][:runs])
            mean = next(each for each in ratios if each.measure == "ttft mean ms")
            assert mean.runs == (runs, runs)
            covered[runs] += mean.low <= 1.2 <= mean.high
    assert covered[4] >= 10
    # Servers differ by 20 % from run to run, which the requests of one run cannot show.
    assert covered[1] < 7


def test_single_run_is_compared_with_several() -> None:
    several = [noisy_result(1.0, seed) for seed in range(3)]
    ratios = {each.measure: each for each in compare([noisy_result(3.0, 7)], several)}
    assert ratios["e2e mean ms"].low < 1 / 3 < ratios["e2e mean ms"].high < 1
    text = format_comparison([noisy_result(3.0, 7)], several, list(ratios.values()))
    assert text.count("B: m") == 3
    assert "one side is a single run" in text


def test_plan_order_of_runs_does_not_matter() -> None:
    first = bench_result([request_row()])
    second = msgspec.structs.replace(
        first, runs=[msgspec.structs.replace(first.runs[0], plan_digest="another")]
    )
    assert "plans differ" not in format_comparison([first, second], [second, first], [])
    assert "plans differ" in format_comparison([first, second], [first, first], [])


def test_percentile_without_enough_requests_is_not_compared() -> None:
    for count in (99, 100):
        ratios = compare([noisy_result(1.0, 1, count)], [noisy_result(1.0, 2, 120)])
        measures = {each.measure for each in ratios}
        assert "ttft p90 ms" in measures
        assert ("ttft p99 ms" in measures) is (count == 100)


def test_only_matching_loads_are_compared() -> None:
    a, b = bench_result([request_row()], "rate 1"), bench_result([request_row()], "rate 2")
    assert {each.load for each in compare([a], [b])} == {"rate 1 / rate 2"}
    second = msgspec.structs.replace(a, runs=[*a.runs, *b.runs])
    assert {each.load for each in compare([second], [b])} == {"rate 2"}
    three = msgspec.structs.replace(
        a, runs=[msgspec.structs.replace(a.runs[0], label=f"rate {n}") for n in (8, 9)]
    )
    with pytest.raises(BenchError, match="no load in common"):
        compare([three], [second])


def test_text_lists_weaknesses_of_the_comparison() -> None:
    a = bench_result([request_row(), request_row(1, outcome="error", error="cut")])
    warm = bench_result([request_row(cached_tokens=8)]).runs[0]
    other = msgspec.structs.replace(warm, plan_digest="q")
    b = msgspec.structs.replace(a, machine={"processor": "other"}, runs=[other])
    text = format_comparison([a], [b], compare([a], [b]))
    for caution in ("plans differ", "different machines", "A has 1 failed", "80% of B's"):
        assert caution in text


def test_result_survives_save_and_load(tmp_path: Path) -> None:
    bench = bench_result(
        [request_row(), request_row(1, outcome="error", error="cut")],
        objectives=Objectives({"ttft": 9.0}),
    )
    save_result(bench, tmp_path / "a.json")
    assert load_result(tmp_path / "a.json") == bench


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff"])
def test_files_that_are_no_result_are_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(BenchError, match="is not a result"):
        load_result(path)
    with pytest.raises(BenchError, match="Cannot read"):
        load_result(tmp_path / "none.json")


def test_text_report_has_the_format_of_vllm() -> None:
    text = render_text_report(bench_result([request_row()], objectives=Objectives({"ttft": 500.0})))
    for line in (
        "============ Serving Benchmark Result ============",
        "Successful requests:                     1",
        "Request goodput (req/s):                 5.56",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          100.00",
        "P99.9 TTFT (ms):                         100.00",
        "-----Time per Output Token (excl. 1st token)------",
        "Median ITL (ms):                         20.00",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(("rate", "is_sustained"), [(6.0, True), (500.0, False)])
def test_report_shows_achieved_rate_if_it_is_below_the_offered_rate(
    rate: float, is_sustained: bool
) -> None:
    bench = bench_result([request_row()], objectives=Objectives({"ttft": 500.0}))  # 5.56 requests/s
    load = LoadSpec(arrivals=ArrivalProcess(rate=rate), requests=1)
    bench_with_rate = msgspec.structs.replace(
        bench,
        best_rate=rate,
        settings=msgspec.structs.replace(bench.settings, find_rate=True),
        runs=[msgspec.structs.replace(bench.runs[0], load=load, met_objectives=True)],
    )
    text = render_text_report(bench_with_rate)
    assert f"Highest rate that meets the objectives: {rate:g} requests/s" in text
    assert ("5.556 requests/s were answered" in text) is not is_sustained


def test_report_notes_a_plan_that_ended_before_its_duration() -> None:
    def text(requests: int) -> str:
        bench = bench_result([request_row(index) for index in range(requests)])
        load = LoadSpec(concurrency=1, duration_s=5.0)
        point = msgspec.structs.replace(bench.runs[0], load=load)
        return render_text_report(msgspec.structs.replace(bench, runs=[point]))

    assert "--requests" not in text(5)
    assert "All 20000 requests" in text(20_000)


def test_html_report_escapes_text_and_loads_nothing() -> None:
    single = bench_result([scaled_row(n, 1 + n / 10) for n in range(8)], label="<script>x</script>")
    double = msgspec.structs.replace(
        single, runs=[*single.runs, *bench_result([request_row()]).runs]
    )
    for each in (
        single,
        double,
        bench_result([]),
        bench_result([request_row(outcome="error", error="cut", chunks_s=[])]),
    ):
        page = render_html_report(each)
        assert "<script" not in page
        assert page.count("<svg") == page.count("</svg>")
        assert "src=" not in page
        assert "href=" not in page
    assert render_html_report(double).count("<svg") > render_html_report(single).count("<svg") > 4


# --- exports -------------------------------------------------------------------------------------


def read_csv(bench: BenchResult) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(format_csv(bench), newline="")))


def read_prometheus(bench: BenchResult) -> dict[tuple[str, ...], float]:
    """Return values by name, load and further labels, and check that each family has help and a type."""
    text = format_prometheus(bench).decode()
    metrics: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        assert f"# HELP {family.name} " in text
        assert f"# TYPE {family.name} {family.type}\n" in text
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model", "m") == "m"
            key = (sample.name, labels.pop("load", ""), *labels.values())
            assert key not in metrics
            metrics[key] = sample.value
    return metrics


def test_csv_row_has_outcome_tokens_and_latencies() -> None:
    (cells,) = read_csv(bench_result([request_row(cached_tokens=8)]))
    assert (cells["load"], cells["outcome"], cells["finish"]) == ("rate 1", "ok", "length")
    assert (cells["input_tokens"], cells["cached_tokens"], cells["output_tokens"]) == (
        "10",
        "8",
        "5",
    )
    latencies = [float(cells[f"{name}_ms"]) for name in ("ttft", "tpot", "e2e", "ntpot", "lag")]
    assert latencies == pytest.approx([100, 20, 180, 36, 10])
    assert [float(cells[f"itl_{name}_ms"]) for name in ("mean", "max")] == pytest.approx([20, 20])


@settings(max_examples=25)
@given(st.text(), st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_survives_both_formats(error: str, label: str) -> None:
    bench = bench_result([request_row(outcome="error", error=error)], label=label)
    assert [(cells["error"], cells["load"]) for cells in read_csv(bench)] == [(error, label)]
    metrics = read_prometheus(bench_result([request_row()], label=label))
    assert metrics["argosy_bench_requests", label, "ok"] == 1


def test_metrics_equal_the_summary() -> None:
    rows = [request_row(), request_row(1), request_row(2, outcome="error", error="cut")]
    bench = bench_result(rows, objectives=Objectives({"ttft": 500.0}))
    metrics = read_prometheus(bench)
    assert metrics["argosy_bench_requests", "rate 1", "ok"] == 2
    assert metrics["argosy_bench_requests", "rate 1", "error"] == 1
    assert metrics["argosy_bench_tokens", "rate 1", "output"] == 10
    assert metrics["argosy_bench_attainment_ratio", "rate 1"] == pytest.approx(2 / 3)
    assert metrics["argosy_bench_ttft_seconds", "rate 1", "0.5"] == pytest.approx(0.1)
    assert metrics["argosy_bench_ttft_seconds_sum", "rate 1"] == pytest.approx(0.2)
    assert metrics["argosy_bench_ttft_seconds_count", "rate 1"] == 2
    assert metrics["argosy_bench_created_timestamp_seconds", ""] == 1767225600
    assert ("argosy_bench_tokens", "rate 1", "cached") not in metrics
    double = msgspec.structs.replace(
        bench, runs=[*bench.runs, *bench_result(rows[:1], "rate 2").runs]
    )
    assert read_prometheus(double)["argosy_bench_requests", "rate 2", "ok"] == 1


def test_unknown_values_are_left_out() -> None:
    bench = bench_result([request_row(0, outcome="error", error="cut", chunks_s=[], finish=None)])
    text = format_prometheus(bench).decode()
    assert 'argosy_bench_ttft_seconds_count{load="rate 1",model="m"} 0.0' in text
    assert "quantile" not in text
    assert "argosy_bench_attainment_ratio{" not in text
    (cells,) = read_csv(bench)
    assert cells["error"] == "cut"
    assert {cells[name] for name in ("finish", "ttft_ms", "e2e_ms", "itl_max_ms")} == {""}
