"""HTML report of a result: one self-contained file that loads nothing from the network."""

from __future__ import annotations

import html

import msgspec
import numpy as np

from argosy.bench.metrics import (
    PERCENTILES,
    MetricName,
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
_LATENCY_COLUMNS = ("mean", "std", *PERCENTILES, "max")


def render_html_report(result: BenchResult) -> str:
    """Return the page of a result."""
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
    for run in result.runs:
        parts.append(f"<h2>{html.escape(run.label)}</h2>")
        parts += [_latency_table(run), _plot_grid(_time_plots(run))]
    parts.append(f"<h2>As text</h2><pre>{html.escape(render_text_report(result))}</pre>")
    settings_json = msgspec.json.format(
        msgspec.json.encode({"settings": result.settings, "machine": result.machine}), indent=2
    )
    parts.append(f"<h2>Settings and machine</h2><pre>{html.escape(settings_json.decode())}</pre>")
    return "\n".join([*parts, "</body></html>\n"])


def _describe_origin(result: BenchResult) -> str:
    settings, machine = result.settings, result.machine
    return (
        f"{settings.target.url} · {result.created_at} · seed {settings.seed} ·"
        f" argosy {result.version} · load from {machine.get('processor')},"
        f" {machine.get('cores')} cores"
    )


def _plot_grid(plots: list[str]) -> str:
    return f'<div class="plots">{"".join(plots)}</div>'


def _cdf_plot(result: BenchResult, name: str, metric: MetricName) -> str:
    series = []
    for run in result.runs:
        sample = [value for row in run.succeeded for value in metric_values(row, metric)]
        if sample:
            percentages = np.linspace(0, 100, min(len(sample), 300) + 1)
            quantiles = np.percentile(np.asarray(sample), percentages)
            points = [
                (float(x), float(y) / 100) for x, y in zip(quantiles, percentages, strict=True)
            ]
            series.append(PlotSeries(run.label, points))
    return render_plot(f"{name}, cumulative", "ms", "share of the values", series)


def _time_plots(run: RunResult) -> list[str]:
    ok = run.succeeded
    rows = [row for row in run.rows if row.phase != "warmup"]
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
    """Return the points of a step function, whose level stays the same until the next entry."""
    points = []
    before = 0
    for at, level in series:
        points += [(at, float(before)), (at, float(level))]
        before = level
    return points


def _sweep_plots(result: BenchResult) -> list[str]:
    summaries = sorted((run.summary for run in result.runs), key=lambda each: each.request_rate)
    total = [each.output_token_rate for each in summaries]
    concurrency = [each.mean_concurrency for each in summaries]

    def curve(name: str, x: list[float], y: list[float]) -> PlotSeries:
        return PlotSeries(name, list(zip(x, y, strict=True)))

    def latency(metric: MetricName) -> list[PlotSeries]:
        stats = [each.latency[metric] for each in summaries]
        return [
            curve("p50", total, [each.p50 for each in stats]),
            curve("p99", total, [each.p99 for each in stats]),
        ]

    rates = [curve("throughput", concurrency, [each.request_rate for each in summaries])]
    if summaries[0].goodput is not None:
        rates.append(curve("goodput", concurrency, [each.goodput or 0.0 for each in summaries]))
    tpots = [each.latency["tpot"].p50 for each in summaries]
    per_user = [1e3 / tpot if tpot else 0.0 for tpot in tpots]
    return [
        render_plot("Latency by throughput", "total output tokens/s", "TTFT, ms", latency("ttft")),
        render_plot("Gaps by throughput", "total output tokens/s", "ITL, ms", latency("itl")),
        render_plot("Throughput by concurrency", "mean requests in flight", "requests/s", rates),
        render_plot(
            "Per user by total",
            "total output tokens/s",
            "tokens/s of one stream",
            [curve("1 / median TPOT", total, per_user)],
        ),
    ]


def _latency_table(run: RunResult) -> str:
    header = "".join(f"<th>{name}</th>" for name in ("ms", "count", *_LATENCY_COLUMNS))
    rows = [
        f"<tr><td>{metric}</td><td>{stats.count}</td>"
        + "".join(f"<td>{getattr(stats, name):.2f}</td>" for name in _LATENCY_COLUMNS)
        + "</tr>"
        for metric, stats in run.summary.latency.items()
    ]
    return f"<table><tr>{header}</tr>{''.join(rows)}</table>"
