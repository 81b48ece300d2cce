"""Benchmark export: CSV and Prometheus readers get the measured values."""

from __future__ import annotations

import csv
import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from argosy.bench import BenchResult, Objectives, format_csv, format_prometheus
from tests.support.request_rows import bench_result, request_row


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


def test_unknown_values_are_empty_cells() -> None:
    (cells,) = read_csv(
        bench_result([request_row(outcome="error", error="cut", chunks_s=[], finish=None)])
    )
    assert cells["error"] == "cut"
    assert {cells[name] for name in ("finish", "ttft_ms", "e2e_ms", "itl_max_ms")} == {""}


@given(st.text(), st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_survives_both_formats(error: str, label: str) -> None:
    bench = bench_result([request_row(outcome="error", error=error)], label=label)
    assert [(cells["error"], cells["load"]) for cells in read_csv(bench)] == [(error, label)]
    metrics = read_prometheus(bench_result([request_row()], label=label))
    assert metrics["argosy_bench_requests", label, "ok"] == 1


def test_metrics_equal_the_summary() -> None:
    rows = [request_row(), request_row(1), request_row(2, outcome="error", error="cut")]
    metrics = read_prometheus(bench_result(rows, objectives=Objectives({"ttft": 500.0})))
    assert metrics["argosy_bench_requests", "rate 1", "ok"] == 2
    assert metrics["argosy_bench_requests", "rate 1", "error"] == 1
    assert metrics["argosy_bench_tokens", "rate 1", "output"] == 10
    assert metrics["argosy_bench_attainment_ratio", "rate 1"] == pytest.approx(2 / 3)
    assert metrics["argosy_bench_ttft_seconds", "rate 1", "0.5"] == pytest.approx(0.1)
    assert metrics["argosy_bench_ttft_seconds_sum", "rate 1"] == pytest.approx(0.2)
    assert metrics["argosy_bench_ttft_seconds_count", "rate 1"] == 2
    assert metrics["argosy_bench_created_timestamp_seconds", ""] == 1767225600
    assert ("argosy_bench_tokens", "rate 1", "cached") not in metrics


def test_latency_without_samples_has_no_quantiles() -> None:
    text = format_prometheus(bench_result([request_row(0, outcome="error", error="cut")])).decode()
    assert 'argosy_bench_ttft_seconds_count{load="rate 1",model="m"} 0.0' in text
    assert "quantile" not in text


def test_runs_have_a_load_label() -> None:
    first, second = (
        bench_result([request_row()], "rate 1"),
        bench_result([request_row(), request_row(1)], "rate 2"),
    )
    metrics = read_prometheus(msgspec.structs.replace(first, runs=[*first.runs, *second.runs]))
    assert metrics["argosy_bench_requests", "rate 1", "ok"] == 1
    assert metrics["argosy_bench_requests", "rate 2", "ok"] == 2


def test_no_attainment_without_objectives() -> None:
    names = {name for name, *_ in read_prometheus(bench_result([request_row()]))}
    assert "argosy_bench_attainment_ratio" not in names
