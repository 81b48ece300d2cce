"""What is measured, by the definitions that inference-perf, vLLM and MLPerf agree on.

TTFT: first chunk with text, from the *scheduled* send. E2E: the last chunk, from the scheduled send.
TPOT: (E2E - TTFT) / (output tokens - 1). NTPOT: E2E / output tokens. ITL: each gap between two tokens; tokens that
came in one chunk have no gap between them. ICL: each gap between two chunks. Schedule lag: actual minus scheduled
send. Latencies are those of requests that succeeded; all are in milliseconds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from argosy.bench.plan import RequestPhase

RequestOutcome = Literal["ok", "error", "cancelled"]
MetricName = Literal["ttft", "tpot", "itl", "icl", "e2e", "ntpot", "send_ttft", "lag"]
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it went. Times are in seconds after the start of the run."""

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
    """When the last chunk of the answer came, or when it failed."""
    chunks_s: list[float] = []
    """When each chunk with text came."""
    chunk_tokens: list[int] | None = None
    """Tokens in each of them, where the server counts as it goes."""
    planned_input: int | None
    planned_output: int
    input_tokens: int | None = None
    """By the server's usage."""
    cached_tokens: int | None = None
    """Of the prompt, from the server's prefix cache, where it says so."""
    output_tokens: int = 0
    """By the server's usage, or else the number of chunks."""
    counted_by_server: bool = False
    resent: bool = False
    """Sent again on a new connection, as the kept one was closed without a byte."""


class SampleStats(msgspec.Struct, frozen=True, kw_only=True):
    """A sample in ten numbers; zeros when it is empty."""

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
    """Percentiles interpolate linearly between order statistics; `std` is that of the population."""
    if not len(values):
        return SampleStats()
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p95, p99, p999 = (float(value) for value in np.percentile(array, PERCENTILES))
    return SampleStats(
        count=len(array),
        mean=float(array.mean()),
        std=float(array.std()),
        min=float(array.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        p999=p999,
        max=float(array.max()),
    )


def metric_values(row: RequestRow, metric: MetricName) -> list[float]:
    """The values of `metric` that this request contributes, in milliseconds."""
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
    """A run in numbers. Rates are per second of `duration_s`."""

    duration_s: float
    """From the first scheduled send that is measured to the last end."""
    completed: int
    failed: int
    cancelled: int
    unmeasured: int
    """Requests that warmed up or ramped."""
    errors: dict[str, int]
    input_tokens: int
    cached_tokens: int | None
    """Of them, from the server's prefix cache; None when it does not say."""
    output_tokens: int
    request_rate: float
    output_token_rate: float
    total_token_rate: float
    peak_output_token_rate: float
    """In the best second."""
    mean_concurrency: float
    peak_concurrency: int
    good_requests: int | None = None
    """Requests that met every objective; None without objectives."""
    goodput: float | None = None
    attainment: float | None = None
    """Good requests as a share of all that were measured, failures included."""
    input_mismatches: int = 0
    """Requests whose prompt the server counts otherwise than planned."""
    output_mismatches: int = 0
    missing_usage: int = 0
    """Requests for which the server gave no usage; their chunks were counted."""
    resent: int = 0
    """Requests whose kept connection was closed without a byte, and that went out again."""
    multi_token_responses: int = 0
    """Requests with more tokens than chunks."""
    latency: dict[MetricName, SampleStats]


METRIC_NAMES: tuple[MetricName, ...] = (
    "ttft",
    "tpot",
    "itl",
    "icl",
    "e2e",
    "ntpot",
    "send_ttft",
    "lag",
)


def summarize(rows: Sequence[RequestRow], objectives: Objectives | None = None) -> RunSummary:
    """The summary of what was measured: neither warm-up nor ramp."""
    measured = [row for row in rows if row.phase == "measured"]
    ok = [row for row in measured if row.outcome == "ok"]
    start = min((row.scheduled_s for row in measured), default=0.0)
    end = max((row.end_s for row in measured), default=0.0)
    duration = max(end - start, 1e-9)
    good = None if objectives is None else sum(objectives.is_met_by(row) for row in measured)
    told = [row.cached_tokens for row in ok if row.cached_tokens is not None]
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
        cached_tokens=sum(told) if told else None,
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
    """Output tokens per second in each `bin_s` seconds after the first scheduled send."""
    stamps = [at for row in rows for at in row.chunks_s]
    if not stamps:
        return []
    weights = [
        row.output_tokens / len(row.chunks_s) if row.chunk_tokens is None else count
        for row in rows
        for count in (row.chunk_tokens or [1] * len(row.chunks_s))
    ]
    start = min(row.scheduled_s for row in rows)
    places = ((np.asarray(stamps) - start) / bin_s).astype(int).clip(min=0)
    series: list[float] = (np.bincount(places, weights=weights) / bin_s).tolist()
    return series


def concurrency_series(rows: Sequence[RequestRow]) -> list[tuple[float, int]]:
    """(time, requests in flight from then on), in order of time."""
    steps = sorted([(row.sent_s, 1) for row in rows] + [(row.end_s, -1) for row in rows])
    level = 0
    series = []
    for at, step in steps:
        level += step
        series.append((at, level))
    return series


class Objectives(msgspec.Struct, frozen=True):
    """What each request has to keep, in milliseconds; `itl` means every gap of it."""

    limits_ms: dict[MetricName, float]

    def is_met_by(self, row: RequestRow) -> bool:
        """Whether the request succeeded and kept all of them."""
        return row.outcome == "ok" and all(
            value <= limit
            for metric, limit in self.limits_ms.items()
            for value in metric_values(row, metric)
        )
