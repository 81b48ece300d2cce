"""Objectives as written on a command line: `ttft:200,tpot:50,e2el:4000`, in milliseconds."""

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
    """Raises BenchError for a name that is no objective, a limit that is no number, or one given twice."""
    limits: dict[MetricName, float] = {}
    for part in text.replace(" ", ",").split(","):
        if not part:
            continue
        name, _, number = part.partition(":")
        metric = _METRIC_BY_NAME.get(name.strip().lower())
        if metric is None:
            raise BenchError(
                f"{name!r} is no objective: write them like ttft:200,tpot:50,e2el:4000."
            )
        if metric in limits:
            raise BenchError(f"{name} has two limits: give one.")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if not (math.isfinite(limit) and limit > 0):
            raise BenchError(f"{part!r} has no limit in milliseconds: write it like ttft:200.")
        limits[metric] = limit
    if not limits:
        raise BenchError("There is no objective in it: write them like ttft:200,tpot:50.")
    return Objectives(limits)
