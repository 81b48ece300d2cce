"""Settings and stored state of a gate: all inputs of its verdict, so that a new controller continues with the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.policy.rollout.metrics import EVENTS, Metric
from argosy.policy.scaled_number import ONE, ScaledNumber
from argosy.settings import ByOperator

TIGHT_SHARE = 0.25
"""Share from which the smaller margins apply."""
Probability = Annotated[float, Meta(gt=0, lt=1)]


class MetricRule(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one metric, as ratios of event rates.

    Raises:
        ValueError: A ratio would make the test meaningless.
    """

    tolerance: float = 1.0
    """Largest ratio that is no regression."""
    margin: float = 2.0
    """A promotion needs evidence that the ratio is below this margin."""
    tight_margin: float = 2.0
    """Margin from a share of 25 %."""

    def __post_init__(self) -> None:
        if not self.tolerance >= 1.0:
            raise ValueError("tolerance must be at least 1")
        if not min(self.margin, self.tight_margin) > self.tolerance:
            raise ValueError("margin and tight_margin must be larger than tolerance")


def _default_rules() -> dict[Metric, MetricRule]:
    rare = MetricRule(tolerance=1.25, margin=4.0, tight_margin=2.0)
    latency = MetricRule(tolerance=1.05, margin=2.0, tight_margin=1.5)
    length = MetricRule(tolerance=1.05, margin=1.5, tight_margin=1.5)
    return {
        Metric.ERRORS: rare,
        Metric.REFUSALS: rare,
        Metric.TTFT: latency,
        Metric.TPOT: latency,
        Metric.SHORT_OUTPUT: length,
        Metric.LONG_OUTPUT: length,
    }


class GateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a gate that a declaration sets."""

    max_false_rollbacks: ByOperator[Probability] = 0.01
    """Largest probability that a version that is no worse is rolled back, over the whole rollout."""
    max_false_promotions: ByOperator[Probability] = 0.05
    """Largest probability at each step that a version that is worse by a margin goes on."""
    max_miss_rate: ByOperator[Probability | None] = None
    """Share of the requests that may fail or miss `objectives` of the fleet. 0.05 if it has any."""
    max_silence_s: ByOperator[Annotated[float, Meta(gt=0, le=31_536_000)]] = 75.0
    """Age of the latest measurement from which it counts as missing, so that the rollout waits."""


class GateSettings(GateLimits, frozen=True, kw_only=True):
    """Settings of one gate.

    Raises:
        ValueError: A value is out of range.
    """

    ratios: tuple[float, ...] = (1.25, 1.6, 2.2, 4.0, 10.0, 50.0)
    """Rate ratios that are tested against."""
    rules: Mapping[Metric, MetricRule] = msgspec.field(default_factory=_default_rules)
    max_invalid_share: float = 0.01
    """Part of the requests of a step without valid measurements from which the step is inconclusive."""

    def __post_init__(self) -> None:
        if not self.ratios or not all(1.0 < ratio < float("inf") for ratio in self.ratios):
            raise ValueError("ratios must contain at least one number, and only numbers above 1")
        if not self.rules:
            raise ValueError("rules must contain at least one metric")


class EventTotals(msgspec.Struct, kw_only=True):
    """Sums of one event over all strata of a step."""

    candidate_expected: float = 0.0
    stable_expected: float = 0.0
    candidate_events: int = 0
    stable_events: int = 0


class StepRecord(msgspec.Struct, kw_only=True):
    """Evidence of the current step alone."""

    index: int
    share: float
    opened_at: float
    """Seconds since the epoch."""
    candidate_requests: int = 0
    stable_requests: int = 0
    candidate_misses: int = 0
    invalid_requests: int = 0
    last_batch_at: float | None = None
    equivalence: list[ScaledNumber] = msgspec.field(default_factory=lambda: [ONE] * len(EVENTS))
    """Evidence for "no worse than the margin" of each event."""
    objective_met: ScaledNumber = ONE
    """Evidence that the candidate meets the objective."""
    objective_missed: list[ScaledNumber] = msgspec.field(default_factory=list)
    """Evidence that it does not, by ratio."""
    totals: list[EventTotals] = msgspec.field(
        default_factory=lambda: [EventTotals() for _ in EVENTS]
    )


class GateRecord(msgspec.Struct, kw_only=True):
    """Stored state of a gate."""

    schema: int = 1
    """Version of the fields. Later versions only add fields with defaults."""
    rollout: str
    settings: GateSettings
    num_starts: int
    """Number of steps for which the evidence starts afresh. Their weights are reserved from the beginning."""
    baseline_miss_rate: float = 0.0
    starts: list[list[list[ScaledNumber]]] = msgspec.field(default_factory=list)
    """Evidence of a regression since the start of each step, by event and ratio."""
    step: StepRecord | None = None
    passed: list[Metric] = msgspec.field(default_factory=list)
    """Metrics that have passed an earlier step."""
    sequences: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of the last batch of each gateway."""
    num_rejected_batches: int = 0
    rejection: str = ""
    """Why the candidate is rejected. Once set, it stays."""
