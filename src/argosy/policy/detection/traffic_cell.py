"""Counts of requests of one minute, and the events whose shares are watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec


class CellKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Common values of the requests of a cell.

    Each request counts twice: with its replica and without tenant, and with its tenant and without replica.
    """

    model: str
    version: str = ""
    replica: str = ""
    uncached_bucket: int = 0
    """Order of magnitude of the prompt tokens that the replica had to compute."""
    tenant: str = ""

    @property
    def is_of_tenant(self) -> bool:
        """Whether the cell is that of a tenant."""
        return bool(self.tenant)


class TrafficCell(msgspec.Struct, array_like=True):
    """Counts of the requests with one key."""

    requests: int = 0
    """Requests without those that were cancelled, or that a limit of their tenant refused."""
    failed: int = 0
    refused: int = 0
    """Requests that are invalid, or that the model refused."""
    answered: int = 0
    cut_off: int = 0
    """Answers that ended at their maximal length."""
    cache_misses: int = 0
    """Answers for which the replica computed more than half of the prompt."""
    histograms: dict[str, dict[int, int]] = {}
    """Counts by bucket of ascending order: `ttft`, `tpot`, `output`, `prompt` and `cost`."""
    graded: int = 0
    """Sampled answers."""
    failed_grades: int = 0
    """Sampled answers whose grade does not pass."""

    def add(self, other: TrafficCell) -> None:
        """Add the counts of another cell."""
        for name in _COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, counts in other.histograms.items():
            own = self.histograms.setdefault(name, {})
            for bucket, count in counts.items():
                own[bucket] = own.get(bucket, 0) + count


_COUNTERS = tuple(name for name in TrafficCell.__struct_fields__ if name != "histograms")


class CellMinute(msgspec.Struct, frozen=True, array_like=True):
    """Complete minute of one gateway."""

    start: int
    """Seconds since the epoch."""
    cells: Sequence[tuple[CellKey, TrafficCell]]


class EventKind(NamedTuple):
    """Event whose share among the requests is watched."""

    name: str
    description: str
    """Words for the requests with the event, as the end of a sentence."""
    source: str
    """Counter or histogram of a cell."""
    per: Literal["requests", "answered", "graded"] | None = None
    """Counter of the opportunities; None for a histogram."""
    quantile: float = 0.0
    """The event is a value above this quantile of the weeks before, or below it if it is less than a half."""
    is_of_replica: bool = False
    """Whether replicas of one version are compared in it."""

    @property
    def is_below(self) -> bool:
        """Whether the event is a value below the quantile."""
        return self.per is None and self.quantile < 0.5

    def find_threshold(self, counts: Mapping[int, float]) -> int | None:
        """Return the bucket beyond which the event is, at most as often as the quantile states; None without values."""
        remaining = sum(counts.values()) * (self.quantile if self.is_below else 1 - self.quantile)
        threshold = None
        for bucket in sorted(counts, reverse=not self.is_below):
            threshold = bucket
            remaining -= counts[bucket]
            if remaining < 0:
                break
        return threshold

    def count_events(self, cell: TrafficCell, threshold: int | None) -> tuple[int, int]:
        """Return how many requests of a cell have the event, and how many could have it."""
        if self.per is not None:
            return getattr(cell, self.source), getattr(cell, self.per)
        counts = cell.histograms.get(self.source)
        if counts is None or threshold is None:
            return 0, 0
        beyond = (
            count
            for bucket, count in counts.items()
            if (bucket < threshold if self.is_below else bucket > threshold)
        )
        return sum(beyond), sum(counts.values())


EVENTS = (
    EventKind("errors", "failed", "failed", "requests", is_of_replica=True),
    EventKind("refusals", "were refused", "refused", "requests"),
    EventKind("cut_off", "ended at their maximal length", "cut_off", "answered"),
    EventKind("cache_misses", "missed the prefix cache", "cache_misses", "answered"),
    EventKind("slow_ttft", "had a slow first token", "ttft", None, 0.9, is_of_replica=True),
    EventKind("slow_tokens", "had slow tokens", "tpot", None, 0.9, is_of_replica=True),
    EventKind("long_output", "had a long answer", "output", None, 0.9),
    EventKind("short_output", "had a short answer", "output", None, 0.1),
    EventKind("long_prompt", "had a long prompt", "prompt", None, 0.9),
    EventKind("short_prompt", "had a short prompt", "prompt", None, 0.1),
    EventKind("high_cost", "were expensive", "cost", None, 0.9),
    EventKind("low_quality", "did not pass as sampled answers", "failed_grades", "graded"),
)
"""All events. Their positions identify them in records, so that new ones are appended."""
