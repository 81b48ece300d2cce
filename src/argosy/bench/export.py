"""A result for other programs: a row for each request as CSV, the summaries as Prometheus metrics."""

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

from argosy.bench.metrics import METRIC_NAMES, MetricName, RequestRow, RunSummary, metric_values
from argosy.bench.result import BenchResult

_CSV_FIELDS = (
    *("index", "session", "turn", "phase", "outcome", "error", "status", "finish"),
    *("scheduled_s", "sent_s", "end_s", "planned_input", "planned_output"),
    *("input_tokens", "cached_tokens", "output_tokens", "resent"),
)
_CSV_METRICS: tuple[MetricName, ...] = ("ttft", "tpot", "e2e", "ntpot", "lag")
"""Those of which a request has at most one value."""
_QUANTILE_FIELDS = {"0.5": "p50", "0.9": "p90", "0.95": "p95", "0.99": "p99", "0.999": "p999"}


def format_csv(result: BenchResult) -> str:
    """RFC 4180: a header, then a line for each request of each run, warm-up included; what is unknown is empty."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    latencies = [f"{metric}_ms" for metric in _CSV_METRICS]
    writer.writerow(["load", *_CSV_FIELDS, *latencies, "itl_mean_ms", "itl_max_ms"])
    for point in result.runs:
        writer.writerows([point.label, *_csv_cells(row)] for row in point.rows)
    return text.getvalue()


def _csv_cells(row: RequestRow) -> Iterator[object]:
    fields = msgspec.structs.asdict(row)
    yield from (fields[name] for name in _CSV_FIELDS)
    for metric in _CSV_METRICS:
        yield next((round(value, 3) for value in metric_values(row, metric)), None)
    gaps = metric_values(row, "itl")
    yield round(sum(gaps) / len(gaps), 3) if gaps else None
    yield round(max(gaps), 3) if gaps else None


def format_prometheus(result: BenchResult) -> bytes:
    """The summaries in Prometheus' text format, as node_exporter's textfile collector reads it."""
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
        "Requests per second of the run: those that succeeded, and those that met the objectives.",
        "kind",
        lambda s: {"completed": s.request_rate, "good": s.goodput},
    ),
    "attainment_ratio": (
        "Requests that met the objectives, as a share of all that were measured.",
        "",
        lambda s: {"": s.attainment},
    ),
    "concurrency": (
        "Requests in flight.",
        "kind",
        lambda s: {"mean": s.mean_concurrency, "peak": s.peak_concurrency},
    ),
    "duration_seconds": ("From the first send to the last end.", "", lambda s: {"": s.duration_s}),
}
"""By name: help, the label that tells the values apart, and the values; None is left out."""


class _SummaryCollector(Collector):
    """The runs of a result as metric families; the labels `model` and `load` tell runs apart."""

    def __init__(self, result: BenchResult) -> None:
        self._runs = [
            ({"model": result.target.model, "load": point.label}, point.summary)
            for point in result.runs
        ]
        self._created_at = datetime.fromisoformat(result.created_at).timestamp()

    def collect(self) -> Iterable[Family]:
        """All families."""
        created = "argosy_bench_created_timestamp_seconds"
        yield GaugeMetricFamily(created, "When the benchmark ended.", value=self._created_at)
        for name, (text, label, gauge) in _GAUGES.items():
            yield self._gauge(f"argosy_bench_{name}", text, label, gauge)
        for metric in METRIC_NAMES:
            family = Family(f"argosy_bench_{metric}_seconds", f"{metric.upper()}.", "summary")
            for labels, summary in self._runs:
                stats = summary.latency[metric]
                numbers: dict[str, float] = msgspec.structs.asdict(stats)
                for quantile, field in _QUANTILE_FIELDS.items() if stats.count else ():
                    at = labels | {"quantile": quantile}
                    family.add_sample(family.name, at, numbers[field] / 1e3)
                family.add_sample(f"{family.name}_sum", labels, stats.mean * stats.count / 1e3)
                family.add_sample(f"{family.name}_count", labels, stats.count)
            yield family

    def _gauge(self, name: str, text: str, label: str, gauge: _GaugeValues) -> Family:
        family = Family(name, text, "gauge")
        for labels, summary in self._runs:
            for key, value in gauge(summary).items():
                if value is not None:
                    family.add_sample(name, labels | ({label: key} if label else {}), value)
        return family
