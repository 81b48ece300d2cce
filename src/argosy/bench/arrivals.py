"""Open-loop arrival times, drawn from a rate, a burstiness, a ramp and a seed."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from argosy.bench.errors import BenchError


class ArrivalProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Arrival process with gamma-distributed gaps.

    Raises:
        BenchError: A parameter is out of range.
    """

    rate: float | None
    """Requests per second on average; None sends all at once."""
    burstiness: float | None = 1.0
    """Shape of the gamma distribution. 1 is a Poisson process, less is burstier, None has constant gaps."""
    ramp_s: float = 0.0
    """Time in which the rate grows linearly from 0."""

    def __post_init__(self) -> None:
        """Validate the parameters."""
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise BenchError(f"A rate of {self.rate:g} cannot be sent: give a number above 0.")
        if self.burstiness is not None and not 0 < self.burstiness < math.inf:
            raise BenchError(
                f"A burstiness of {self.burstiness:g} is not possible: give a number above 0."
            )
        if self.ramp_s < 0:
            raise BenchError("A ramp of less than 0 seconds is not possible: give 0 or more.")


def draw_arrival_times(
    arrivals: ArrivalProcess, *, seed: int, count: int | None, duration_s: float | None
) -> list[float]:
    """Return ascending send times in seconds after the start.

    The list ends after `count` times or before `duration_s`, whichever is first. The same seed draws the same gaps at
    every rate, so that the loads of a sweep are comparable.

    Raises:
        BenchError: Neither `count` nor `duration_s` bounds the list.
    """
    if arrivals.rate is None:
        if count is None:
            raise BenchError("Sending all at once needs a number of requests: give --requests.")
        return [0.0] * count
    if count is None and duration_s is None:
        raise BenchError("The run has no end: give --requests or --duration.")
    rng = np.random.default_rng((seed, 1))
    times: list[float] = []
    load = 0.0
    while count is None or len(times) < count:
        for gap in _draw_unit_gaps(rng, arrivals.burstiness):
            load += gap
            at = _time_of_load(load, arrivals.rate, arrivals.ramp_s)
            if (duration_s is not None and at >= duration_s) or len(times) == count:
                return times
            times.append(at)
    return times


def _draw_unit_gaps(rng: np.random.Generator, burstiness: float | None) -> list[float]:
    if burstiness is None:
        return [1.0] * 256
    gaps: list[float] = rng.gamma(burstiness, 1.0 / burstiness, 256).tolist()
    return gaps


def _time_of_load(load: float, rate: float, ramp_s: float) -> float:
    """Return the time by which `load` requests are expected: the inverse of the integral of the rate."""
    ramp_load = rate * ramp_s / 2
    if load < ramp_load:
        return math.sqrt(2 * load * ramp_s / rate)
    return ramp_s + (load - ramp_load) / rate
