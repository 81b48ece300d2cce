"""Scoring of a request: which events it was an opportunity for, and which of them occurred."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from argosy.policy.rollout.baseline import Baseline, stratum_of
from argosy.policy.rollout.metrics import EVENTS_OF, Metric
from argosy.policy.rollout.outcomes import OutcomeStatus, RequestOutcome


class ScoredEvent(NamedTuple):
    """Opportunity for an event."""

    event: int
    """Position in `EVENTS`."""
    stratum: str
    has_occurred: bool


def score(outcome: RequestOutcome, baseline: Baseline) -> Iterator[ScoredEvent]:
    """Score a valid request. What cannot be decided for it, such as the length of a failed answer, is left out."""
    status = outcome.status
    if status is not OutcomeStatus.CANCELLED:
        for metric, bad in (
            (Metric.ERRORS, OutcomeStatus.FAILED),
            (Metric.REFUSALS, OutcomeStatus.REFUSED),
        ):
            yield ScoredEvent(EVENTS_OF[metric][0], "", status is bad)
    for metric in (Metric.TTFT, Metric.TPOT):
        stratum = stratum_of(metric, outcome)
        for position, event in enumerate(EVENTS_OF[metric]):
            threshold = baseline.threshold(metric, stratum, position)
            if threshold is not None:
                exceeds = _exceeds(metric, outcome, threshold)
                if exceeds is not None:
                    yield ScoredEvent(event, stratum, exceeds)
    if status in {OutcomeStatus.COMPLETED, OutcomeStatus.RUNNING}:
        is_running = status is OutcomeStatus.RUNNING
        for metric in (Metric.SHORT_OUTPUT, Metric.LONG_OUTPUT):
            for position, event in enumerate(EVENTS_OF[metric]):
                threshold = baseline.threshold(metric, "", position)
                if threshold is None:
                    continue
                if metric is Metric.LONG_OUTPUT:
                    yield ScoredEvent(event, "", outcome.output_tokens > threshold)
                else:
                    has_occurred = outcome.output_tokens < threshold and not is_running
                    yield ScoredEvent(event, "", has_occurred)


def _exceeds(metric: Metric, outcome: RequestOutcome, threshold: float) -> bool | None:
    """Return whether a time exceeds a threshold; None if it is not known and can still be below it."""
    if metric is Metric.TPOT:
        time_per_token_s = outcome.time_per_token_s
        return None if time_per_token_s is None else time_per_token_s > threshold
    if outcome.ttft_s is not None:
        return outcome.ttft_s > threshold
    return True if outcome.age_s > threshold else None
