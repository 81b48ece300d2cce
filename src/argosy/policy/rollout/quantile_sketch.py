"""Quantiles of positive measurements, from counts in buckets of about 4 % width."""

from __future__ import annotations

import math

import msgspec

_STEPS = 16
"""Buckets for each power of two."""


class QuantileSketch(msgspec.Struct):
    """Mergeable histogram. Its quantiles are bounds of buckets: deterministic, and independent of the order."""

    counts: dict[int, int] = msgspec.field(default_factory=dict)
    total: int = 0

    def add(self, value: float) -> None:
        """Count a finite value of 0 or more."""
        mantissa, exponent = math.frexp(value)
        bucket = (
            exponent * _STEPS + int((mantissa - 0.5) * 2 * _STEPS) if value > 0.0 else -(1 << 20)
        )
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.total += 1

    def quantile(self, fraction: float) -> float:
        """Return the smallest bucket bound with at least this fraction of the values below it.

        Raises:
            ValueError: No value was counted.
        """
        if not self.total:
            raise ValueError("a quantile needs at least one value; call add first")
        below = 0
        bucket = 0
        for bucket in sorted(self.counts):
            below += self.counts[bucket]
            if below >= fraction * self.total:
                break
        exponent, step = divmod(bucket + 1, _STEPS)
        return math.ldexp(0.5 + step / (2 * _STEPS), exponent) if exponent > -1000 else 0.0
