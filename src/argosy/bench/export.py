"""Export of a result: a row per request as CSV, and the summaries as Prometheus metrics."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from argosy.bench.metrics import (
    METRIC_NAMES,
    PERCENTILES,
    MetricName,
    RequestRow,
    RunSummary,
    metric_values,
)
from argosy.bench.result import BenchResult

_CSV_FIELDS = (
    *("index", "session", "turn", "phase", "outcome", "error", "status", "finish"),
    *("scheduled_s", "sent_s", "end_s", "planned_input", "planned_output"),
    *("input_tokens", "cached_tokens", "output_tokens", "resent"),
)
_CSV_METRICS: tuple[MetricName, ...] = ("ttft", "tpot", "e2e", "ntpot", "lag")
"""Metrics with at most one value per request."""


def format_csv(result: BenchResult) -> str:
    """Return RFC 4180 CSV: a header, then a line for each request of each run, warm-up included.

    Unknown values are empty.
    """
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    latencies = [f"{metric}_ms" for metric in _CSV_METRICS]
    writer.writerow(["load", *_CSV_FIELDS, *latencies, "itl_mean_ms", "itl_max_ms"])
    for run in result.runs:
        writer.writerows([run.label, *_csv_cells(row)] for row in run.rows)
    return buffer.getvalue()


def _csv_cells(row: RequestRow) -> Iterator[object]:
    fields = msgspec.structs.asdict(row)
    yield from (fields[name] for name in _CSV_FIELDS)
    for metric in _CSV_METRICS:
        yield next((round(value, 3) for value in metric_values(row, metric)), None)
    gaps = metric_values(row, "itl")
    yield round(sum(gaps) / len(gaps), 3) if gaps else None
    yield round(max(gaps), 3) if gaps else None


def format_prometheus(result: BenchResult) -> bytes:
    """Return the summaries in Prometheus' text format, for node_exporter's textfile collector."""
    registry = CollectorRegistry()
    registry.register(_SummaryCollector(result))
    return generate_latest(registry)


_GaugeValues = Callable[[RunSummary], dict[str, float | None]]
_GAUGES: dict[str, tuple[str, str, _GaugeValues]] = {
    "requests": (
        "Requests that were measured.",
        "outcome",
        lambda s: {"ok": s.completed, "error": s.failed, "cancelled": s.cancelled},
    ),
    "tokens": (
        "Tokens of the requests that succeeded.",
        "kind",
        lambda s: {"input": s.input_tokens, "cached": s.cached_tokens, "output": s.output_tokens},
    ),
    "tokens_per_second": (
        "Tokens per second of the run.",
        "kind",
        lambda s: {"output": s.output_token_rate, "total": s.total_token_rate},
    ),
    "requests_per_second": (
        "Requests per second of the run: completed requests, and good requests, which met the objectives.",
        "kind",
        lambda s: {"completed": s.request_rate, "good": s.goodput},
    ),
    "attainment_ratio": (
        "Share of the measured requests that met the objectives.",
        "",
        lambda s: {"": s.attainment},
    ),
    "concurrency": (
        "Requests in flight.",
        "kind",
        lambda s: {"mean": s.mean_concurrency, "peak": s.peak_concurrency},
    ),
    "duration_seconds": (
        "Time from the first scheduled send to the last end.",
        "",
        lambda s: {"": s.duration_s},
    ),
}
"""Help text, label name and values of each gauge, by name. The values are by label value; None is left out."""


class _SummaryCollector(Collector):
    """Metric families of a result. The labels `model` and `load` identify a run."""

    def __init__(self, result: BenchResult) -> None:
        self._runs = [
            ({"model": result.target.model or "", "load": run.label}, run.summary)
            for run in result.runs
        ]
        self._created_at = datetime.fromisoformat(result.created_at).timestamp()

    def collect(self) -> Iterable[Family]:
        """Yield all metric families."""
        created = "argosy_bench_created_timestamp_seconds"
        yield GaugeMetricFamily(created, "When the benchmark ended.", value=self._created_at)
        for name, (help_text, label, get_values) in _GAUGES.items():
            family = Family(f"argosy_bench_{name}", help_text, "gauge")
            for labels, summary in self._runs:
                for key, value in get_values(summary).items():
                    if value is not None:
                        more = {label: key} if label else {}
                        family.add_sample(family.name, labels | more, value)
            yield family
        for metric in METRIC_NAMES:
            family = Family(f"argosy_bench_{metric}_seconds", f"{metric.upper()}.", "summary")
            for labels, summary in self._runs:
                stats = summary.latency[metric]
                for field, percentile in PERCENTILES.items() if stats.count else ():
                    quantile_labels = labels | {"quantile": f"{percentile / 100:g}"}
                    family.add_sample(family.name, quantile_labels, getattr(stats, field) / 1e3)
                family.add_sample(f"{family.name}_sum", labels, stats.mean * stats.count / 1e3)
                family.add_sample(f"{family.name}_count", labels, stats.count)
            yield family
