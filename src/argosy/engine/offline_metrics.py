"""Metrics of an engine in this process, with the names that a replica exports."""

from __future__ import annotations

from typing import NamedTuple

from argosy.telemetry import CoreStats, ReplicaMetrics


class Metric(NamedTuple):
    """Value of a counter or a gauge."""

    name: str
    value: float
    labels: dict[str, str]


def read_metrics(model: str, stats: CoreStats) -> list[Metric]:
    """Return the counters and gauges of an engine core, which docs/reference/metrics.md describes."""
    metrics = ReplicaMetrics(model)
    metrics.update_stats(stats, ready=True)
    return [
        Metric(sample.name, sample.value, dict(sample.labels))
        for family in metrics.collect()
        if family.type in ("counter", "gauge")
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
