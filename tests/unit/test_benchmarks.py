"""Benchmarks of engines and gateways: workloads, figures, and comparisons."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.checkpoints import SHAPES
from benchmarks.gateway import DIRECT, medians, ratios
from benchmarks.gpu_session import Stage, format_summary, run_session
from benchmarks.hostile_tenant import BOUNDS, count_ejections, find_exceeded
from benchmarks.peers.worker import Request
from benchmarks.report import Limits, comparison, markdown, rows
from benchmarks.roofline import Demand
from benchmarks.workloads import (
    OFFLINE,
    figures,
    paced,
    ratio,
    requests,
    served_figures,
    served_plan,
    warm_up,
)
from benchmarks.workloads import rows as request_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.bench import summarize

VOCABULARY = 1000
MACHINE = {"read_gb_s_1": 20.0, "read_gb_s_2": 30.0, "matrix_tflop_s": 2.0}
LIMITS = Limits(MACHINE, SHAPES["qwen2-0.5b"])


def test_w1_has_its_published_token_counts() -> None:
    workload = requests("W1", 0, VOCABULARY)
    assert len(workload) == 64
    assert sum(len(request.prompt) for request in workload) == 19_900
    assert sum(request.output for request in workload) == 4_385


@settings(max_examples=15)
@given(seed=st.integers(-1, 50))
def test_rounds_differ_only_in_text(seed: int) -> None:
    for name in OFFLINE:
        assert all(request.output <= 8 for request in warm_up(name, VOCABULARY))
        reference, same_shape = requests(name, 1000, VOCABULARY), requests(name, seed, VOCABULARY)
        assert [(len(r.prompt), r.output) for r in reference] == [
            (len(r.prompt), r.output) for r in same_shape
        ]
        assert all(
            a.prompt[:16] != b.prompt[:16] for a, b in zip(reference, same_shape, strict=True)
        )


def test_w3_shares_only_its_prefix() -> None:
    workload = requests("W3 on", 0, VOCABULARY)
    assert {len(request.prompt) for request in workload} == {1088}
    assert len({tuple(request.prompt[:1024]) for request in workload}) == 1
    assert len({tuple(request.prompt[1024:]) for request in workload}) == 32


def test_figures_are_computed_from_token_times() -> None:
    workload = [Request([1], 3), Request([1], 1)]
    assert figures("W1", workload, [[1.0, 2.0, 4.0], [3.0]]) == {"out_tok_s": 1.0}
    single = [Request([1], 5)]
    assert figures("W2", single, [[0.5, 1.0, 1.5, 2.0, 2.5]]) == {
        "ttft_ms": 500.0,
        "decode_tok_s": 2.0,
    }
    assert figures("W3 on", workload, [[2.5], [7.0]]) == {"total_s": 7.0}
    with pytest.raises(ValueError, match="1 of 2"):
        figures("W1", workload, [[1.0], []])


def test_offline_w4_has_the_times_and_lengths_of_served_w4() -> None:
    plan = served_plan(1.54, 0)
    workload = paced(plan, VOCABULARY)
    planned = [request for (request,) in plan.sessions]
    assert [request.at_s for request in workload] == [request.at_s for request in planned]
    assert [request.output for request in workload] == [
        request.output_tokens for request in planned
    ]
    assert all(32 <= len(request.prompt) <= 512 for request in workload)
    assert 0 < workload[-1].at_s < 60


def test_w4_latencies_count_from_the_arrival() -> None:
    workload = [Request([1, 2], 3, 10.0)]
    served = served_figures(summarize(request_rows(workload, [[10.5, 10.6, 10.7]])))
    assert served == pytest.approx(
        {"ttft_p50_ms": 500, "ttft_p99_ms": 500, "itl_p50_ms": 100, "itl_p99_ms": 100}
    )
    with pytest.raises(ValueError, match="1 of 1"):
        served_figures(summarize(request_rows(workload, [[10.5, 10.6]])))


@given(
    values=st.dictionaries(st.integers(0, 9), st.floats(0.1, 100), min_size=1),
    factor=st.floats(0.1, 10),
)
def test_ratio_is_computed_within_a_round(values: dict[int, float], factor: float) -> None:
    scaled = {number: value * factor for number, value in values.items()}
    assert ratio(scaled, values) == pytest.approx(factor)
    assert ratio(scaled, {99: 1.0}) is None


def test_comparison_uses_peers_with_the_same_weights() -> None:
    engines = {
        "argosy": {0: 30.0},
        "vllm": {0: 20.0},
        "openvino": {0: 10.0},
        "openvino-int8": {0: 60.0},
    }
    assert comparison(engines, "out_tok_s", "bf16") == ("vllm", 1.5)
    assert comparison(engines, "total_s", "bf16") == ("openvino", 3.0)
    assert comparison(engines, "out_tok_s", "int8") is None


def test_shares_of_machine_limits() -> None:
    demand = Demand.of(SHAPES["qwen2-0.5b"])
    assert demand.token_bytes("bf16") == pytest.approx(988e6, rel=0.001)
    assert LIMITS.share("bf16", "W2", "decode_tok_s", 30e9 / 988e6) == pytest.approx(1, rel=0.001)
    assert LIMITS.share("int8", "W2", "decode_tok_s", 30e9 / 494e6) == pytest.approx(1, rel=0.001)
    prefill_s = 2 * demand.layers * 256 / 2e12
    assert LIMITS.share("bf16", "W2", "ttft_ms", prefill_s * 1e3) == pytest.approx(1, rel=0.01)
    assert LIMITS.share("bf16", "W3 on", "total_s", 1.0) is None


def test_report_has_figures_ratio_and_missing_engines() -> None:
    values = {("W1", "out_tok_s"): {"argosy": {0: 30.0, 1: 50.0}, "vllm": {0: 20.0, 1: 25.0}}}
    missing = {"openvino": "not installed: make peers/openvino"}
    printed = list(rows(values, {"vllm": "0.32.0"}, missing, LIMITS))
    assert [row.get("engine") for row in printed] == ["argosy", "vllm", None, "openvino"]
    assert printed[0]["out_tok_s"] == 40.0
    assert printed[1]["version"] == "0.32.0"
    assert printed[2]["ratio_to_best_peer"] == 1.75
    assert printed[3]["missing"] == missing["openvino"]
    table = markdown(values, missing, LIMITS)
    assert "| Argosy / best peer, bf16 | 1.75 (vllm) |" in table
    assert "make peers/openvino" in table


# --- gateways ------------------------------------------------------------------------------------


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
    assert not list(ratios({"json": {name: proxies[name] for name in ("argosy", "nginx")}}))


# --- hostile tenants -----------------------------------------------------------------------------


def test_figures_over_their_bounds_are_exceeded() -> None:
    assert not find_exceeded(BOUNDS)
    assert find_exceeded(BOUNDS | {"failures": 1, "p99_ms": 3001}) == ["failures", "p99_ms"]


def test_only_ejections_of_replicas_that_behave_well_count() -> None:
    line = '{"event": "replica_status_changed", "replica": "%s", "status": "%s"}\n'
    log = "".join(
        line % each for each in (("own", "ejected"), ("own", "ready"), ("bad", "ejected"))
    )
    assert count_ejections(log + "argosy gateway is ready\n") == 1


# --- sessions on a GPU ---------------------------------------------------------------------------


def test_stage_of_a_gpu_session_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    shell = {
        "exits": "echo '{\"case\": 1}'; echo reason >&2; exit 3",
        "dies": "kill -SEGV $$",
        "hangs": "sleep 1000 & sleep 1000",
        "garbles": "echo '{\"case\": '; echo no row; echo '{\"case\": 2}'",
    }
    stages = {name: Stage(["sh", "-c", text], 0.5) for name, text in shell.items()}
    stages |= {name: Stage(stage.command, 60) for name, stage in stages.items() if name != "hangs"}
    toy = [sys.executable, "-m", "benchmarks.gpu_stages", "environment", "--toy"]
    output = tmp_path / "rows"
    rows = run_session(stages | {"environment": Stage(toy, 120)}, output, 300)
    assert [json.loads(line) for line in output.read_text().splitlines()] == rows
    ends = {row["stage"]: row for row in rows if "status" in row}
    assert [row["status"] for row in ends.values()] == [
        *("failed", "failed", "timed out", "done", "done")
    ]
    assert (ends["exits"]["exit"], ends["exits"]["stderr"]) == (3, ["reason"])
    assert [row["case"] for row in rows if "case" in row] == [1, 2]
    assert [row["ceiling"] for row in rows if "ceiling" in row] == ["copy", "matmul"]
    assert "reason" in format_summary(rows)
    skipped = run_session(stages, output, 0)
    assert [row["status"] for row in skipped if "status" in row] == ["skipped"] * 4
