"""Text report of a result, in the layout of `vllm bench serve` with additional values."""

from __future__ import annotations

import math

from argosy.bench.metrics import PERCENTILES, MetricName, RunSummary, SampleStats
from argosy.bench.result import BenchResult, RunResult
from argosy.bench.workload import MAX_CLOSED_LOOP_REQUESTS

_WIDTH = 50
_MIN_ANSWERED_FRACTION = 0.5
"""Smallest ratio of answered to configured rate. Below it most of the run waits for the last responses, so that the
measured rate is meaningless."""
_SECTIONS: tuple[tuple[str, str, MetricName], ...] = (
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-token Latency", "ITL", "itl"),
    ("Inter-chunk Latency", "ICL", "icl"),
    ("End-to-end Latency", "E2EL", "e2e"),
    ("Normalized Time per Output Token (incl. 1st)", "NTPOT", "ntpot"),
    ("Schedule Lag", "lag", "lag"),
    ("TTFT from the actual send", "TTFT", "send_ttft"),
)

_STATISTICS = {"Mean": "mean", "Std": "std", "Median": "p50"} | {
    f"P{percentile:g}": field for field, percentile in PERCENTILES.items() if field != "p50"
}
"""Fields of `SampleStats` by their names in the report."""


def render_text_report(result: BenchResult) -> str:
    """Return the report: every run, then the sweep and the result of the search."""
    blocks = [render_run(result, run) for run in result.runs]
    if len(result.runs) > 1:
        blocks.append(_sweep_table(result))
    if result.settings.find_rate:
        blocks.append(_search_summary(result))
    return "\n\n".join(blocks)


def _search_summary(result: BenchResult) -> str:
    """Return the found rate, with a warning if its trial was too short."""
    rate = result.best_rate
    if rate is None:
        return "No rate met the objectives."
    text = f"Highest rate that meets the objectives: {rate:.4g} requests/s"
    for run in result.runs:
        answered = run.summary.request_rate
        if (
            run.load.arrivals is not None
            and run.load.arrivals.rate == rate
            and answered < rate * _MIN_ANSWERED_FRACTION
        ):
            text += (
                f"\nOnly {answered:.4g} requests/s were answered at this rate, so its trial is too short."
                " Give more --requests, or a --duration."
            )
    return text


def render_run(result: BenchResult, run: RunResult) -> str:
    """Return the report of one run."""
    summary = run.summary
    lines = [_title_line(" Serving Benchmark Result ", "="), *_count_lines(run), *_rate_lines(run)]
    for title, name, metric in _SECTIONS:
        # ICL equals ITL unless chunks carry several tokens.
        if metric == "icl" and summary.latency["icl"] == summary.latency["itl"]:
            continue
        lines += [_title_line(title, "-"), *_latency_lines(name, summary.latency[metric])]
    lines += ["=" * _WIDTH, *_list_remarks(result, run)]
    return "\n".join(lines)


def _count_lines(run: RunResult) -> list[str]:
    summary, load = run.summary, run.load
    lines = [
        f"{'Load:':<40} {run.label}",
        _value_line("Successful requests:", summary.completed),
        _value_line("Failed requests:", summary.failed),
        _value_line("Cancelled requests:", summary.cancelled),
        _value_line("Warm-up and ramp requests (excluded):", summary.unmeasured),
    ]
    if load.concurrency is not None:
        lines.append(_value_line("Maximum request concurrency:", load.concurrency))
    if load.arrivals is not None:
        rate = math.inf if load.arrivals.rate is None else load.arrivals.rate
        lines.append(_value_line("Request rate configured (RPS):", float(rate)))
    lines.append(_value_line("Benchmark duration (s):", summary.duration_s))
    lines.append(_value_line("Total input tokens:", summary.input_tokens))
    if summary.cached_tokens is not None:
        lines.append(_value_line("Input tokens from the prefix cache:", summary.cached_tokens))
    return [
        *lines,
        _value_line("Total generated tokens:", summary.output_tokens),
    ]


def _rate_lines(run: RunResult) -> list[str]:
    summary = run.summary
    lines = [_value_line("Request throughput (req/s):", summary.request_rate)]
    if summary.goodput is not None and summary.attainment is not None:
        lines.append(_value_line("Request goodput (req/s):", summary.goodput))
        lines.append(_value_line("Requests within objectives (%):", 100 * summary.attainment))
    if run.tokens_per_step is not None and run.draft_acceptance is not None:
        lines.append(_value_line("Tokens per step of a sequence:", run.tokens_per_step))
        lines.append(_value_line("Accepted drafts (%):", 100 * run.draft_acceptance))
    if run.draft_saved_s is not None:
        lines.append(_value_line("Time saved by drafts, all requests (s):", run.draft_saved_s))
    return [
        *lines,
        _value_line("Output token throughput (tok/s):", summary.output_token_rate),
        _value_line("Peak output token throughput (tok/s):", summary.peak_output_token_rate),
        _value_line("Mean concurrent requests:", summary.mean_concurrency),
        _value_line("Peak concurrent requests:", float(summary.peak_concurrency)),
        _value_line("Total token throughput (tok/s):", summary.total_token_rate),
    ]


def _latency_lines(name: str, stats: SampleStats) -> list[str]:
    return [
        *(
            _value_line(f"{statistic} {name} (ms):", getattr(stats, field))
            for statistic, field in _STATISTICS.items()
        ),
        _value_line(f"Count {name}:", stats.count),
    ]


def _list_remarks(result: BenchResult, run: RunResult) -> list[str]:
    """Return remarks that a reader needs to judge the numbers."""
    summary: RunSummary = run.summary
    remarks = [f"{count} failed: {error}" for error, count in summary.errors.items()]
    details = {row.error: row.detail for row in run.rows if row.detail}
    remarks += [f"  {error}: {detail}" for error, detail in details.items()]
    if run.interrupted:
        remarks.append("The run was interrupted. The report covers the requests that had ended.")
    if _is_plan_exhausted(result, run):
        remarks.append(
            f"All {MAX_CLOSED_LOOP_REQUESTS} requests of a plan without --requests ended before the duration was"
            " over: give --requests too."
        )
    if summary.input_mismatches:
        remarks.append(
            f"{summary.input_mismatches} prompts are longer or shorter than planned, by the"
            " server's count."
        )
    if summary.output_mismatches:
        remarks.append(f"{summary.output_mismatches} outputs do not have the planned length.")
    if summary.missing_usage:
        remarks.append(
            f"{summary.missing_usage} responses have no usage, so their chunks are counted as tokens."
        )
    if summary.resent:
        remarks.append(
            f"{summary.resent} requests were sent twice, because the server had closed the reused connection"
            " without a response."
        )
    if summary.multi_token_responses and not result.target.chunk_usage:
        remarks.append(
            f"{summary.multi_token_responses} responses have more tokens than chunks, and the server"
            " reports no running counts: read ITL as the gap between chunks."
        )
    lag = summary.latency["lag"]
    if lag.p99 > 10:
        remarks.append(
            f"Requests were sent up to {lag.max:.0f} ms late (see Schedule Lag). TTFT includes this delay."
        )
    return remarks


def _is_plan_exhausted(result: BenchResult, run: RunResult) -> bool:
    load = run.load
    sent = sum(row.phase != "warmup" for row in run.rows)
    is_closed_loop = load.arrivals is None and result.settings.workload.trace is None
    return is_closed_loop and load.requests is None and sent >= MAX_CLOSED_LOOP_REQUESTS


def _sweep_table(result: BenchResult) -> str:
    header = f"{'load':<28}{'req/s':>8}{'out tok/s':>11}{'TTFT p50':>10}{'p99':>9}"
    lines = [header + f"{'ITL p50':>9}{'p99':>9}{'E2E p99':>10}{'good %':>8}{'failed':>8}"]
    for run in result.runs:
        summary = run.summary
        ttft, itl, e2e = (summary.latency[m] for m in ("ttft", "itl", "e2e"))
        good = "" if summary.attainment is None else f"{100 * summary.attainment:.1f}"
        lines.append(
            f"{run.label[:27]:<28}{summary.request_rate:>8.2f}{summary.output_token_rate:>11.1f}"
            f"{ttft.p50:>10.1f}{ttft.p99:>9.1f}{itl.p50:>9.2f}{itl.p99:>9.2f}{e2e.p99:>10.1f}"
            f"{good:>8}{summary.failed:>8}"
        )
    return "\n".join(lines)


def _title_line(title: str, fill: str) -> str:
    return title.center(_WIDTH, fill)


def _value_line(name: str, value: float) -> str:
    formatted = f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}"
    return f"{name:<40} {formatted}".rstrip()
