"""Gate of a rollout: compares the candidate with the stable version, at any time and with a bounded error rate."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from argosy.policy.rollout.comparison import EventCell, OutcomeBatch
from argosy.policy.rollout.gate_record import TIGHT_SHARE, GateRecord, GateSettings, StepRecord
from argosy.policy.rollout.metrics import EVENTS, EVENTS_OF, Metric
from argosy.policy.rollout.race import (
    bernoulli_factor,
    equivalence_factor,
    equivalence_growth,
    mean_evidence,
    regression_factors,
)
from argosy.policy.scaled_number import ONE, multiply, to_float

_RARE = (Metric.ERRORS, Metric.REFUSALS)
"""Metrics that usually have few events."""
_OBJECTIVE_BET = 0.25
"""Evidence that an objective is met bets on this part of the permitted rate."""


class GateResult(enum.StrEnum):
    """Recommendation of the gate."""

    ROLL_BACK = "roll_back"
    PROMOTE = "promote"
    INCONCLUSIVE = "inconclusive"


class MetricVerdict(msgspec.Struct, frozen=True):
    """Evidence on one metric."""

    metric: Metric
    regression: float
    """E-value of a regression."""
    equivalence: float
    """E-value of "no worse than the margin" in this step, or of "the objective is met" where that suffices."""
    ratio: float | None
    """Measured rate of the candidate relative to the stable version in this step; None without events."""
    has_passed: bool
    candidate_events: int = 0
    """Requests of the candidate in this step that were bad by this metric."""
    stable_events: int = 0
    requests_needed: int | None = None
    """Requests of the candidate in this step with which it passes if the versions are alike; None without events."""


class GateVerdict(NamedTuple):
    """Result with its evidence."""

    result: GateResult
    reason: str
    rollout: str
    step: int | None
    """Step that is open; None before the first."""
    regression: float
    """Mean e-value of all metrics. At 1 / `max_false_rollbacks` the candidate is rejected."""
    metrics: tuple[MetricVerdict, ...]
    candidate_requests: int = 0
    """Requests of the candidate that were measured in this step."""
    stable_requests: int = 0

    def rejects(self, rollout: str) -> bool:
        """Return whether it rejects the candidate of a rollout."""
        return self.result is GateResult.ROLL_BACK and self.rollout == rollout


class RolloutGate:
    """Evidence of one rollout. `record` is its whole state: store it after each call that changes it."""

    def __init__(self, record: GateRecord) -> None:
        """Continue from a record, which is changed in place."""
        self.record = record
        self._settings = record.settings

    @classmethod
    def start(
        cls, rollout: str, settings: GateSettings, num_starts: int, baseline_miss_rate: float = 0.0
    ) -> RolloutGate:
        """Create the gate of a new rollout.

        Args:
            rollout: Id of the rollout.
            settings: What is a regression.
            num_starts: Number of steps with traffic of both versions.
            baseline_miss_rate: Part of the stable version's requests that missed the objective.
        """
        return cls(
            GateRecord(
                rollout=rollout,
                settings=settings,
                num_starts=num_starts,
                baseline_miss_rate=baseline_miss_rate,
            )
        )

    def open_step(self, index: int, share: float, now: float) -> None:
        """Start the evidence of a step afresh, and keep that of earlier steps against the candidate.

        Args:
            index: Number of the step. Opening the current step again does nothing.
            share: Share of the candidate.
            now: Seconds since the epoch.
        """
        record = self.record
        if record.step is not None and record.step.index == index:
            return
        if record.step is not None:
            record.passed = [
                each.metric for each in self._metric_verdicts(record.step) if each.has_passed
            ]
        num_ratios = len(self._settings.ratios)
        if len(record.starts) < record.num_starts:
            record.starts.append([[ONE] * num_ratios for _ in EVENTS])
        record.step = StepRecord(
            index=index, share=share, opened_at=now, objective_missed=[ONE] * num_ratios
        )

    def add(self, batch: OutcomeBatch) -> bool:
        """Count a batch. Return False if it is not counted: another rollout, known already, or not valid."""
        record, step = self.record, self.record.step
        if step is None or batch.rollout != record.rollout:
            return False
        if batch.sequence <= record.sequences.get(batch.gateway, 0):
            return False
        record.sequences[batch.gateway] = batch.sequence
        if not _is_valid(batch):
            record.num_rejected_batches += 1
            step.invalid_requests += max(1, batch.candidate_requests)
            return False
        is_current = batch.step == step.index
        for cell in batch.cells:
            self._add_cell(step, cell, is_current=is_current)
        if is_current:
            self._add_requests(step, batch)
        self._reject_if_worse(step)
        return True

    def _add_cell(self, step: StepRecord, cell: EventCell, *, is_current: bool) -> None:
        event = EVENTS[cell.event]
        rule = self._settings.rules.get(event.metric)
        total = cell.candidate_expected + cell.stable_expected
        if rule is None or not total:
            return
        if is_current:
            sums = step.totals[cell.event]
            sums.candidate_expected += cell.candidate_expected
            sums.stable_expected += cell.stable_expected
            sums.candidate_events += cell.candidate_events
            sums.stable_events += cell.stable_events
        counts = cell.candidate_events, cell.stable_events
        share = cell.candidate_expected / total
        if not any(counts) or not 0.0 < share < 1.0:
            return  # without events, or without one of the arms, a batch says nothing
        factors = regression_factors(share, self._settings.ratios, rule.tolerance, *counts)
        for start in self.record.starts:
            start[cell.event] = [
                multiply(product, factor)
                for product, factor in zip(start[cell.event], factors, strict=True)
            ]
        if is_current and event.decides_promotion:
            margin = rule.tight_margin if step.share >= TIGHT_SHARE else rule.margin
            factor = equivalence_factor(share, margin, *counts)
            step.equivalence[cell.event] = multiply(step.equivalence[cell.event], factor)

    def _add_requests(self, step: StepRecord, batch: OutcomeBatch) -> None:
        step.candidate_requests += batch.candidate_requests
        step.stable_requests += batch.stable_requests
        step.candidate_misses += batch.candidate_misses
        step.invalid_requests += batch.invalid_requests
        step.last_batch_at = max(step.last_batch_at or 0.0, batch.ended_at)
        objective = self._settings.max_miss_rate
        if objective is None:
            return
        misses = batch.candidate_misses
        met = batch.candidate_requests - misses
        bet = objective * _OBJECTIVE_BET
        step.objective_met = multiply(
            step.objective_met, bernoulli_factor(objective, bet, misses, met)
        )
        # An objective that the stable version misses as well is no reason to go back to it.
        null = max(objective, self.record.baseline_miss_rate)
        step.objective_missed = [
            multiply(product, bernoulli_factor(null, null * ratio, misses, met))
            if null * ratio < 1.0
            else product
            for product, ratio in zip(step.objective_missed, self._settings.ratios, strict=True)
        ]

    def _reject_if_worse(self, step: StepRecord) -> None:
        if self.record.rejection:
            return
        threshold = 1.0 / self._settings.max_false_rollbacks
        verdicts = self._metric_verdicts(step)
        evidence = sum(each.regression for each in verdicts) / len(verdicts)
        if evidence >= threshold:
            worst = max(verdicts, key=lambda each: each.regression)
            self.record.rejection = (
                f"{worst.metric} is worse than in the stable version ({worst.candidate_events} of "
                f"{step.candidate_requests} requests, there {worst.stable_events} of {step.stable_requests})"
            )
        elif step.share >= 1.0 and mean_evidence(step.objective_missed) >= threshold:
            self.record.rejection = (
                f"{step.candidate_misses} of {step.candidate_requests} requests miss the objective"
            )

    def verdict(self, now: float) -> GateVerdict:
        """Judge the candidate by all that was counted.

        Missing, stale, invalid and empty measurements all have the same result: it is inconclusive.

        Args:
            now: Seconds since the epoch.
        """
        record, step = self.record, self.record.step
        if step is None:
            reason = "no step has traffic yet"
            return GateVerdict(GateResult.INCONCLUSIVE, reason, record.rollout, None, 1.0, ())
        verdicts = self._metric_verdicts(step)
        result, reason = GateResult.INCONCLUSIVE, self._missing_data(step, now)
        if record.rejection:
            result, reason = GateResult.ROLL_BACK, record.rejection
        elif not reason:
            waiting = [each for each in verdicts if not each.has_passed]
            reason = _describe_waiting(step, waiting)
            if not waiting:
                result, reason = GateResult.PROMOTE, "no metric is worse than its margin"
        evidence = sum(each.regression for each in verdicts) / len(verdicts)
        return GateVerdict(
            result,
            reason,
            record.rollout,
            step.index,
            evidence,
            verdicts,
            step.candidate_requests,
            step.stable_requests,
        )

    def _missing_data(self, step: StepRecord, now: float) -> str:
        if step.last_batch_at is None:
            if step.invalid_requests:
                return "all measurements of this step are invalid"
            return "no gateway has reported measurements of this step"
        silence_s = now - step.last_batch_at
        if not silence_s <= self._settings.max_silence_s:
            return f"no measurement for {silence_s:.0f} s"
        if not step.candidate_requests:
            return "the candidate has had no request in this step"
        requests = step.candidate_requests + step.stable_requests + step.invalid_requests
        if step.invalid_requests > self._settings.max_invalid_share * requests:
            return f"{step.invalid_requests} of {requests} requests have no valid measurements"
        return ""

    def _metric_verdicts(self, step: StepRecord) -> tuple[MetricVerdict, ...]:
        needed = 1.0 / self._settings.max_false_promotions
        is_alone = step.share >= 1.0
        verdicts = []
        for metric in self._settings.rules:
            decisive = next(each for each in EVENTS_OF[metric] if EVENTS[each].decides_promotion)
            equivalence = to_float(step.equivalence[decisive])
            sums = step.totals[decisive]
            is_rare = metric in _RARE or not (sums.candidate_events or sums.stable_events)
            if is_alone or is_rare or _is_harmless(step, decisive):
                equivalence = max(equivalence, to_float(step.objective_met))
            retained = is_alone and metric in self.record.passed
            has_passed = equivalence >= needed or retained
            verdicts.append(
                MetricVerdict(
                    metric,
                    self._regression(metric, step),
                    equivalence,
                    _ratio(step, decisive),
                    has_passed,
                    sums.candidate_events,
                    sums.stable_events,
                    None if has_passed else self._requests_needed(metric, step, decisive),
                )
            )
        return tuple(verdicts)

    def _requests_needed(self, metric: Metric, step: StepRecord, event: int) -> int | None:
        """Estimate with how many requests of the candidate in this step a metric passes if the versions are alike."""
        needed = math.log(1.0 / self._settings.max_false_promotions)
        seen, sums, kind = step.candidate_requests, step.totals[event], EVENTS[event]
        estimates: list[float] = []
        share = step.share
        if sums.candidate_expected and sums.stable_expected:
            share = sums.candidate_expected / (sums.candidate_expected + sums.stable_expected)
        num_events = sums.candidate_events + sums.stable_events
        if seen and share < 1.0:
            rate = num_events / seen
            if not num_events and kind.quantile is not None:
                rate = min(kind.quantile, 1.0 - kind.quantile) / share
            rule = self._settings.rules[metric]
            margin = rule.tight_margin if step.share >= TIGHT_SHARE else rule.margin
            missing = needed - _log(to_float(step.equivalence[event]))
            if rate:
                estimates.append(missing / (equivalence_growth(share, margin) * rate))
        objective = self._settings.max_miss_rate
        if objective is not None and seen and (share >= 1.0 or metric in _RARE or not num_events):
            misses, bet = step.candidate_misses / seen, objective * _OBJECTIVE_BET
            growth = misses * math.log(bet / objective)
            growth += (1.0 - misses) * math.log((1.0 - bet) / (1.0 - objective))
            if growth > 0.0:
                estimates.append((needed - _log(to_float(step.objective_met))) / growth)
        return seen + math.ceil(max(0.0, min(estimates))) if estimates else None

    def _regression(self, metric: Metric, step: StepRecord) -> float:
        """Return the mean e-value over the events of a metric and all starts. Starts to come count as 1."""
        events = EVENTS_OF[metric]
        opened = 0.0
        for event in events:
            evidence = [mean_evidence(start[event]) for start in self.record.starts]
            if _is_harmless(step, event):
                evidence = [min(1.0, each) for each in evidence]
            opened += sum(evidence)
        to_come = self.record.num_starts - len(self.record.starts)
        return opened / (len(events) * self.record.num_starts) + to_come / self.record.num_starts


def _is_harmless(step: StepRecord, event: int) -> bool:
    """Return whether the candidate exceeds a quantile no more often than the stable version did before.

    The stable version may exceed it even less now, because the baseline comes from a busier time.
    """
    kind, sums = EVENTS[event], step.totals[event]
    if kind.quantile is None or kind.by_user:
        return False
    return sums.candidate_events <= (1.0 - kind.quantile) * sums.candidate_expected


def _ratio(step: StepRecord, event: int) -> float | None:
    sums = step.totals[event]
    if not (sums.stable_events and sums.candidate_expected and sums.stable_expected):
        return None
    candidate_rate = sums.candidate_events / sums.candidate_expected
    return candidate_rate / (sums.stable_events / sums.stable_expected)


def _log(value: float) -> float:
    return math.log(max(value, 1e-300))


def _describe_waiting(step: StepRecord, waiting: Sequence[MetricVerdict]) -> str:
    """Describe how many requests the metrics still need that have not passed, and how long these take."""
    seen, names = step.candidate_requests, ", ".join(each.metric for each in waiting)
    needed = [each.requests_needed for each in waiting if each.requests_needed is not None]
    if len(needed) < len(waiting):
        unknown = ", ".join(each.metric for each in waiting if each.requests_needed is None)
        return (
            f"not enough evidence yet after {seen} requests of the new version; no estimate, because neither version "
            f"has had events yet: {unknown}"
        )
    total = max(needed, default=0)
    rounded = float(f"{total:.2g}")
    duration_s = (step.last_batch_at or step.opened_at) - step.opened_at
    left = ""
    if duration_s > 0.0 and seen:
        left = f", about {_format_wait((total - seen) * duration_s / seen)} left at this rate"
    return f"not enough evidence yet: {seen} of about {rounded:.0f} requests of the new version{left} ({names})"


def _format_wait(seconds: float) -> str:
    if seconds < 100.0:
        return f"{max(10, math.ceil(seconds / 10.0) * 10)} s"
    minutes = math.ceil(seconds / 60.0)
    return f"{minutes} min" if minutes < 100 else f"{math.ceil(minutes / 60.0)} h"


def _is_valid(batch: OutcomeBatch) -> bool:
    counts = [batch.candidate_requests, batch.stable_requests, batch.invalid_requests]
    counts += [batch.candidate_misses, batch.candidate_requests - batch.candidate_misses]
    expected = []
    for cell in batch.cells:
        expected += [cell.candidate_expected, cell.stable_expected]
        counts += [cell.candidate_events, cell.stable_events, len(EVENTS) - 1 - cell.event]
        counts.append(cell.event)
    return (
        min(counts) >= 0
        and all(math.isfinite(each) and each >= 0.0 for each in expected)
        and math.isfinite(batch.ended_at)
    )
