"""The engine benchmark's pure parts: what is asked, what it is judged by, how engines compare."""

from __future__ import annotations

import pytest
from benchmarks.checkpoints import SHAPES
from benchmarks.peers.worker import Request
from benchmarks.report import Limits, comparison, markdown, rows
from benchmarks.roofline import Demand
from benchmarks.workloads import (
    OFFLINE,
    best_peer,
    figures,
    paced,
    ratio,
    requests,
    served_figures,
    served_plan,
    warm_up,
)
from benchmarks.workloads import rows as as_rows
from hypothesis import given
from hypothesis import strategies as st

from argosy.bench import summarize

VOCABULARY = 1000
MACHINE = {"read_gb_s_1": 20.0, "read_gb_s_2": 30.0, "matrix_tflop_s": 2.0}
LIMITS = Limits(MACHINE, SHAPES["qwen2-0.5b"])


def test_w1_asks_the_tokens_that_its_figures_are_quoted_for() -> None:
    work = requests("W1", 0, VOCABULARY)
    assert len(work) == 64
    assert sum(len(request.prompt) for request in work) == 19_900
    assert sum(request.output for request in work) == 4_385


@given(seed=st.integers(-1, 50))
def test_rounds_differ_in_text_alone(seed: int) -> None:
    for name in OFFLINE:
        first, other = requests(name, 1000, VOCABULARY), requests(name, seed, VOCABULARY)
        assert [(len(r.prompt), r.output) for r in first] == [
            (len(r.prompt), r.output) for r in other
        ]
        assert all(a.prompt[:16] != b.prompt[:16] for a, b in zip(first, other, strict=True))


def test_w3_shares_its_prefix_and_no_more() -> None:
    work = requests("W3 on", 0, VOCABULARY)
    assert {len(request.prompt) for request in work} == {1088}
    assert len({tuple(request.prompt[:1024]) for request in work}) == 1
    assert len({tuple(request.prompt[1024:]) for request in work}) == 32


def test_a_warm_up_is_short_and_of_the_same_kind() -> None:
    for name in OFFLINE:
        warm = warm_up(name, VOCABULARY)
        assert 1 <= len(warm) <= 4
        assert all(request.output <= 8 for request in warm)


def test_figures_come_from_the_last_token_and_the_first() -> None:
    work = [Request([1], 3), Request([1], 1)]
    assert figures("W1", work, [[1.0, 2.0, 4.0], [3.0]]) == {"out_tok_s": 1.0}
    lone = [Request([1], 5)]
    assert figures("W2", lone, [[0.5, 1.0, 1.5, 2.0, 2.5]]) == {
        "ttft_ms": 500.0,
        "decode_tok_s": 2.0,
    }
    assert figures("W3 on", work, [[2.5], [7.0]]) == {"total_s": 7.0}


def test_an_answer_that_is_missing_is_no_figure() -> None:
    with pytest.raises(ValueError, match="1 of 2"):
        figures("W1", [Request([1], 1)] * 2, [[1.0], []])


def test_w4_without_a_server_has_the_times_and_lengths_of_w4_with_one() -> None:
    plan = served_plan(1.54, 0)
    work = paced(plan, VOCABULARY)
    asked = [request for (request,) in plan.sessions]
    assert [request.at_s for request in work] == [request.at_s for request in asked]
    assert [request.output for request in work] == [request.output_tokens for request in asked]
    assert all(32 <= len(request.prompt) <= 512 for request in work)
    assert 0 < work[-1].at_s < 60


def test_w4_is_judged_from_the_arrival() -> None:
    work = [Request([1, 2], 3, 10.0)]
    found = served_figures(summarize(as_rows(work, [[10.5, 10.6, 10.7]])))
    assert found == pytest.approx(
        {"ttft_p50_ms": 500, "ttft_p99_ms": 500, "itl_p50_ms": 100, "itl_p99_ms": 100}
    )
    with pytest.raises(ValueError, match="1 of 1"):
        served_figures(summarize(as_rows(work, [[10.5, 10.6]])))


def test_the_best_peer_has_the_highest_rate_and_the_lowest_time() -> None:
    peers = {"a": {0: 1.0, 1: 9.0, 2: 2.0}, "b": {0: 3.0}, "c": {}}
    assert best_peer("out_tok_s", peers) == "b"
    assert best_peer("total_s", peers) == "a"
    assert best_peer("total_s", {"c": {}}) is None


@given(
    values=st.dictionaries(st.integers(0, 9), st.floats(0.1, 100), min_size=1),
    factor=st.floats(0.1, 10),
)
def test_ratios_are_taken_within_a_round(values: dict[int, float], factor: float) -> None:
    ours = {number: value * factor for number, value in values.items()}
    assert ratio(ours, values) == pytest.approx(factor)
    assert ratio(ours, {99: 1.0}) is None


def test_argosy_is_compared_with_peers_of_the_same_weights() -> None:
    engines = {
        "argosy": {0: 30.0},
        "vllm": {0: 20.0},
        "openvino": {0: 10.0},
        "openvino-int8": {0: 60.0},
    }
    assert comparison(engines, "out_tok_s", "bf16") == ("vllm", 1.5)
    assert comparison(engines, "total_s", "bf16") == ("openvino", 3.0)
    assert comparison(engines, "out_tok_s", "int8") is None


def test_shares_of_the_machine() -> None:
    demand = Demand.of(SHAPES["qwen2-0.5b"])
    assert demand.token_bytes("bf16") == pytest.approx(988e6, rel=0.001)
    assert LIMITS.share("bf16", "W2", "decode_tok_s", 30e9 / 988e6) == pytest.approx(1, rel=0.001)
    assert LIMITS.share("int8", "W2", "decode_tok_s", 30e9 / 494e6) == pytest.approx(1, rel=0.001)
    prefill_s = 2 * demand.layers * 256 / 2e12
    assert LIMITS.share("bf16", "W2", "ttft_ms", prefill_s * 1e3) == pytest.approx(1, rel=0.01)
    assert LIMITS.share("bf16", "W3 on", "total_s", 1.0) is None


def test_what_is_printed_has_each_figure_the_ratio_and_what_is_missing() -> None:
    values = {("W1", "out_tok_s"): {"argosy": {0: 30.0, 1: 50.0}, "vllm": {0: 20.0, 1: 25.0}}}
    missing = {"openvino": "not installed: make peers/openvino"}
    found = list(rows(values, {"vllm": "0.32.0"}, missing, LIMITS))
    assert [row.get("engine") for row in found] == ["argosy", "vllm", None, "openvino"]
    assert found[0]["out_tok_s"] == 40.0
    assert found[1]["version"] == "0.32.0"
    assert found[2]["ratio_to_best_peer"] == 1.75
    assert found[3]["missing"] == missing["openvino"]
    table = markdown(values, missing, LIMITS)
    assert "| Argosy / best peer, bf16 | 1.75 (vllm) |" in table
    assert "make peers/openvino" in table
