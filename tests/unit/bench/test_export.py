"""Results for other programs: what they read is what was measured."""

from __future__ import annotations

import csv
import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from argosy.bench import BenchResult, Objectives, format_csv, format_prometheus
from tests.support.request_rows import result, row


def read_csv(one: BenchResult) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(format_csv(one), newline="")))


def read_prometheus(one: BenchResult) -> dict[tuple[str, ...], float]:
    """Values by name, load and further label; each family has help and a type."""
    text = format_prometheus(one).decode()
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        assert f"# HELP {family.name} " in text
        assert f"# TYPE {family.name} {family.type}\n" in text
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model", "m") == "m"
            key = (sample.name, labels.pop("load", ""), *labels.values())
            assert key not in found
            found[key] = sample.value
    return found


def test_a_row_says_what_happened() -> None:
    (cells,) = read_csv(result([row(cached_tokens=8)]))
    assert (cells["load"], cells["outcome"], cells["finish"]) == ("rate 1", "ok", "length")
    assert (cells["input_tokens"], cells["cached_tokens"], cells["output_tokens"]) == (
        "10",
        "8",
        "5",
    )
    latencies = [float(cells[f"{name}_ms"]) for name in ("ttft", "tpot", "e2e", "ntpot", "lag")]
    assert latencies == pytest.approx([100, 20, 180, 36, 10])
    assert [float(cells[f"itl_{name}_ms"]) for name in ("mean", "max")] == pytest.approx([20, 20])


def test_what_is_unknown_is_empty() -> None:
    (cells,) = read_csv(result([row(outcome="error", error="cut", chunks_s=[], finish=None)]))
    assert cells["error"] == "cut"
    assert {cells[name] for name in ("finish", "ttft_ms", "e2e_ms", "itl_max_ms")} == {""}


@given(st.text(), st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_survives(error: str, label: str) -> None:
    one = result([row(outcome="error", error=error)], label=label)
    assert [(cells["error"], cells["load"]) for cells in read_csv(one)] == [(error, label)]
    found = read_prometheus(result([row()], label=label))
    assert found["argosy_bench_requests", label, "ok"] == 1


def test_metrics_are_those_of_the_summary() -> None:
    rows = [row(), row(1), row(2, outcome="error", error="cut")]
    found = read_prometheus(result(rows, objectives=Objectives({"ttft": 500.0})))
    assert found["argosy_bench_requests", "rate 1", "ok"] == 2
    assert found["argosy_bench_requests", "rate 1", "error"] == 1
    assert found["argosy_bench_tokens", "rate 1", "output"] == 10
    assert found["argosy_bench_attainment_ratio", "rate 1"] == pytest.approx(2 / 3)
    assert found["argosy_bench_ttft_seconds", "rate 1", "0.5"] == pytest.approx(0.1)
    assert found["argosy_bench_ttft_seconds_sum", "rate 1"] == pytest.approx(0.2)
    assert found["argosy_bench_ttft_seconds_count", "rate 1"] == 2
    assert found["argosy_bench_created_timestamp_seconds", ""] == 1767225600
    assert ("argosy_bench_tokens", "rate 1", "cached") not in found


def test_a_latency_of_nothing_has_no_quantiles() -> None:
    text = format_prometheus(result([row(0, outcome="error", error="cut")])).decode()
    assert 'argosy_bench_ttft_seconds_count{load="rate 1",model="m"} 0.0' in text
    assert "quantile" not in text


def test_runs_are_told_apart_by_their_load() -> None:
    one, two = result([row()], "rate 1"), result([row(), row(1)], "rate 2")
    found = read_prometheus(msgspec.structs.replace(one, runs=[*one.runs, *two.runs]))
    assert found["argosy_bench_requests", "rate 1", "ok"] == 1
    assert found["argosy_bench_requests", "rate 2", "ok"] == 2


def test_without_objectives_nothing_is_good() -> None:
    names = {name for name, *_ in read_prometheus(result([row()]))}
    assert "argosy_bench_attainment_ratio" not in names
