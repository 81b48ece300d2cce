"""Record of a gate: all inputs of its verdict, so that a new controller continues with the same evidence."""

from __future__ import annotations

import msgspec

from argosy.policy.rollout.gate_settings import GateSettings
from argosy.policy.rollout.metrics import EVENTS, Metric
from argosy.policy.rollout.scaled_number import ONE, ScaledNumber


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
