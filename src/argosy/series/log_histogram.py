"""Histograms with eight buckets per octave, recorded by a table lookup and merged by addition.

A bucket is 9 % wide, so a percentile is exact to about 1 %. The table comes from square roots and multiplications,
which give the same bits on every platform. Gateways can therefore add their buckets.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

BUCKETS = 192
_OCTAVE_BUCKETS = 8
_SMALLEST_BOUND = 2.0**-14
"""Upper bound of the first bucket in seconds (61 us). The last bucket begins below 1,024 s and has no upper bound."""
_MAX_COUNT = 2**24 - 1
"""Largest count of one encoded entry. A larger count takes several entries."""

Floats = npt.NDArray[np.float64]


def _upper_bounds() -> list[float]:
    ratio = math.sqrt(math.sqrt(math.sqrt(2.0)))
    fractions = [1.0]
    for _ in range(_OCTAVE_BUCKETS - 1):
        fractions.append(fractions[-1] * ratio)
    return [
        _SMALLEST_BOUND * 2.0 ** (index // _OCTAVE_BUCKETS) * fractions[index % _OCTAVE_BUCKETS]
        for index in range(BUCKETS - 1)
    ]


UPPER_BOUNDS = _upper_bounds()
"""Inclusive upper bound of each bucket in seconds, without the last one, which is unbounded."""
_EDGES = np.array([UPPER_BOUNDS[0] / 2, *UPPER_BOUNDS, UPPER_BOUNDS[-1] * 2])
"""Edges between which percentiles are interpolated."""


class LogHistogram:
    """Counts of one period, by bucket. Buckets without values take no memory."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, value_s: float) -> None:
        """Record a value."""
        bucket = bisect_left(UPPER_BOUNDS, value_s)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1

    def add_sorted(self, values_s: Sequence[float]) -> None:
        """Record values in ascending order. It takes one lookup per bucket instead of one per value."""
        counts, start = self.counts, 0
        while start < len(values_s):
            bucket = bisect_left(UPPER_BOUNDS, values_s[start])
            end = len(values_s)
            if bucket < BUCKETS - 1:
                end = bisect_right(values_s, UPPER_BOUNDS[bucket], start)
            counts[bucket] = counts.get(bucket, 0) + end - start
            start = end

    def encode(self) -> bytes:
        """Return the counts as bytes. Bytes of several histograms are merged by concatenation."""
        return encode_counts(self.counts)


def encode_counts(counts: Mapping[int, int]) -> bytes:
    """Encode counts by bucket: four bytes per bucket, the index in the lowest one."""
    entries = array("I")
    for bucket, count in counts.items():
        remaining = count
        while remaining > _MAX_COUNT:
            entries.append(_MAX_COUNT << 8 | bucket)
            remaining -= _MAX_COUNT
        entries.append(remaining << 8 | bucket)
    return entries.tobytes()


def merge_encoded(parts: Sequence[bytes]) -> bytes:
    """Merge encoded histograms into one that has each bucket once."""
    joined = b"".join(parts)
    if not joined:
        return joined
    entries = np.frombuffer(joined, np.uint32)
    counts = np.bincount(entries & 0xFF, weights=entries >> 8, minlength=BUCKETS)
    used = np.flatnonzero(counts)
    return encode_counts(dict(zip(used.tolist(), counts[used].astype(int).tolist(), strict=True)))


def decode_counts(encoded: Sequence[bytes]) -> Floats:
    """Return the counts of encoded histograms, one row each, with a column per bucket."""
    entries = np.frombuffer(b"".join(encoded), np.uint32)
    rows = np.repeat(np.arange(len(encoded)), [len(one) // 4 for one in encoded])
    cells = rows * BUCKETS + (entries & 0xFF)
    counts = np.bincount(cells, weights=entries >> 8, minlength=len(encoded) * BUCKETS)
    return counts.astype(np.float64, copy=False).reshape(len(encoded), BUCKETS)


def percentiles(cumulative: Floats, quantile: float) -> Floats:
    """Return the quantile of each row in seconds, NaN for a row without values.

    Args:
        cumulative: Counts by row and bucket, each with those of the buckets before it.
        quantile: Between 0 and 1.
    """
    totals = cumulative[:, -1]
    ranks = quantile * totals
    buckets = np.minimum((cumulative < ranks[:, None]).sum(axis=1), BUCKETS - 1)
    rows = np.arange(len(cumulative))
    below = np.where(buckets > 0, cumulative[rows, buckets - 1], 0.0)
    in_bucket = cumulative[rows, buckets] - below
    fraction = np.divide(ranks - below, in_bucket, out=np.ones_like(ranks), where=in_bucket > 0)
    lower, upper = _EDGES[buckets], _EDGES[buckets + 1]
    return np.where(totals > 0, lower * (upper / lower) ** fraction, np.nan)
