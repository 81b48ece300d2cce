"""Numbers measured from what happens, smoothed: how fast, how long, at which load. Pure: the time is an argument."""

from __future__ import annotations

import math


class EwmaRate:
    """Units a second, over the last units: what is `half_life` units ago counts half."""

    __slots__ = ("_half_life_units", "_seconds", "_units")

    def __init__(self, half_life_units: float) -> None:
        self._half_life_units = half_life_units
        self._units = 0.0
        self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        """So many units took so long."""
        left = 0.5 ** (units / self._half_life_units)
        self._units = self._units * left + units
        self._seconds = self._seconds * left + seconds

    @property
    def units_per_s(self) -> float:
        """0: nothing was measured."""
        return self._units / self._seconds if self._seconds > 0 else 0.0


class EwmaMean:
    """Over the last samples: what is `half_life` samples ago counts half."""

    __slots__ = ("_decay", "_value")

    def __init__(self, half_life_samples: float, initial: float) -> None:
        """`start` is what is presumed before anything was measured."""
        self._decay = 0.5 ** (1.0 / half_life_samples)
        self._value = initial

    def add(self, sample: float) -> None:
        """One more sample."""
        self._value = self._value * self._decay + sample * (1.0 - self._decay)

    @property
    def value(self) -> float:
        """The mean."""
        return self._value


class PeakEwma:
    """A latency that rises to a larger sample at once and falls with time (as Finagle's peak EWMA).

    It falls without samples too, so whoever was slow once is tried again.
    """

    __slots__ = ("_at", "_tau_s", "_value")

    def __init__(self, tau_s: float = 10.0) -> None:
        self._tau_s = tau_s
        self._value = 0.0
        self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        """One more sample."""
        left = self._decay(now)
        mean = self._value * left + seconds * (1.0 - left)
        self._value, self._at = max(seconds, mean), now

    def value(self, now: float) -> float:
        """Seconds; 0: nothing was measured."""
        return self._value * self._decay(now)

    def _decay(self, now: float) -> float:
        return math.exp(-max(0.0, now - self._at) / self._tau_s)


class OnlineLinearFit:
    """The line `y = a + b * x` through what was measured, by least squares; each new point makes the others fade.

    It never falls: `b` is at least 0.
    """

    __slots__ = ("_decay", "_n", "_x", "_xx", "_xy", "_y")

    def __init__(self, half_life_points: float) -> None:
        """Points that are `half_life` points ago count half."""
        self._decay = 0.5 ** (1.0 / half_life_points)
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """One more point."""
        left = self._decay
        self._n = self._n * left + 1.0
        self._x = self._x * left + x
        self._y = self._y * left + y
        self._xx = self._xx * left + x * x
        self._xy = self._xy * left + x * y

    def predict(self, x: float) -> float:
        """What is expected there; 0: nothing was measured."""
        if not self._n:
            return 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        together = self._xy / self._n - mean_x * mean_y
        slope = max(0.0, together / spread) if spread > 1e-9 * (1.0 + mean_x * mean_x) else 0.0
        return max(0.0, mean_y + slope * (x - mean_x)) or mean_y
