"""Random lengths and open-loop arrival times of a load, from parameters and a seed."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from argosy.bench.errors import BenchError

MAX_LENGTH_TOKENS = 10_000_000
LENGTH_SYNTAX = "128, uniform:32-512, normal:256,64 or lognormal:200,0.8"


class LengthDistribution(msgspec.Struct, frozen=True):
    """Distribution of token counts of at least 1."""

    kind: Literal["fixed", "uniform", "normal", "lognormal"]
    a: float
    """Fixed: the length. Uniform: the minimum. Normal: the mean. Lognormal: the median."""
    b: float = 0.0
    """Uniform: the maximum, inclusive. Normal: the standard deviation. Lognormal: the sigma of the logarithm."""

    def draw(self, rng: np.random.Generator) -> int:
        """Draw one length in tokens."""
        match self.kind:
            case "fixed":
                drawn = self.a
            case "uniform":
                drawn = float(rng.integers(int(self.a), int(self.b) + 1))
            case "normal":
                drawn = rng.normal(self.a, self.b)
            case "lognormal":
                drawn = self.a * rng.lognormal(0.0, self.b)
        return int(min(max(round(drawn), 1), MAX_LENGTH_TOKENS))


def parse_length_distribution(text: str) -> LengthDistribution:
    """Parse `128`, `uniform:32-512`, `normal:256,64` or `lognormal:200,0.8`.

    Raises:
        BenchError: `text` is something else.
    """
    kind, colon, numbers = text.strip().partition(":")
    if not colon:
        kind, numbers = "uniform" if "-" in kind.strip("-") else "fixed", kind
    try:
        parts = [float(part) for part in numbers.replace("-", ",").split(",")]
    except ValueError:
        parts = []
    in_range = parts and all(
        math.isfinite(part) and 0 <= part <= MAX_LENGTH_TOKENS for part in parts
    )
    if in_range and parts[0] >= 1:
        match kind, len(parts):
            case "fixed", 1:
                return LengthDistribution("fixed", parts[0])
            case "uniform", 2 if parts[0] <= parts[1]:
                return LengthDistribution("uniform", float(int(parts[0])), float(int(parts[1])))
            case "normal", 2:
                return LengthDistribution("normal", *parts)
            case "lognormal", 2:
                return LengthDistribution("lognormal", *parts)
            case _:
                pass
    raise BenchError(f"{text!r} is not a length: write {LENGTH_SYNTAX}.")


class ArrivalProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Arrival process with gamma-distributed gaps. Raises BenchError if a parameter is out of range."""

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
