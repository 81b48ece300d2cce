"""The highest rate that holds the objectives, by doubling and then halving the gap; pure."""

from __future__ import annotations

import math
from collections.abc import Generator

MAX_TRIALS = 24
MIN_RATE_FRACTION = 1 / 64
"""Of the first rate: below that a trial takes too long to be worth it."""


def search_rate(initial_rate: float, precision: float) -> Generator[float, bool, float | None]:
    """Yields rates to try and is sent whether each held; returns the highest that did, or None.

    Ends when a rate that failed is at most (1 + `precision`) times one that held, when not even
    `LEAST` of the first rate held, or after `MOST_TRIALS`. Each rate is tried once, inside the
    bracket of what held and what failed.
    """
    low: float | None = None
    high: float | None = None
    rate = initial_rate
    for _ in range(MAX_TRIALS):
        held = yield rate
        if held:
            low = rate
        else:
            high = rate
        if low is not None and high is not None and high <= low * (1 + precision):
            break
        if high is None:
            rate *= 2
        elif low is None:
            rate /= 2
            if rate < initial_rate * MIN_RATE_FRACTION:
                break
        else:
            rate = math.sqrt(low * high)
    return low
