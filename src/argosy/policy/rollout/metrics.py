"""Metrics of a rollout, each defined by events that a worse version has more often, and the outcome of one request."""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

import msgspec


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


class Arm(enum.StrEnum):
    """Side of a comparison."""

    STABLE = "stable"
    CANDIDATE = "candidate"


class OutcomeStatus(enum.StrEnum):
    """State of a request when it is scored."""

    COMPLETED = "completed"
    RUNNING = "running"
    """The request has reached the scoring age. Both versions are scored at the same age, so that slow answers count."""
    FAILED = "failed"
    """The request ended with an error, or its stream moved to another replica."""
    REFUSED = "refused"
    """The replica or the model refused it."""
    CANCELLED = "cancelled"
    """The client disconnected. Only its time to the first token counts."""


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one request when it ends or reaches the scoring age, whichever is first."""

    arm: Arm
    key: tuple[str, str]
    """By `traffic.sticky_key`."""
    status: OutcomeStatus
    age_s: float
    """Time since the request was sent to the replica."""
    ttft_s: float | None = None
    """Time to the first token; None before it."""
    output_tokens: int = 0
    uncached_tokens: int = 0
    """Prompt tokens that were not in the replica's prefix cache."""
    in_flight: int = 0
    """Requests on the replica when it was sent."""
    misses_objective: bool = False
    """Whether the request fails the declared objective: an error, or slower than promised."""

    @property
    def is_valid(self) -> bool:
        """Whether its measurements can be used. One that is not finite or negative is missing data."""
        times = (self.age_s, 0.0 if self.ttft_s is None else self.ttft_s)
        counts = (self.output_tokens, self.uncached_tokens, self.in_flight)
        return all(math.isfinite(each) and each >= 0.0 for each in times) and min(counts) >= 0

    @property
    def time_per_token_s(self) -> float | None:
        """Mean time between output tokens; None with fewer than two tokens."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return max(0.0, self.age_s - self.ttft_s) / (self.output_tokens - 1)

    def judge_objective(
        self, max_ttft_s: float | None, max_time_per_token_s: float | None
    ) -> RequestOutcome:
        """Return the outcome with `misses_objective` set by the limits of an objective; None is no limit.

        While a request waits for its first token, its age counts as the time to it.
        """
        waited_s = self.ttft_s or 0.0
        if self.ttft_s is None and self.status in {OutcomeStatus.RUNNING, OutcomeStatus.CANCELLED}:
            waited_s = self.age_s
        limits = (
            (waited_s, max_ttft_s),
            (self.time_per_token_s or 0.0, max_time_per_token_s),
        )
        is_slow = any(limit is not None and value > limit for value, limit in limits)
        misses = is_slow or self.status is OutcomeStatus.FAILED
        return msgspec.structs.replace(self, misses_objective=misses)
