"""The text block: laid out as `vllm bench serve` prints it, with what it leaves out."""

from __future__ import annotations

import math

from argosy.bench.metrics import Metric, Stats, Summary
from argosy.bench.result import Point, Result
from argosy.bench.workload import CLOSED_LOOP_BOUND

_WIDTH = 50
_KEPT_UP = 0.5
"""Of a rate: where less is answered, most of a run is waiting for its last answers, and the rate means nothing."""
_SECTIONS: tuple[tuple[str, str, Metric], ...] = (
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-token Latency", "ITL", "itl"),
    ("Inter-chunk Latency", "ICL", "icl"),
    ("End-to-end Latency", "E2EL", "e2e"),
    ("Normalized Time per Output Token (incl. 1st)", "NTPOT", "ntpot"),
    ("Schedule Lag", "lag", "lag"),
    ("TTFT from the actual send", "TTFT", "send_ttft"),
)


def text_report(result: Result) -> str:
    """Every run, and what was found."""
    blocks = [point_report(result, point) for point in result.points]
    if len(result.points) > 1:
        blocks.append(_sweep_table(result))
    if result.settings.search:
        blocks.append(_found(result))
    return "\n\n".join(blocks)


def _found(result: Result) -> str:
    """What a search found, and whether its trial was long enough to tell."""
    rate = result.best_rate
    if rate is None:
        return "No rate held the objectives."
    text = f"Highest rate that holds the objectives: {rate:.4g} requests/s"
    for point in result.points:
        answered = point.summary.request_rate
        if (
            point.load.arrivals is not None
            and point.load.arrivals.rate == rate
            and answered < rate * _KEPT_UP
        ):
            text += (
                f"\nOnly {answered:.4g} requests/s were answered then: its trial is too short to"
                " tell. Give more --requests, or a --duration."
            )
    return text


def point_report(result: Result, point: Point) -> str:
    """One run."""
    summary = point.summary
    lines = [_bar(" Serving Benchmark Result ", "="), *_counts(point), *_rates(point)]
    for title, name, metric in _SECTIONS:
        # A gap between chunks is a gap between tokens unless chunks carry several.
        if metric == "icl" and summary.latency["icl"] == summary.latency["itl"]:
            continue
        lines += [_bar(title, "-"), *_latency(name, summary.latency[metric])]
    lines += ["=" * _WIDTH, *_remarks(result, point)]
    return "\n".join(lines)


def _counts(point: Point) -> list[str]:
    summary, load = point.summary, point.load
    lines = [
        f"{'Load:':<40} {point.label}",
        _line("Successful requests:", summary.completed),
        _line("Failed requests:", summary.failed),
        _line("Cancelled requests:", summary.cancelled),
        _line("Warm-up and ramp requests (excluded):", summary.unmeasured),
    ]
    if load.concurrency is not None:
        lines.append(_line("Maximum request concurrency:", load.concurrency))
    if load.arrivals is not None:
        rate = math.inf if load.arrivals.rate is None else load.arrivals.rate
        lines.append(_line("Request rate configured (RPS):", float(rate)))
    lines.append(_line("Benchmark duration (s):", summary.duration_s))
    lines.append(_line("Total input tokens:", summary.input_tokens))
    if summary.cached_tokens is not None:
        lines.append(_line("Input tokens from the prefix cache:", summary.cached_tokens))
    return [
        *lines,
        _line("Total generated tokens:", summary.output_tokens),
    ]


def _rates(point: Point) -> list[str]:
    summary = point.summary
    lines = [_line("Request throughput (req/s):", summary.request_rate)]
    if summary.goodput is not None and summary.attainment is not None:
        lines.append(_line("Request goodput (req/s):", summary.goodput))
        lines.append(_line("Requests within objectives (%):", 100 * summary.attainment))
    return [
        *lines,
        _line("Output token throughput (tok/s):", summary.output_token_rate),
        _line("Peak output token throughput (tok/s):", summary.peak_output_token_rate),
        _line("Mean concurrent requests:", summary.mean_concurrency),
        _line("Peak concurrent requests:", float(summary.peak_concurrency)),
        _line("Total token throughput (tok/s):", summary.total_token_rate),
    ]


def _latency(name: str, stats: Stats) -> list[str]:
    return [
        _line(f"Mean {name} (ms):", stats.mean),
        _line(f"Std {name} (ms):", stats.std),
        _line(f"Median {name} (ms):", stats.p50),
        _line(f"P90 {name} (ms):", stats.p90),
        _line(f"P95 {name} (ms):", stats.p95),
        _line(f"P99 {name} (ms):", stats.p99),
        _line(f"P99.9 {name} (ms):", stats.p999),
        _line(f"Count {name}:", stats.count),
    ]


def _remarks(result: Result, point: Point) -> list[str]:
    """What a reader has to know to trust the numbers."""
    summary: Summary = point.summary
    remarks = [f"{count} failed: {error}" for error, count in summary.errors.items()]
    details = {row.error: row.detail for row in point.rows if row.detail}
    remarks += [f"  {error}: {detail}" for error, detail in details.items()]
    if point.interrupted:
        remarks.append("The run was interrupted; what had ended by then is shown.")
    if _ran_out(result, point):
        remarks.append(
            f"All {CLOSED_LOOP_BOUND} requests that a duration alone plans were through before it"
            " was over: give --requests, too."
        )
    if summary.input_mismatches:
        remarks.append(
            f"{summary.input_mismatches} prompts are longer or shorter than planned, by the"
            " server's count."
        )
    if summary.output_mismatches:
        remarks.append(f"{summary.output_mismatches} answers are not of the planned length.")
    if summary.uncounted:
        remarks.append(
            f"{summary.uncounted} answers came without usage: their chunks are taken for tokens."
        )
    if summary.resent:
        remarks.append(
            f"{summary.resent} requests went out twice: the server closed their kept connection"
            " without a byte."
        )
    if summary.many_token_chunks and not result.target.chunk_usage:
        remarks.append(
            f"{summary.many_token_chunks} answers have more tokens than chunks, and the server"
            " does not count as it goes: read ITL as the gap between chunks."
        )
    lag = summary.latency["lag"]
    if lag.p99 > 10:
        remarks.append(
            f"Requests went out up to {lag.max:.0f} ms late (see Schedule Lag): TTFT has it in it."
        )
    return remarks


def _ran_out(result: Result, point: Point) -> bool:
    load = point.load
    sent = sum(row.phase != "warmup" for row in point.rows)
    closed = load.arrivals is None and result.settings.workload.trace is None
    return closed and load.requests is None and sent >= CLOSED_LOOP_BOUND


def _sweep_table(result: Result) -> str:
    head = f"{'load':<28}{'req/s':>8}{'out tok/s':>11}{'TTFT p50':>10}{'p99':>9}"
    lines = [head + f"{'ITL p50':>9}{'p99':>9}{'E2E p99':>10}{'good %':>8}{'failed':>8}"]
    for point in result.points:
        summary = point.summary
        ttft, itl, e2e = (summary.latency[m] for m in ("ttft", "itl", "e2e"))
        good = "" if summary.attainment is None else f"{100 * summary.attainment:.1f}"
        lines.append(
            f"{point.label[:27]:<28}{summary.request_rate:>8.2f}{summary.output_token_rate:>11.1f}"
            f"{ttft.p50:>10.1f}{ttft.p99:>9.1f}{itl.p50:>9.2f}{itl.p99:>9.2f}{e2e.p99:>10.1f}"
            f"{good:>8}{summary.failed:>8}"
        )
    return "\n".join(lines)


def _bar(title: str, fill: str) -> str:
    return title.center(_WIDTH, fill)


def _line(name: str, value: float) -> str:
    shown = f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}"
    return f"{name:<40} {shown}".rstrip()
