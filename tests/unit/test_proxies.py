"""Gateway benchmark: latencies are relative to direct requests, and ratios to the best rival."""

from __future__ import annotations

from benchmarks.gateway import DIRECT, medians, ratios


def test_delays_are_relative_to_direct_requests() -> None:
    rounds = {
        DIRECT: [
            {"us_per_token": 0.0, "delay_p50_ms": 1.0},
            {"us_per_token": 0.0, "delay_p50_ms": 3.0},
        ],
        "argosy": [
            {"us_per_token": 9.0, "delay_p50_ms": 1.5},
            {"us_per_token": 11.0, "delay_p50_ms": 4.5},
        ],
    }
    table = medians({"64 streams": rounds})["64 streams"]
    assert table[DIRECT]["delay_p50_ms"] == 2.0
    assert table["argosy"] == {"us_per_token": 10.0, "delay_p50_ms": 1.0}


def test_ratio_is_to_the_best_rival_of_each_figure() -> None:
    proxies = {
        "argosy": {"requests_s": 300.0, "p99_ms": 2.0, "errors": 0.0},
        "sglang-router": {"requests_s": 100.0, "p99_ms": 4.0, "errors": 0.0},
        "sglang-router-cache-aware": {"requests_s": 200.0, "p99_ms": 8.0, "errors": 0.0},
        "nginx": {"requests_s": 9000.0, "p99_ms": 0.1, "errors": 0.0},
    }
    ratio_by_figure = {row["figure"]: row for row in ratios({"json": proxies})}
    assert ratio_by_figure["requests_s"]["ratio_to_best_rival"] == 1.5
    assert ratio_by_figure["requests_s"]["best_rival"] == "sglang-router-cache-aware"
    assert ratio_by_figure["p99_ms"]["ratio_to_best_rival"] == 0.5
    assert ratio_by_figure["p99_ms"]["best_rival"] == "sglang-router"
    assert "errors" not in ratio_by_figure


def test_no_ratio_without_a_rival() -> None:
    assert not list(ratios({"json": {"argosy": {"requests_s": 1.0}, "nginx": {"requests_s": 2.0}}}))
