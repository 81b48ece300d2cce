"""Request rows and benchmark results for tests."""

from __future__ import annotations

import msgspec

from argosy.bench import (
    BenchResult,
    BenchSettings,
    BenchTarget,
    LengthDistribution,
    LoadSpec,
    Objectives,
    RequestRow,
    RunResult,
    Workload,
    summarize,
)


def request_row(index: int = 0, **changes: object) -> RequestRow:
    """Return a row with five tokens: scheduled at 1 s, sent 10 ms late, first token at 1.1 s, then one every 20 ms."""
    base = RequestRow(
        index=index,
        session=index,
        turn=0,
        phase="measured",
        outcome="ok",
        status=200,
        finish="length",
        scheduled_s=1.0,
        sent_s=1.01,
        end_s=1.18,
        chunks_s=[1.1, 1.12, 1.14, 1.16, 1.18],
        chunk_tokens=[1] * 5,
        planned_input=10,
        planned_output=5,
        input_tokens=10,
        output_tokens=5,
        counted_by_server=True,
    )
    return msgspec.structs.replace(base, **changes)


def scaled_row(index: int, factor: float) -> RequestRow:
    """Return a row with `factor` times the latencies of the default row."""
    return request_row(
        index,
        end_s=1 + 0.18 * factor,
        chunks_s=[1 + at * factor for at in (0.1, 0.12, 0.14, 0.16, 0.18)],
    )


def bench_result(
    rows: list[RequestRow], label: str = "rate 1", objectives: Objectives | None = None
) -> BenchResult:
    """Return a result of one run."""
    load = LoadSpec(concurrency=1, requests=len(rows))
    workload = Workload(
        input=LengthDistribution("fixed", 10), output=LengthDistribution("fixed", 5)
    )
    return BenchResult(
        version="0",
        created_at="2026-01-01T00:00:00.000+00:00",
        machine={"processor": "abacus", "cores": 2},
        settings=BenchSettings(
            target=BenchTarget(url="http://localhost"),
            workload=workload,
            loads=(load,),
            objectives=objectives,
        ),
        target=BenchTarget(model="m"),
        runs=[
            RunResult(
                label=label,
                load=load,
                plan_digest="p",
                started_at="2026-01-01T00:00:00.000+00:00",
                summary=summarize(rows, objectives),
                rows=rows,
            )
        ],
    )
