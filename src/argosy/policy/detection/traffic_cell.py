"""Counts of requests of one minute, and the events whose shares are watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from argosy.policy.detection.request_signals import PROJECTIONS


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
    """Counts by bucket of ascending order: `ttft`, `tpot`, `output`, `prompt` and `cost`; and of sampled requests by
    category: `language`, `template` and `embedding`."""
    graded: int = 0
    """Sampled answers."""
    failed_grades: int = 0
    """Sampled answers whose grade does not pass."""
    checked_calls: int = 0
    """Sampled answers with tool calls."""
    malformed_calls: int = 0
    """Sampled answers with a tool call that cannot be read, or does not fit its schema."""
    tokens: int = 0
    """Tokens of prompts and answers."""
    queued_ms: int = 0
    """Time for which the requests waited in the queue."""

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


Threshold = int | list[int]
"""Bucket beyond which an event is, or the categories that are usual."""
MIN_USUAL_VALUES = 100
"""Values from which the usual categories are known."""


class EventKind(NamedTuple):
    """Event whose share among the requests is watched."""

    name: str
    description: str
    """Words for the requests with the event, as the end of a sentence."""
    source: str
    """Counter or histogram of a cell."""
    per: Literal["requests", "answered", "graded", "checked_calls"] | None = None
    """Counter of the opportunities; None for a histogram."""
    quantile: float = 0.0
    """The event is a value above this quantile of the weeks before, or below it if it is less than a half. For
    categories it is the share of those that are usual."""
    max_usual: int = 0
    """Most categories that are usual. 0 for values, which have an order."""
    values_per_request: int = 1
    is_of_replica: bool = False
    """Whether replicas of one version are compared in it."""

    @property
    def is_below(self) -> bool:
        """Whether the event is a value below the quantile."""
        return self.per is None and self.quantile < 0.5

    def find_usual(self, counts: Mapping[int, float]) -> list[int] | None:
        """Return the most frequent categories that have the share of `quantile` together; None if too few are known."""
        total = sum(counts.values())
        if total < max(MIN_USUAL_VALUES, 2 * self.max_usual):
            return None
        usual: list[int] = []
        remaining = self.quantile * total
        for bucket, count in sorted(counts.items(), key=lambda each: (-each[1], each[0])):
            if len(usual) >= self.max_usual or remaining <= 0.0:
                break
            usual.append(bucket)
            remaining -= count
        return usual

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

    def count_events(self, cell: TrafficCell, threshold: Threshold | None) -> tuple[int, int]:
        """Return how many requests of a cell have the event, and how many could have it."""
        if self.per is not None:
            return getattr(cell, self.source), getattr(cell, self.per)
        counts = cell.histograms.get(self.source)
        if counts is None or threshold is None:
            return 0, 0
        total = sum(counts.values())
        if not isinstance(threshold, int):
            events = total - sum(counts.get(bucket, 0) for bucket in threshold)
            return round(events / self.values_per_request), total // self.values_per_request
        beyond = (
            count
            for bucket, count in counts.items()
            if (bucket < threshold if self.is_below else bucket > threshold)
        )
        return sum(beyond), total


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
    EventKind("malformed_calls", "had malformed tool calls", "malformed_calls", "checked_calls"),
    EventKind("new_language", "had an unusual language", "language", None, 0.9, max_usual=3),
    EventKind(
        "new_template", "had an unusual system prompt or tools", "template", None, 0.9, max_usual=16
    ),
    EventKind(
        "new_embedding",
        "had an unusual embedding",
        "embedding",
        None,
        0.97,
        max_usual=512,
        values_per_request=PROJECTIONS,
    ),
)
"""All events. Their positions identify them in records, so that new ones are appended."""
