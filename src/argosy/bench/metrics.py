"""Definitions of the measured metrics, as inference-perf, vLLM and MLPerf agree on them.

Latencies are those of successful requests, in milliseconds:

- TTFT: from the *scheduled* send to the first chunk with text.
- E2E: from the scheduled send to the last chunk.
- TPOT: (E2E - TTFT) / (output tokens - 1).
- NTPOT: E2E / output tokens.
- ITL: each gap between two tokens. Tokens of one chunk have no gap between them.
- ICL: each gap between two chunks.
- Schedule lag: actual send minus scheduled send.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec
import numpy as np

from argosy.bench.plan import RequestPhase

RequestOutcome = Literal["ok", "error", "cancelled"]
MetricName = Literal["ttft", "tpot", "itl", "icl", "e2e", "ntpot", "send_ttft", "lag"]
METRIC_NAMES: tuple[MetricName, ...] = get_args(MetricName)
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p999": 99.9}
"""Percentiles of a sample, by the field of `SampleStats`."""


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one request. Times are in seconds after the start of the run."""

    index: int
    session: int
    turn: int
    phase: RequestPhase
    outcome: RequestOutcome
    error: str = ""
    detail: str = ""
    status: int = 0
    finish: str | None = None
    scheduled_s: float
    sent_s: float
    end_s: float
    """Time of the last chunk, or of the failure."""
    chunks_s: list[float] = []
    """Time of each chunk with text."""
    chunk_tokens: list[int] | None = None
    """Tokens of each of these chunks, if the server reports running counts."""
    planned_input: int | None
    planned_output: int
    input_tokens: int | None = None
    """Prompt tokens as reported by the server's usage."""
    cached_tokens: int | None = None
    """Prompt tokens from the server's prefix cache, if the server reports them."""
    output_tokens: int = 0
    """Output tokens as reported by the server's usage, otherwise the number of chunks."""
    counted_by_server: bool = False
    resent: bool = False
    """Whether the request was sent again on a new connection because the server had closed the reused one."""


class SampleStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a sample. All are 0 if the sample is empty."""

    count: int = 0
    mean: float = 0.0
    std: float = 0.0
    min: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    max: float = 0.0


def compute_stats(values: Sequence[float]) -> SampleStats:
    """Compute the statistics of a sample.

    Percentiles are interpolated linearly between order statistics. `std` is the population's standard deviation.
    """
    if not len(values):
        return SampleStats()
    array = np.asarray(values, dtype=np.float64)
    percentiles = np.percentile(array, list(PERCENTILES.values())).tolist()
    return SampleStats(
        count=len(array),
        mean=float(array.mean()),
        std=float(array.std()),
        min=float(array.min()),
        max=float(array.max()),
        **dict(zip(PERCENTILES, percentiles, strict=True)),
    )


def metric_values(row: RequestRow, metric: MetricName) -> list[float]:
    """Return the values of `metric` that the request contributes, in milliseconds."""
    if metric == "lag":
        return [1e3 * (row.sent_s - row.scheduled_s)]
    if not row.chunks_s:
        return []
    first = row.chunks_s[0]
    match metric:
        case "ttft":
            return [1e3 * (first - row.scheduled_s)]
        case "send_ttft":
            return [1e3 * (first - row.sent_s)]
        case "e2e":
            return [1e3 * (row.end_s - row.scheduled_s)]
        case "ntpot":
            return [1e3 * (row.end_s - row.scheduled_s) / max(row.output_tokens, 1)]
        case "tpot":
            gaps = row.output_tokens - 1
            return [1e3 * (row.end_s - first) / gaps] if gaps > 0 else []
        case "icl":
            return [1e3 * (after - before) for before, after in itertools.pairwise(row.chunks_s)]
        case "itl":
            return _token_gaps_ms(row)


def _token_gaps_ms(row: RequestRow) -> list[float]:
    tokens = row.chunk_tokens or [1] * len(row.chunks_s)
    gaps = [0.0] * (max(tokens[0], 1) - 1)
    for (before, after), count in zip(itertools.pairwise(row.chunks_s), tokens[1:], strict=True):
        gaps.append(1e3 * (after - before))
        gaps += [0.0] * (max(count, 1) - 1)
    return gaps


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a run. Rates are per second of `duration_s`."""

    duration_s: float
    """Time from the first scheduled send that is measured to the last end."""
    completed: int
    failed: int
    cancelled: int
    unmeasured: int
    """Warm-up and ramp requests."""
    errors: dict[str, int]
    input_tokens: int
    cached_tokens: int | None
    """Input tokens from the server's prefix cache, or None if the server does not report them."""
    output_tokens: int
    request_rate: float
    output_token_rate: float
    total_token_rate: float
    peak_output_token_rate: float
    """Output tokens of the second with the most."""
    mean_concurrency: float
    peak_concurrency: int
    good_requests: int | None = None
    """Requests that met every objective, or None without objectives."""
    goodput: float | None = None
    attainment: float | None = None
    """Share of good requests in all measured requests, failures included."""
    input_mismatches: int = 0
    """Requests whose prompt has another length than planned by the server's count."""
    output_mismatches: int = 0
    missing_usage: int = 0
    """Requests without usage from the server. Their chunks were counted as tokens."""
    resent: int = 0
    """Requests that were sent again because the server had closed the reused connection."""
    multi_token_responses: int = 0
    """Requests with more tokens than chunks."""
    latency: dict[MetricName, SampleStats]


def summarize(rows: Sequence[RequestRow], objectives: Objectives | None = None) -> RunSummary:
    """Summarise the measured requests, without warm-up and ramp."""
    measured = [row for row in rows if row.phase == "measured"]
    ok = [row for row in measured if row.outcome == "ok"]
    start = min((row.scheduled_s for row in measured), default=0.0)
    end = max((row.end_s for row in measured), default=0.0)
    duration = max(end - start, 1e-9)
    good = None if objectives is None else sum(objectives.is_met_by(row) for row in measured)
    cached_counts = [row.cached_tokens for row in ok if row.cached_tokens is not None]
    outputs = sum(row.output_tokens for row in ok)
    inputs = sum(row.input_tokens or row.planned_input or 0 for row in ok)
    return RunSummary(
        duration_s=end - start,
        completed=len(ok),
        failed=sum(row.outcome == "error" for row in measured),
        cancelled=sum(row.outcome == "cancelled" for row in measured),
        unmeasured=len(rows) - len(measured),
        errors=dict(Counter(row.error for row in measured if row.outcome == "error")),
        input_tokens=inputs,
        cached_tokens=sum(cached_counts) if cached_counts else None,
        output_tokens=outputs,
        request_rate=len(ok) / duration,
        output_token_rate=outputs / duration,
        total_token_rate=(inputs + outputs) / duration,
        peak_output_token_rate=max(token_series(ok, 1.0), default=0.0),
        mean_concurrency=sum(row.end_s - row.sent_s for row in ok) / duration,
        peak_concurrency=max((level for _, level in concurrency_series(measured)), default=0),
        good_requests=good,
        goodput=None if good is None else good / duration,
        attainment=None if good is None else good / max(len(measured), 1),
        input_mismatches=sum(
            row.input_tokens is not None
            and row.planned_input is not None
            and row.input_tokens != row.planned_input
            for row in ok
        ),
        output_mismatches=sum(row.output_tokens != row.planned_output for row in ok),
        missing_usage=sum(not row.counted_by_server for row in ok),
        resent=sum(row.resent for row in measured),
        multi_token_responses=sum(row.output_tokens > len(row.chunks_s) for row in ok),
        latency={
            metric: compute_stats([value for row in ok for value in metric_values(row, metric)])
            for metric in METRIC_NAMES
        },
    )


def token_series(rows: Sequence[RequestRow], bin_s: float) -> list[float]:
    """Return output tokens per second for each `bin_s` seconds after the first scheduled send."""
    stamps = [at for row in rows for at in row.chunks_s]
    if not stamps:
        return []
    weights = [
        row.output_tokens / len(row.chunks_s) if row.chunk_tokens is None else count
        for row in rows
        for count in (row.chunk_tokens or [1] * len(row.chunks_s))
    ]
    start = min(row.scheduled_s for row in rows)
    bins = ((np.asarray(stamps) - start) / bin_s).astype(int).clip(min=0)
    series: list[float] = (np.bincount(bins, weights=weights) / bin_s).tolist()
    return series


def concurrency_series(rows: Sequence[RequestRow]) -> list[tuple[float, int]]:
    """Return pairs of a time and the number of requests in flight after it, in ascending order of time."""
    steps = sorted([(row.sent_s, 1) for row in rows] + [(row.end_s, -1) for row in rows])
    level = 0
    series = []
    for at, step in steps:
        level += step
        series.append((at, level))
    return series


class Objectives(msgspec.Struct, frozen=True):
    """Latency objectives of each request in milliseconds. An `itl` objective applies to every gap."""

    limits_ms: dict[MetricName, float]

    def is_met_by(self, row: RequestRow) -> bool:
        """Return whether the request succeeded and met all objectives."""
        return row.outcome == "ok" and all(
            value <= limit
            for metric, limit in self.limits_ms.items()
            for value in metric_values(row, metric)
        )
