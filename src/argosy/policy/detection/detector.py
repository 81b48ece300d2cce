"""E-detectors: sequential tests for a change at an unknown time.

A Shiryaev-Roberts e-detector sums the e-processes that start at each step. If no step has a share above the null, the
expected number of steps until the sum exceeds c is at least c, however often it is looked at. See Shin, Ramdas and
Rinaldo, "E-detectors: A Nonparametric Framework for Sequential Change Detection", 2022.

The null is beta-binomial: shares of steps differ, even if nothing has changed. All products are of rationals, so that
results are the same on every platform.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from argosy.policy.rollout import candidate_probability
from argosy.policy.scaled_number import MAX_VALUE, ONE, ScaledNumber, multiply, to_float

RATIOS = (1.4, 2.0, 4.0, 10.0)
"""Effects that are tested, above the tolerance."""
MAX_COUNT = 500
"""Opportunities of a step beyond which both counts are scaled down, since differences between steps dominate."""
MAX_NULL, MAX_ALTERNATIVE = 0.9, 0.95
_BATCH = 16
"""Factors that are multiplied before their exponent is taken out."""


def beta_binomial_factor(
    null: float, alternative: float, concentration: float, events: int, others: int
) -> ScaledNumber:
    """Return the likelihood ratio of two mean shares of beta-binomial counts, both between 0 and 1 without them."""
    result = ONE
    for count, numerator, denominator in (
        (events, alternative * concentration, null * concentration),
        (others, (1.0 - alternative) * concentration, (1.0 - null) * concentration),
    ):
        for start in range(0, count, _BATCH):
            factor = 1.0
            for index in range(start, min(start + _BATCH, count)):
                factor *= (numerator + index) / (denominator + index)
            result = multiply(result, (factor, 0))
    return result


def _scale_down(events: int, opportunities: int) -> tuple[int, int]:
    """Return events and others."""
    if opportunities > MAX_COUNT:
        events, opportunities = round(events * MAX_COUNT / opportunities), MAX_COUNT
    return events, opportunities - events


class ChangeDetector(msgspec.Struct):
    """Detects that a share rises above `tolerance` times what is expected. Storable as JSON."""

    tolerance: float
    sums: list[float] = []
    """Shiryaev-Roberts sum of each ratio."""
    starts: list[float] = []
    """Time at which the change began, if there is one, for each ratio: where its CUSUM last left 1."""
    cusums: list[float] = []

    def update(
        self, at: float, events: int, opportunities: int, expected: float, concentration: float
    ) -> None:
        """Count a step that begins at `at`. `expected` is the share without a change.

        A share that cannot rise beyond the tolerance counts for nothing.
        """
        null = expected * self.tolerance
        if null >= MAX_NULL:
            return
        alternatives = [min(MAX_ALTERNATIVE, null * ratio) for ratio in RATIOS]
        self._count(at, [(null, alternatives, events, opportunities)], concentration)

    def race(
        self, at: float, buckets: Sequence[tuple[float, int, int]], concentration: float
    ) -> None:
        """Count a step in which one of several replicas competes for events.

        Args:
            at: Begin of the step.
            buckets: Of each bucket of equal requests the replica's share of them, and the events of it and of all.
            concentration: As of a baseline.
        """
        groups = [
            (
                candidate_probability(share, self.tolerance),
                [candidate_probability(share, self.tolerance * ratio) for ratio in RATIOS],
                own,
                events,
            )
            for share, own, events in buckets
        ]
        self._count(at, groups, concentration)

    def _count(
        self,
        at: float,
        groups: Sequence[tuple[float, Sequence[float], int, int]],
        concentration: float,
    ) -> None:
        """Count groups of opportunities: the null, the alternatives, the events, and the opportunities."""
        if not any(opportunities for *_, opportunities in groups):
            return
        if not self.sums:
            self.sums, self.cusums = [0.0] * len(RATIOS), [1.0] * len(RATIOS)
            self.starts = [at] * len(RATIOS)
        for index in range(len(RATIOS)):
            product = ONE
            for null, alternatives, events, opportunities in groups:
                counts = _scale_down(events, opportunities)
                product = multiply(
                    product,
                    beta_binomial_factor(null, alternatives[index], concentration, *counts),
                )
            factor = to_float(product)
            self.sums[index] = min(MAX_VALUE, (self.sums[index] + 1.0) * factor)
            if self.cusums[index] <= 1.0:
                self.starts[index] = at
            self.cusums[index] = min(MAX_VALUE, max(1.0, self.cusums[index]) * factor)

    @property
    def evidence(self) -> float:
        """Evidence of a change: its mean time to exceed c without one is c steps or more."""
        return sum(self.sums) / len(self.sums) if self.sums else 0.0

    @property
    def onset(self) -> float | None:
        """Most likely time of the change; None before the first step."""
        if not self.sums:
            return None
        return self.starts[max(range(len(RATIOS)), key=lambda index: self.cusums[index])]

    def reset(self) -> None:
        """Forget all steps."""
        self.sums, self.starts, self.cusums = [], [], []
