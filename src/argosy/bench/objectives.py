"""Parser of latency objectives: `ttft:200,tpot:50,e2el:4000`, in milliseconds."""

from __future__ import annotations

import math

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
