"""Published trace schemas: valid files are read, malformed ones are rejected by line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.bench import (
    ArrivalProcess,
    BenchError,
    LengthDistribution,
    LoadSpec,
    TraceRequest,
    Workload,
    build_plan,
    read_trace,
)
from argosy.bench.plan import SyntheticPrompt

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


def write_trace(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_mooncake_trace_is_read(tmp_path: Path) -> None:
    rows = read_trace(write_trace(tmp_path, MOONCAKE))
    assert rows == [
        TraceRequest(at_s=0.0, input_tokens=1100, output_tokens=52, block_ids=(46, 47, 48)),
        TraceRequest(at_s=30.535 - 27.482, input_tokens=600, output_tokens=26, block_ids=(46, 57)),
    ]


def test_burstgpt_trace_is_read_without_failed_requests(tmp_path: Path) -> None:
    rows = read_trace(write_trace(tmp_path, BURSTGPT))
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


def test_limit_takes_the_first_requests(tmp_path: Path) -> None:
    rows = read_trace(write_trace(tmp_path, BURSTGPT), limit=2)
    assert len(rows) == 2


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


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_unreadable_trace_is_rejected(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "trace"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BenchError, match="Cannot read"):
        read_trace(path)


@given(st.text())
def test_any_text_is_rejected_with_a_bench_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(BenchError):
        read_trace(path)


def workload(path: Path, speed: float = 1.0) -> Workload:
    fixed = LengthDistribution("fixed", 1)
    return Workload(input=fixed, output=fixed, trace=str(path), trace_speed=speed)


def test_equal_blocks_give_equal_text(tmp_path: Path) -> None:
    plan = build_plan(workload(write_trace(tmp_path, MOONCAKE)), LoadSpec(), 3)
    first, second = (session[0].prompt for session in plan.sessions)
    assert isinstance(first, SyntheticPrompt)
    assert isinstance(second, SyntheticPrompt)
    assert [span.tokens for span in first.spans] == [512, 512, 76]
    assert [span.tokens for span in second.spans] == [512, 88]
    assert first.spans[0] == second.spans[0]
    assert first.spans[1].seed != second.spans[1].seed


def test_arrival_times_come_from_the_trace_unless_a_rate_is_set(tmp_path: Path) -> None:
    path = write_trace(tmp_path, BURSTGPT)
    from_trace = build_plan(workload(path, speed=2.0), LoadSpec(), 0)
    assert [session[0].at_s for session in from_trace.sessions] == [0.0, 20.0, 57.75]
    assert [session[0].output_tokens for session in from_trace.sessions] == [18, 230, 7]
    limited = build_plan(workload(path), LoadSpec(duration_s=41), 0)
    assert limited.request_count == 2
    rated = build_plan(workload(path), LoadSpec(arrivals=ArrivalProcess(rate=None)), 0)
    assert [session[0].at_s for session in rated.sessions] == [0.0, 0.0, 0.0]
