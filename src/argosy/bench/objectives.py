"""Latency objectives: their parser (`ttft:200,tpot:50`, in ms), and the search for the highest rate that meets them."""

from __future__ import annotations

import math
from collections.abc import Generator

from argosy.bench.errors import BenchError
from argosy.bench.metrics import MetricName, Objectives

_METRIC_BY_NAME: dict[str, MetricName] = {
    "ttft": "ttft",
    "tpot": "tpot",
    "itl": "itl",
    "e2e": "e2e",
    "e2el": "e2e",  # vLLM's name
    "ntpot": "ntpot",
}
MAX_TRIALS = 24
MIN_RATE_FRACTION = 1 / 64
"""Smallest rate to try, as a fraction of the first. Trials at lower rates take too long."""


def parse_objectives(text: str) -> Objectives:
    """Parse latency objectives.

    Raises:
        BenchError: A name is unknown or repeated, or a limit is not a number above 0.
    """
    limits: dict[MetricName, float] = {}
    for part in text.replace(" ", ",").split(","):
        if not part:
            continue
        name, _, number = part.partition(":")
        metric = _METRIC_BY_NAME.get(name.strip().lower())
        if metric is None:
            raise BenchError(
                f"{name!r} is not an objective: write objectives like ttft:200,tpot:50,e2el:4000."
            )
        if metric in limits:
            raise BenchError(f"{name} has two limits: give one.")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if not (math.isfinite(limit) and limit > 0):
            raise BenchError(
                f"{part!r} has no limit in milliseconds: write an objective like ttft:200."
            )
        limits[metric] = limit
    if not limits:
        raise BenchError("The list of objectives is empty: write objectives like ttft:200,tpot:50.")
    return Objectives(limits)


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
