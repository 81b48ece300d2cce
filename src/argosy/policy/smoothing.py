"""Smoothed estimates of measured rates, means, latencies, linear trends and lengths of responses.

`pow` and `exp` differ in their last digit between C libraries. The decay of all estimates uses only operations that
IEEE 754 rounds in one way (multiplication, square root), so that a recorded run replays bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

_STEPS_LOG2 = 8
_STEPS = 1 << _STEPS_LOG2
"""Steps of the table per half-life. Linear interpolation between them errs by less than one in a million."""
_MAX_HALVINGS = 1000


def _build_table() -> tuple[float, ...]:
    """Return 0.5 ** (step / _STEPS) for each step, from repeated square roots of one half."""
    roots, root = [], 0.5
    for _ in range(_STEPS_LOG2):
        root = math.sqrt(root)
        roots.append(root)
    table = []
    for step in range(_STEPS):
        value = 1.0
        for bit, factor in enumerate(reversed(roots)):
            if step >> bit & 1:
                value *= factor
        table.append(value)
    return (*table, 0.5)


_TABLE = _build_table()


def decay_factor(half_lives: float) -> float:
    """Return what is left of one unit after this many half-lives, which must not be negative."""
    if half_lives >= _MAX_HALVINGS:
        return 0.0
    halvings = int(half_lives)
    position = (half_lives - halvings) * _STEPS
    step = int(position)
    start = _TABLE[step]
    return math.ldexp(start + (_TABLE[step + 1] - start) * (position - step), -halvings)


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
        if seconds < self._value:
            decay = decay_factor(max(0.0, now - self._at) / self._half_life_s)
            mean = self._value * decay + seconds * (1.0 - decay)
            seconds = max(seconds, mean)
        self._value, self._at = seconds, now

    def value(self, now: float) -> float:
        """Latency in seconds; 0 before the first sample."""
        return self._value * decay_factor(max(0.0, now - self._at) / self._half_life_s)


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


STEP_UP = 1.5
STEP_DOWN = 0.9559480784229751
"""Factor that balances `STEP_UP` when one response in ten is longer than the estimate: `STEP_UP` ** (-1 / 9)."""
MAX_CALLERS = 10_000
"""Callers with a remembered estimate; beyond that, the least recently observed one is dropped."""


class OutputLengthEstimator:
    """Estimates of output tokens by caller and model: the 90th percentile of earlier responses, in one number each.

    A longer response multiplies the estimate by `STEP_UP`, a shorter one multiplies it by `STEP_DOWN`.
    """

    def __init__(self) -> None:
        self._lengths: dict[Hashable, float] = {}

    def estimate(self, caller_key: Hashable, max_tokens: int | None, default_tokens: int) -> int:
        """Return the output tokens that a response will rarely exceed.

        Args:
            caller_key: Caller and model.
            max_tokens: Token limit of the request, which also limits the estimate.
            default_tokens: Estimate for a caller without observations.
        """
        length = self._lengths.get(caller_key, default_tokens)
        return max_tokens if max_tokens is not None and max_tokens <= length else round(length)

    def observe(self, caller_key: Hashable, tokens: int, default_tokens: int) -> None:
        """Record a response that ended after `tokens`, by itself or at its token limit."""
        length = self._lengths.pop(caller_key, float(default_tokens))
        self._lengths[caller_key] = max(1.0, length * (STEP_UP if tokens > length else STEP_DOWN))
        if len(self._lengths) > MAX_CALLERS:
            del self._lengths[next(iter(self._lengths))]
