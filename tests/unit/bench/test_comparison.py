"""Comparing two results: the truth lies in the interval, and equal results are equal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.bench import (
    ArrivalProcess,
    BenchError,
    BenchResult,
    LoadSpec,
    Objectives,
    compare_results,
    format_comparison,
    load_result,
    render_html_report,
    render_text_report,
    save_result,
)
from tests.support.request_rows import result, row, stretched


def noisy(factor: float, seed: int, count: int = 60) -> BenchResult:
    rng = np.random.default_rng(seed)
    return result(
        [stretched(n, factor * each) for n, each in enumerate(rng.gamma(20, 0.05, count))]
    )


def test_a_result_equals_itself() -> None:
    one = noisy(1.0, 0)
    for ratio in compare_results([one], [one]):
        assert ratio.ratio == 1
        assert not ratio.is_significant
        assert ratio.low <= 1 <= ratio.high


def test_a_slower_server_is_seen() -> None:
    ratios = {each.measure: each for each in compare_results([noisy(1.0, 1)], [noisy(1.5, 2)])}
    for measure in ("ttft mean ms", "ttft p50 ms", "tpot mean ms", "itl mean ms", "e2e p50 ms"):
        assert ratios[measure].is_significant
        assert ratios[measure].low < 1.5 < ratios[measure].high


@settings(max_examples=5)
@given(st.integers(0, 1000))
def test_the_comparison_is_a_function_of_its_seed(seed: int) -> None:
    a, b = noisy(1.0, 1, 10), noisy(1.1, 2, 10)
    once, again = (compare_results([a], [b], seed=seed, resamples=50) for _ in range(2))
    assert once == again


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    covered = 0
    for trial in range(40):
        a, b = noisy(1.0, 2 * trial, 40), noisy(1.2, 2 * trial + 1, 40)
        ratios = compare_results([a], [b], resamples=100)
        mean = next(each for each in ratios if each.measure == "ttft mean ms")
        covered += mean.low <= 1.2 <= mean.high
    assert covered >= 33  # 38 are expected; fewer than 33 has a chance of 1 in 1000


def test_several_runs_a_side_cover_the_truth_that_one_run_cannot_know() -> None:
    rng = np.random.default_rng(0)
    covered = {1: 0, 4: 0}
    for trial in range(40):
        sides = [
            [
                noisy(factor * each, 9 * trial + n, 20)
                for n, each in enumerate(rng.gamma(25, 0.04, 4))
            ]
            for factor in (1.0, 1.2)
        ]
        for runs in covered:
            ratios = compare_results(sides[0][:runs], sides[1][:runs], resamples=100)
            mean = next(each for each in ratios if each.measure == "ttft mean ms")
            assert mean.runs == (runs, runs)
            covered[runs] += mean.low <= 1.2 <= mean.high
    assert covered[4] >= 34
    assert (
        covered[1] < 30
    )  # servers differ from run to run by 20 %: requests of one run do not tell


def test_equal_runs_are_equal() -> None:
    one = noisy(1.0, 0)
    for ratio in compare_results([one, one], [one, one, one]):
        assert ratio.runs == (2, 3)
        assert ratio.ratio == pytest.approx(1)
        assert ratio.high - ratio.low < 1e-6


def test_one_run_against_several() -> None:
    several = [noisy(1.0, seed) for seed in range(3)]
    ratios = {each.measure: each for each in compare_results([noisy(3.0, 7)], several)}
    assert ratios["e2e mean ms"].low < 1 / 3 < ratios["e2e mean ms"].high < 1
    text = format_comparison([noisy(3.0, 7)], several, list(ratios.values()))
    assert text.count("B: m") == 3
    assert "one side is a single run" in text


def test_runs_of_the_same_plans_in_another_order_are_no_caution() -> None:
    one = result([row()])
    two = msgspec.structs.replace(
        one, runs=[msgspec.structs.replace(one.runs[0], plan_digest="another")]
    )
    assert "plans differ" not in format_comparison([one, two], [two, one], [])
    assert "plans differ" in format_comparison([one, two], [one, one], [])


def test_a_tail_of_less_than_a_request_is_not_compared() -> None:
    few = {
        each.measure
        for each in compare_results([noisy(1.0, 1, 99)], [noisy(1.0, 2, 120)], resamples=20)
    }
    assert "ttft p90 ms" in few
    assert "ttft p99 ms" not in few
    many = {
        each.measure
        for each in compare_results([noisy(1.0, 1, 100)], [noisy(1.0, 2, 120)], resamples=20)
    }
    assert "ttft p99 ms" in many


def test_loads_that_match_are_compared() -> None:
    a, b = result([row()], "rate 1"), result([row()], "rate 2")
    assert {each.load for each in compare_results([a], [b])} == {"rate 1 / rate 2"}
    two = msgspec.structs.replace(a, runs=[*a.runs, *b.runs])
    assert {each.load for each in compare_results([two], [b])} == {"rate 2"}
    three = msgspec.structs.replace(
        a, runs=[msgspec.structs.replace(a.runs[0], label=f"rate {n}") for n in (8, 9)]
    )
    with pytest.raises(BenchError, match="no load in common"):
        compare_results([three], [two])


def test_text_says_what_makes_a_comparison_weak() -> None:
    a = result([row(), row(1, outcome="error", error="cut")])
    warm = result([row(cached_tokens=8)]).runs[0]
    other = msgspec.structs.replace(warm, plan_digest="q")
    b = msgspec.structs.replace(a, machine={"processor": "other"}, runs=[other])
    text = format_comparison([a], [b], compare_results([a], [b]))
    for caution in ("plans differ", "different machines", "A has 1 failed", "80% of B's"):
        assert caution in text


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    one = result(
        [row(), row(1, outcome="error", error="cut")], objectives=Objectives({"ttft": 9.0})
    )
    save_result(one, tmp_path / "a.json")
    assert load_result(tmp_path / "a.json") == one


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(BenchError, match="is not a result"):
        load_result(path)
    with pytest.raises(BenchError, match="Cannot read"):
        load_result(tmp_path / "none.json")


def test_the_text_reads_like_vllms() -> None:
    text = render_text_report(result([row()], objectives=Objectives({"ttft": 500.0})))
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


@pytest.mark.parametrize(("rate", "kept_up"), [(6.0, True), (500.0, False)])
def test_a_rate_that_nobody_kept_up_with_is_not_told_without_saying_so(
    rate: float, kept_up: bool
) -> None:
    told = result([row()], objectives=Objectives({"ttft": 500.0}))  # 5.56 requests/s
    load = LoadSpec(arrivals=ArrivalProcess(rate=rate), requests=1)
    found = msgspec.structs.replace(
        told,
        best_rate=rate,
        settings=msgspec.structs.replace(told.settings, find_rate=True),
        runs=[msgspec.structs.replace(told.runs[0], load=load, met_objectives=True)],
    )
    text = render_text_report(found)
    assert f"Highest rate that meets the objectives: {rate:g} requests/s" in text
    assert ("5.556 requests/s were answered" in text) is not kept_up


def test_a_plan_that_was_through_before_its_time_says_so() -> None:
    def text(requests: int) -> str:
        told = result([row(index) for index in range(requests)])
        load = LoadSpec(concurrency=1, duration_s=5.0)
        point = msgspec.structs.replace(told.runs[0], load=load)
        return render_text_report(msgspec.structs.replace(told, runs=[point]))

    assert "--requests" not in text(5)
    assert "All 20000 requests" in text(20_000)


def test_the_page_fetches_nothing_and_escapes() -> None:
    one = result([stretched(n, 1 + n / 10) for n in range(8)], label="<script>x</script>")
    two = msgspec.structs.replace(one, runs=[*one.runs, *result([row()]).runs])
    for each in (one, two, result([]), result([row(outcome="error", error="cut", chunks_s=[])])):
        page = render_html_report(each)
        assert "<script" not in page
        assert page.count("<svg") == page.count("</svg>")
        assert "src=" not in page
        assert "href=" not in page
    assert render_html_report(two).count("<svg") > render_html_report(one).count("<svg") > 4
