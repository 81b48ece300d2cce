"""Smoothed estimates of measured rates, means, latencies and linear trends."""

from __future__ import annotations

from argosy.policy.decay import decay_factor

LN_2 = 0.6931471805599453
"""Half-lives are this much shorter than time constants."""


class EwmaRate:
    """Exponentially weighted rate in units per second, where the age of a measurement is counted in units."""

    __slots__ = ("_half_life_units", "_seconds", "_units")

    def __init__(self, half_life_units: float) -> None:
        """Create a rate in which a measurement counts half once `half_life_units` units have followed it."""
        self._half_life_units = half_life_units
        self._units = 0.0
        self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        """Record that `units` took `seconds`."""
        decay = decay_factor(units / self._half_life_units)
        self._units = self._units * decay + units
        self._seconds = self._seconds * decay + seconds

    @property
    def units_per_s(self) -> float:
        """Units per second; 0 before the first measurement."""
        return self._units / self._seconds if self._seconds > 0 else 0.0


class EwmaMean:
    """Exponentially weighted mean, where the age of a sample is counted in samples."""

    __slots__ = ("_decay", "_value")

    def __init__(self, half_life_samples: float, initial: float) -> None:
        """Create a mean in which a sample counts half once `half_life_samples` have followed it.

        `initial` is the value before the first sample.
        """
        self._decay = decay_factor(1.0 / half_life_samples)
        self._value = initial

    def add(self, sample: float) -> None:
        """Add a sample."""
        self._value = self._value * self._decay + sample * (1.0 - self._decay)

    @property
    def value(self) -> float:
        """Current mean."""
        return self._value


class PeakEwma:
    """Peak-sensitive latency average (Finagle's peak EWMA).

    The value rises to a larger sample at once and decays with time. Because the decay needs no samples, a replica that
    was slow once is tried again.
    """

    __slots__ = ("_at", "_half_life_s", "_value")

    def __init__(self, tau_s: float = 10.0) -> None:
        """Create an average that falls to `1 / e` of its value within `tau_s` seconds."""
        self._half_life_s = tau_s * LN_2
        self._value = 0.0
        self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Add a latency sample."""
        decay = self._decay(now)
        mean = self._value * decay + seconds * (1.0 - decay)
        self._value, self._at = max(seconds, mean), now

    def value(self, now: float) -> float:
        """Latency in seconds; 0 before the first sample."""
        return self._value * self._decay(now)

    def _decay(self, now: float) -> float:
        return decay_factor(max(0.0, now - self._at) / self._half_life_s)


LineMoments = tuple[float, float, float, float, float]
NO_MOMENTS: LineMoments = (0.0, 0.0, 0.0, 0.0, 0.0)


class OnlineLinearFit:
    """Least-squares line `y = a + b * x` with exponentially decaying weights; `b` is never negative."""

    __slots__ = ("_decay", "_n", "_x", "_xx", "_xy", "_y")

    def __init__(self, half_life_points: float, moments: LineMoments = NO_MOMENTS) -> None:
        """Create a fit in which a point counts half once `half_life_points` points have followed it.

        `moments` are those of an earlier fit, which is continued.
        """
        self._decay = decay_factor(1.0 / half_life_points)
        self._n, self._x, self._y, self._xx, self._xy = moments

    @property
    def moments(self) -> LineMoments:
        """Weighted number of points, and sums of x, y, x * x and x * y."""
        return self._n, self._x, self._y, self._xx, self._xy

    def add(self, x: float, y: float) -> None:
        """Add a point."""
        decay = self._decay
        self._n = self._n * decay + 1.0
        self._x = self._x * decay + x
        self._y = self._y * decay + y
        self._xx = self._xx * decay + x * x
        self._xy = self._xy * decay + x * y

    def predict(self, x: float) -> float:
        """Return the expected `y` at `x`; 0 before the first point."""
        if not self._n:
            return 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        covariance = self._xy / self._n - mean_x * mean_y
        slope = (
            max(0.0, covariance / variance) if variance > 1e-9 * (1.0 + mean_x * mean_x) else 0.0
        )
        return max(0.0, mean_y + slope * (x - mean_x)) or mean_y
