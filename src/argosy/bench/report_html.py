"""The HTML report: one file with everything in it, nothing fetched."""

from __future__ import annotations

import html

import msgspec
import numpy as np

from argosy.bench.metrics import (
    MetricName,
    SampleStats,
    concurrency_series,
    metric_values,
    token_series,
)
from argosy.bench.report_text import render_text_report
from argosy.bench.result import BenchResult, RunResult
from argosy.bench.svg import PlotSeries, render_plot

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem;
  color: #1f2937 }
h1 { margin-bottom: 0 } .muted { color: #6b7280 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1rem }
svg { width: 100%; height: auto; border: 1px solid #e5e7eb; border-radius: 6px; background: #fff }
svg text { font-size: 11px; fill: #374151 } svg .title { font-size: 13px; font-weight: 600 } .grid { stroke: #eef0f3 }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .2rem .7rem; text-align: right;
  border-bottom: 1px solid #e5e7eb }
th:first-child, td:first-child { text-align: left } pre { overflow-x: auto; background: #f9fafb; padding: 1rem;
  border-radius: 6px }
"""
_CDF_PLOTS: tuple[tuple[str, MetricName], ...] = (
    ("Time to first token", "ttft"),
    ("Inter-token latency", "itl"),
    ("Time per output token", "tpot"),
    ("End-to-end latency", "e2e"),
)
_LATENCY_COLUMNS = ("count", "mean", "std", "p50", "p90", "p95", "p99", "p99.9", "max")


def render_html_report(result: BenchResult) -> str:
    """The page of a result."""
    title = f"{result.target.model}: {len(result.runs)} run{'s' * (len(result.runs) > 1)}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="muted">{html.escape(_describe_origin(result))}</p>',
    ]
    if len(result.runs) > 1:
        parts.append(_plot_grid(_sweep_plots(result)))
    parts.append("<h2>Distributions</h2>")
    parts.append(_plot_grid([_cdf_plot(result, name, metric) for name, metric in _CDF_PLOTS]))
    for point in result.runs:
        parts.append(f"<h2>{html.escape(point.label)}</h2>")
        parts += [_latency_table(point), _plot_grid(_time_plots(point))]
    parts.append(f"<h2>In text</h2><pre>{html.escape(render_text_report(result))}</pre>")
    facts = msgspec.json.format(
        msgspec.json.encode({"settings": result.settings, "machine": result.machine}), indent=2
    )
    parts.append(f"<h2>Settings and machine</h2><pre>{html.escape(facts.decode())}</pre>")
    return "\n".join([*parts, "</body></html>\n"])


def _describe_origin(result: BenchResult) -> str:
    settings, machine = result.settings, result.machine
    return (
        f"{settings.target_options.url} · {result.created_at} · seed {settings.seed} ·"
        f" argosy {result.version} · load from {machine.get('processor')},"
        f" {machine.get('cores')} cores"
    )


def _plot_grid(plots: list[str]) -> str:
    return f'<div class="plots">{"".join(plots)}</div>'


def _cdf_plot(result: BenchResult, name: str, metric: MetricName) -> str:
    series = []
    for point in result.runs:
        sample = [value for row in point.succeeded for value in metric_values(row, metric)]
        if sample:
            shares = np.linspace(0, 100, min(len(sample), 300) + 1)
            at = np.percentile(np.asarray(sample), shares)
            points = [(float(x), float(y) / 100) for x, y in zip(at, shares, strict=True)]
            series.append(PlotSeries(point.label, points))
    return render_plot(f"{name}, cumulative", "ms", "share of the sample", series)


def _time_plots(point: RunResult) -> list[str]:
    ok = point.succeeded
    rows = [row for row in point.rows if row.phase != "warmup"]
    if not rows:
        return []
    ttft = [(row.scheduled_s, value) for row in ok for value in metric_values(row, "ttft")]
    failed = [(row.scheduled_s, 0.0) for row in rows if row.outcome != "ok"]
    start = min((row.scheduled_s for row in ok), default=0.0)
    tokens = [(start + second, rate) for second, rate in enumerate(token_series(ok, 1.0))]
    levels = _step_points(concurrency_series(rows))
    lag = [(row.scheduled_s, value) for row in rows for value in metric_values(row, "lag")]
    return [
        render_plot(
            "TTFT by scheduled send",
            "s",
            "ms",
            [PlotSeries("succeeded", ttft, dots=True), PlotSeries("failed", failed, dots=True)],
        ),
        render_plot("Output tokens", "s", "tokens/s", [PlotSeries("tokens", tokens)]),
        render_plot("Requests in flight", "s", "requests", [PlotSeries("requests", levels)]),
        render_plot("Schedule lag", "s", "ms", [PlotSeries("lag", lag, dots=True)]),
    ]


def _step_points(series: list[tuple[float, int]]) -> list[tuple[float, float]]:
    """A level holds until the next."""
    points = []
    before = 0
    for at, level in series:
        points += [(at, float(before)), (at, float(level))]
        before = level
    return points


def _sweep_plots(result: BenchResult) -> list[str]:
    points = sorted(result.runs, key=lambda point: point.summary.request_rate)

    rates = ["rate"] if points[0].summary.goodput is None else ["rate", "good"]

    def curve(name: str, value: str, x: str) -> PlotSeries:
        return PlotSeries(name, [(_plot_value(p, x), _plot_value(p, value)) for p in points])

    return [
        render_plot(
            "Latency by throughput",
            "output tokens/s",
            "TTFT, ms",
            [curve("p50", "ttft.p50", "tokens"), curve("p99", "ttft.p99", "tokens")],
        ),
        render_plot(
            "Gaps by throughput",
            "output tokens/s",
            "ITL, ms",
            [curve("p50", "itl.p50", "tokens"), curve("p99", "itl.p99", "tokens")],
        ),
        render_plot(
            "Throughput by concurrency",
            "mean requests in flight",
            "requests/s",
            [curve({"rate": "throughput", "good": "goodput"}[it], it, "level") for it in rates],
        ),
        render_plot(
            "Per user by total",
            "output tokens/s in all",
            "tokens/s of one stream",
            [curve("1 / median TPOT", "user", "tokens")],
        ),
    ]


def _plot_value(point: RunResult, name: str) -> float:
    summary = point.summary
    ttft, itl, tpot = (summary.latency[metric] for metric in ("ttft", "itl", "tpot"))
    return {
        "rate": summary.request_rate,
        "good": summary.goodput or 0.0,
        "level": summary.mean_concurrency,
        "tokens": summary.output_token_rate,
        "user": 1e3 / tpot.p50 if tpot.p50 else 0.0,
        "ttft.p50": ttft.p50,
        "ttft.p99": ttft.p99,
        "itl.p50": itl.p50,
        "itl.p99": itl.p99,
    }[name]


def _latency_table(point: RunResult) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("ms", *_LATENCY_COLUMNS))
    rows = [
        f"<tr><td>{metric}</td>{''.join(f'<td>{cell}</td>' for cell in _latency_cells(stats))}</tr>"
        for metric, stats in point.summary.latency.items()
    ]
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _latency_cells(stats: SampleStats) -> list[str]:
    numbers = (stats.mean, stats.std, stats.p50, stats.p90, stats.p95, stats.p99, stats.p999)
    return [str(stats.count), *(f"{number:.2f}" for number in (*numbers, stats.max))]
