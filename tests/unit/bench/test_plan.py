"""Load plans and the files of prompts and traces: equal for equal seeds, within bounds, and rejected by line."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.bench import (
    ArrivalProcess,
    BenchError,
    LengthDistribution,
    LoadPlan,
    LoadSpec,
    PlannedRequest,
    TraceRequest,
    Workload,
    build_plan,
    draw_arrival_times,
    parse_length_distribution,
    read_trace,
)
from argosy.bench.plan import SyntheticPrompt, TextPrompt

rates = st.floats(0.01, 1e4)
burstiness_values = st.none() | st.floats(0.05, 20)
seeds = st.integers(0, 2**32)
WORKLOAD = Workload(
    input=LengthDistribution("uniform", 32, 512), output=LengthDistribution("uniform", 16, 128)
)


def planned_requests(plan: LoadPlan) -> list[PlannedRequest]:
    return [request for session in plan.sessions for request in session]


def synthetic_prompt(request: PlannedRequest) -> SyntheticPrompt:
    assert isinstance(request.prompt, SyntheticPrompt)
    return request.prompt


@given(rates, burstiness_values, seeds, st.integers(1, 300), st.floats(0, 20))
def test_arrivals_ascend_and_have_the_requested_count(
    rate: float, burstiness: float | None, seed: int, count: int, ramp_s: float
) -> None:
    arrivals = ArrivalProcess(rate=rate, burstiness=burstiness, ramp_s=ramp_s)
    times = draw_arrival_times(arrivals, seed=seed, count=count, duration_s=None)
    assert len(times) == count
    assert all(0 <= a <= b for a, b in itertools.pairwise(times))
    assert times == draw_arrival_times(arrivals, seed=seed, count=count, duration_s=None)


@given(st.floats(0.1, 100), burstiness_values, seeds, st.floats(0.1, 20))
def test_arrivals_end_before_the_duration(
    rate: float, burstiness: float | None, seed: int, duration_s: float
) -> None:
    arrivals = ArrivalProcess(rate=rate, burstiness=burstiness)
    times = draw_arrival_times(arrivals, seed=seed, count=None, duration_s=duration_s)
    assert all(at < duration_s for at in times)
    more = draw_arrival_times(arrivals, seed=seed, count=len(times) + 1, duration_s=None)
    assert more[: len(times)] == times
    assert more[-1] >= duration_s


@given(seeds, st.floats(0.5, 50))
def test_seed_scales_the_same_gaps_at_every_rate(seed: int, rate: float) -> None:
    slow, fast = (
        draw_arrival_times(ArrivalProcess(rate=each_rate), seed=seed, count=50, duration_s=None)
        for each_rate in (rate, 2 * rate)
    )
    assert fast == pytest.approx([at / 2 for at in slow])


@pytest.mark.parametrize("burstiness", [None, 0.3, 1.0, 4.0])
def test_arrivals_have_the_requested_rate_and_burstiness(burstiness: float | None) -> None:
    count = 20_000
    times = draw_arrival_times(
        ArrivalProcess(rate=10, burstiness=burstiness), seed=1, count=count, duration_s=None
    )
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.1)
    # The squared coefficient of variation of a gamma distribution is 1 / shape.
    assert variance / mean**2 == pytest.approx(
        1 / burstiness if burstiness else 0.0, rel=0.15, abs=1e-9
    )


def test_ramp_is_linear() -> None:
    arrivals = ArrivalProcess(rate=100, burstiness=None, ramp_s=10)
    times = draw_arrival_times(arrivals, seed=0, count=None, duration_s=20)
    arrivals_by = [sum(at < second for at in times) for second in (5, 10, 20)]
    assert arrivals_by == pytest.approx([125, 500, 1500], abs=1)


@pytest.mark.parametrize("invalid_rate", [0.0, -1.0, math.nan, math.inf])
def test_invalid_rates_are_rejected(invalid_rate: float) -> None:
    with pytest.raises(BenchError, match="above 0"):
        ArrivalProcess(rate=invalid_rate)
    with pytest.raises(BenchError, match="above 0"):
        ArrivalProcess(rate=1.0, burstiness=invalid_rate)


loads = st.one_of(
    st.builds(
        LoadSpec,
        arrivals=st.builds(ArrivalProcess, rate=st.none() | rates, burstiness=burstiness_values),
        concurrency=st.none() | st.integers(1, 8),
        requests=st.integers(1, 60),
        warmup=st.integers(0, 5),
    ),
    st.builds(LoadSpec, concurrency=st.integers(1, 8), requests=st.integers(1, 60)),
)
workloads = st.builds(
    Workload,
    input=st.just(LengthDistribution("lognormal", 50, 1.0)),
    output=st.just(LengthDistribution("normal", 20, 10)),
    prefix_tokens=st.integers(0, 40),
    prefix_groups=st.integers(1, 4),
    turns=st.integers(1, 5),
    think_s=st.floats(0, 3),
)


@given(workloads, loads, seeds)
def test_plan_is_deterministic_and_has_the_requested_sessions_and_lengths(
    workload: Workload, load: LoadSpec, seed: int
) -> None:
    plan = build_plan(workload, load, seed)
    assert plan == build_plan(workload, load, seed)
    assert plan.digest() == build_plan(workload, load, seed).digest()
    assert plan.digest() != build_plan(workload, load, seed + 1).digest()
    assert load.requests is not None
    assert [request.index for request in planned_requests(plan)] == list(range(load.requests))
    assert len(plan.warmup) == load.warmup
    assert {request.phase for request in plan.warmup} <= {"warmup"}
    for session in plan.sessions:
        assert [request.turn for request in session] == list(range(len(session)))
        assert len(session) <= workload.turns
        assert all(request.at_s is None for request in session[1:])
        assert (session[0].at_s is None) == (load.arrivals is None)
    for request in planned_requests(plan):
        assert request.output_tokens >= 1
        assert synthetic_prompt(request).tokens >= 1 + workload.prefix_tokens


@given(seeds, st.integers(1, 4))
def test_only_prefixes_are_shared_and_only_within_groups(seed: int, groups: int) -> None:
    workload = msgspec.structs.replace(WORKLOAD, prefix_tokens=64, prefix_groups=groups)
    plan = build_plan(workload, LoadSpec(concurrency=1, requests=80, warmup=2), seed)
    prefixes = [synthetic_prompt(request).spans[0] for request in planned_requests(plan)]
    own_seeds = [synthetic_prompt(request).spans[1].seed for request in planned_requests(plan)]
    assert len(set(prefixes)) <= groups
    assert {span.tokens for span in prefixes} == {64}
    assert len(set(own_seeds)) == len(own_seeds)
    warm = {span.seed for request in plan.warmup for span in synthetic_prompt(request).spans}
    assert not warm & {*own_seeds, *(span.seed for span in prefixes)}


@given(workloads, loads, seeds)
def test_runs_of_a_seed_differ_only_in_text(workload: Workload, load: LoadSpec, seed: int) -> None:
    first, second = (build_plan(workload, load, seed, run) for run in (0, 1))
    for a, b in zip(planned_requests(first), planned_requests(second), strict=True):
        assert (a.at_s, a.output_tokens, a.turn) == (b.at_s, b.output_tokens, b.turn)
        assert synthetic_prompt(a).tokens == synthetic_prompt(b).tokens
        assert not set(synthetic_prompt(a).spans) & set(synthetic_prompt(b).spans)


def test_requests_of_the_ramp_are_not_measured() -> None:
    load = LoadSpec(arrivals=ArrivalProcess(rate=10, ramp_s=5), duration_s=10, ramp_s=5)
    for request in planned_requests(build_plan(WORKLOAD, load, 0)):
        assert request.at_s is not None
        assert (request.phase == "ramp") == (request.at_s < 5)


@pytest.mark.parametrize(
    ("workload", "load", "message"),
    [
        (WORKLOAD, LoadSpec(requests=5), "The load is missing"),
        (WORKLOAD, LoadSpec(concurrency=2), "has no end"),
        (WORKLOAD, LoadSpec(arrivals=ArrivalProcess(rate=2)), "has no end"),
        (
            WORKLOAD,
            LoadSpec(arrivals=ArrivalProcess(rate=None), duration_s=5),
            "number of requests",
        ),
        (WORKLOAD, LoadSpec(concurrency=1, duration_s=5, ramp_s=5), "before its ramp"),
        (WORKLOAD, LoadSpec(arrivals=ArrivalProcess(rate=5), duration_s=math.inf), "infinite"),
        (WORKLOAD, LoadSpec(concurrency=1, requests=5, ramp_s=math.inf), "infinite"),
        (
            msgspec.structs.replace(WORKLOAD, think_s=math.inf),
            LoadSpec(concurrency=1, requests=5),
            "infinite",
        ),
        (
            WORKLOAD,
            LoadSpec(arrivals=ArrivalProcess(rate=1e-6), duration_s=0.001),
            "No request would be sent",
        ),
    ],
)
def test_invalid_plans_are_rejected(workload: Workload, load: LoadSpec, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        build_plan(workload, load, 0)


@given(st.integers(1, 1000), st.integers(0, 1000), seeds)
def test_uniform_lengths_stay_within_bounds(low: int, more: int, seed: int) -> None:
    lengths = parse_length_distribution(f"uniform:{low}-{low + more}")
    assert lengths == parse_length_distribution(f"{low}-{low + more}")
    rng = np.random.default_rng(seed)
    assert all(low <= lengths.draw(rng) <= low + more for _ in range(20))


def test_length_distributions_are_parsed() -> None:
    texts = ("128", "fixed:1", "normal:256,64", "lognormal:200,0.8")
    assert [parse_length_distribution(text) for text in texts] == [
        LengthDistribution("fixed", 128),
        LengthDistribution("fixed", 1),
        LengthDistribution("normal", 256, 64),
        LengthDistribution("lognormal", 200, 0.8),
    ]


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "x", "uniform:9-3", "normal:5", "zipf:1,2", "1,2", "nan", "inf", "1e99"]
)
def test_invalid_lengths_are_rejected(text: str) -> None:
    with pytest.raises(BenchError, match="is not a length"):
        parse_length_distribution(text)


def test_prompts_of_a_file_are_used_in_order_and_repeated(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "one", "output_tokens": 3}\n\n'
        '{"messages": [{"role": "user", "content": "two"}]}\n'
    )
    workload = msgspec.structs.replace(WORKLOAD, prompts=str(file))
    planned = planned_requests(build_plan(workload, LoadSpec(concurrency=1, requests=3), 0))
    assert planned[0].prompt == planned[2].prompt != planned[1].prompt
    assert planned[0].output_tokens == 3
    assert 16 <= planned[1].output_tokens <= 128


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.txt"])
def test_only_line_feeds_separate_prompts(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    prompt = "one\u2028and\x85the\u2029same"
    line = json.dumps({"prompt": prompt}, ensure_ascii=False) if name.endswith("jsonl") else prompt
    file.write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n{line}\r\n".encode())
    workload = msgspec.structs.replace(WORKLOAD, prompts=str(file))
    planned = planned_requests(build_plan(workload, LoadSpec(concurrency=1, requests=3), 0))
    assert [each.prompt for each in planned] == [TextPrompt(prompt)] * 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no prompt"),
        ("{", "line 1"),
        ('{"prompt": "a"}\n{"x": 1}', "line 2"),
        ('{"prompt": "a", "max_tokens": 0}', "1 token or more"),
    ],
)
def test_invalid_prompt_files_are_rejected(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    workload = msgspec.structs.replace(WORKLOAD, prompts=str(file))
    with pytest.raises(BenchError, match=message):
        build_plan(workload, LoadSpec(concurrency=1, requests=3), 0)


# --- traces --------------------------------------------------------------------------------------

MOONCAKE = """\
{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 600, "output_length": 26, "hash_ids": [46, 57]}
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
120.5,GPT-4,20,7,27,API log
"""
AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.509930+00:00,2399,6
2024-05-10 00:00:01+00:00,76,15
"""


def write_trace(tmp_path: Path, text: str, encoding: str = "utf-8") -> Path:
    path = tmp_path / "trace"
    path.write_text(text, encoding)
    return path


def test_mooncake_trace_is_read(tmp_path: Path) -> None:
    rows = read_trace(write_trace(tmp_path, MOONCAKE))
    assert rows == [
        TraceRequest(at_s=0.0, input_tokens=1100, output_tokens=52, block_ids=(46, 47, 48)),
        TraceRequest(at_s=30.535 - 27.482, input_tokens=600, output_tokens=26, block_ids=(46, 57)),
    ]


def test_burstgpt_trace_is_read_without_failed_requests(tmp_path: Path) -> None:
    path = write_trace(tmp_path, BURSTGPT)
    rows = read_trace(path)
    assert read_trace(path, limit=2) == rows[:2]
    assert [(r.at_s, r.input_tokens, r.output_tokens) for r in rows] == [
        (0.0, 472, 18),
        (40.0, 1087, 230),
        (115.5, 20, 7),
    ]


@pytest.mark.parametrize(
    ("text", "times"), [(AZURE_2023, [0, 4.314579]), (AZURE_2024, [0, 0.5, 0.99007])]
)
def test_azure_trace_is_read(tmp_path: Path, text: str, times: list[float]) -> None:
    rows = read_trace(write_trace(tmp_path, text))
    assert [row.at_s for row in rows] == pytest.approx(times, abs=1e-6)
    assert rows[0].output_tokens in {44, 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a known trace"),
        ("a,b,c\n1,2,3\n", "is not a known trace"),
        ('{"timestamp": 1}\n', "line 1"),
        (MOONCAKE + "{oops\n", "line 3"),
        (MOONCAKE + '{"timestamp": 1, "input_length": -4, "output_length": 2}\n', "line 3"),
        (BURSTGPT + "7,ChatGPT,many,1,2,API log\n", "line 6"),
        (AZURE_2023 + "yesterday,1,2\n", "line 4"),
        (AZURE_2023 + "2023-11-16 18:15:46\n", "line 4"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ("Timestamp,Request tokens,Response tokens\nnan,1,1\n", "finite"),
        ('Timestamp,Request tokens,Response tokens\n1,"1' + "1" * 200_000, "field"),
    ],
)
def test_malformed_trace_is_rejected_by_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        read_trace(write_trace(tmp_path, text))
    with pytest.raises(BenchError, match="Cannot read"):
        read_trace(tmp_path / "absent")
    with pytest.raises(BenchError, match="Cannot read"):
        read_trace(write_trace(tmp_path, "\xff\xfe\x00", encoding="latin-1"))


@given(st.text())
def test_any_text_is_rejected_with_a_bench_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(BenchError):
        read_trace(path)


def traced_workload(path: Path, speed: float = 1.0) -> Workload:
    fixed = LengthDistribution("fixed", 1)
    return Workload(input=fixed, output=fixed, trace=str(path), trace_speed=speed)


def test_equal_blocks_give_equal_text(tmp_path: Path) -> None:
    plan = build_plan(traced_workload(write_trace(tmp_path, MOONCAKE)), LoadSpec(), 3)
    first, second = (session[0].prompt for session in plan.sessions)
    assert isinstance(first, SyntheticPrompt)
    assert isinstance(second, SyntheticPrompt)
    assert [span.tokens for span in first.spans] == [512, 512, 76]
    assert [span.tokens for span in second.spans] == [512, 88]
    assert first.spans[0] == second.spans[0]
    assert first.spans[1].seed != second.spans[1].seed


def test_arrival_times_come_from_the_trace_unless_a_rate_is_set(tmp_path: Path) -> None:
    path = write_trace(tmp_path, BURSTGPT)
    from_trace = build_plan(traced_workload(path, speed=2.0), LoadSpec(), 0)
    assert [session[0].at_s for session in from_trace.sessions] == [0.0, 20.0, 57.75]
    assert [session[0].output_tokens for session in from_trace.sessions] == [18, 230, 7]
    limited = build_plan(traced_workload(path), LoadSpec(duration_s=41), 0)
    assert limited.request_count == 2
    rated = build_plan(traced_workload(path), LoadSpec(arrivals=ArrivalProcess(rate=None)), 0)
    assert [session[0].at_s for session in rated.sessions] == [0.0, 0.0, 0.0]
