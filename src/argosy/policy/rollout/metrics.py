"""Metrics of a rollout, each defined by events that a worse version has more often."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Metric(enum.StrEnum):
    """Property in which two versions are compared."""

    ERRORS = "errors"
    REFUSALS = "refusals"
    TTFT = "ttft"
    """Time to the first token."""
    TPOT = "tpot"
    """Mean time per output token after the first."""
    SHORT_OUTPUT = "short_output"
    LONG_OUTPUT = "long_output"


class EventKind(NamedTuple):
    """Event of a metric. Quantiles are those of the stable version before the rollout."""

    metric: Metric
    quantile: float | None = None
    """The event is a value beyond this quantile. None for events that are no measurement."""
    by_user: bool = False
    """Whether users differ in it, so that each request counts with the rate of its user."""
    decides_promotion: bool = True
    """Whether the promotion is judged by it. A metric has one such event."""


EVENTS = (
    EventKind(Metric.ERRORS, by_user=True),
    EventKind(Metric.REFUSALS, by_user=True),
    EventKind(Metric.TTFT, 0.5, decides_promotion=False),
    EventKind(Metric.TTFT, 0.75, decides_promotion=False),
    EventKind(Metric.TTFT, 0.95),
    EventKind(Metric.TPOT, 0.5, decides_promotion=False),
    EventKind(Metric.TPOT, 0.75, decides_promotion=False),
    EventKind(Metric.TPOT, 0.95),
    EventKind(Metric.SHORT_OUTPUT, 0.25, by_user=True),
    EventKind(Metric.SHORT_OUTPUT, 0.5, by_user=True, decides_promotion=False),
    EventKind(Metric.LONG_OUTPUT, 0.5, by_user=True, decides_promotion=False),
    EventKind(Metric.LONG_OUTPUT, 0.75, by_user=True),
)
"""All events. Their positions identify them in records, so that new ones are appended."""

EVENTS_OF = {
    metric: tuple(index for index, event in enumerate(EVENTS) if event.metric is metric)
    for metric in Metric
}
"""Positions of the events of each metric."""
