"""Search for the highest rate that meets the objectives: doubling, then bisection. Pure, without I/O."""

from __future__ import annotations

import math
from collections.abc import Generator

MAX_TRIALS = 24
MIN_RATE_FRACTION = 1 / 64
"""Smallest rate to try, as a fraction of the first. Trials at lower rates take too long."""


def search_rate(initial_rate: float, precision: float) -> Generator[float, bool, float | None]:
    """Yield rates to try. The caller sends whether each met the objectives.

    Ends when a failed rate is at most (1 + `precision`) times a rate that met the objectives. Also ends when rates down
    to `MIN_RATE_FRACTION` of the first failed, or after `MAX_TRIALS`. Each rate is tried once, between the highest rate
    that met the objectives and the lowest that failed.

    Returns:
        The highest rate that met the objectives, or None.
    """
    low: float | None = None
    high: float | None = None
    rate = initial_rate
    for _ in range(MAX_TRIALS):
        is_met = yield rate
        if is_met:
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
