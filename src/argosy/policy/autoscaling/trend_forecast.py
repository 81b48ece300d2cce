"""Trend forecast of the demand, which has to prove itself on the recorded demand before it may be used."""

from __future__ import annotations

import msgspec

from argosy.policy.decay import decay_factor

MAX_TREND_ERROR = 0.9
"""The trend is used if its error is at most this part of the last value's."""
MIN_SCORES = 120
"""Forecasts that have to be scored first: one hour of them."""
HALF_LIFE_SCORES = 240
INTERVAL_S = 30.0
BASE_S = 240.0
"""Time over which the slope is measured."""
MAX_HORIZON_S = 300.0
MAX_GROWTH = 1.5
_DECAY = decay_factor(1.0 / HALF_LIFE_SCORES)


class PendingForecast(msgspec.Struct, frozen=True, array_like=True):
    """Forecast whose time has not come yet."""

    due_at: float
    trend: float
    last_value: float


class TrendForecast(msgspec.Struct):
    """Straight line through the 60-second means of now and four minutes ago, compared with the last value.

    Every forecast is scored when its time has come, whether it was used or not. The fields are the state, which can be
    stored and restored.
    """

    means: list[tuple[float, float]] = msgspec.field(default_factory=list)
    """Time and mean each 30 s, oldest first."""
    pending: list[PendingForecast] = msgspec.field(default_factory=list)
    trend_error: float = 0.0
    last_value_error: float = 0.0
    num_scored: int = 0
    forecast: float | None = None
    """Newest forecast."""

    @property
    def relative_error(self) -> float | None:
        """Error as a share of the last value's; None before enough forecasts were scored."""
        if self.num_scored < MIN_SCORES:
            return None
        if self.last_value_error <= 0.0:
            return 1.0
        return self.trend_error / self.last_value_error

    @property
    def usable_forecast(self) -> float | None:
        """Newest forecast, if forecasts have been better than the last value."""
        error = self.relative_error
        return self.forecast if error is not None and error <= MAX_TREND_ERROR else None

    def update(self, at: float, mean: float, startup_s: float) -> None:
        """Score what is due, and forecast the demand for when a replica started now serves.

        Args:
            at: Seconds since the epoch.
            mean: Mean demand of the last 60 s.
            startup_s: Expected time until a new replica serves.
        """
        if self.means and at - self.means[-1][0] < INTERVAL_S:
            return
        if self.means and at - self.means[-1][0] > 2.0 * INTERVAL_S:  # a gap in the observation
            self.means.clear()
            self.pending.clear()
            self.forecast = None
        while self.pending and self.pending[0].due_at <= at:
            due = self.pending.pop(0)
            self.trend_error = self.trend_error * _DECAY + abs(due.trend - mean)
            self.last_value_error = self.last_value_error * _DECAY + abs(due.last_value - mean)
            self.num_scored += 1
        self.means.append((at, mean))
        if at - self.means[0][0] < BASE_S:
            return
        begin, earlier = self.means.pop(0)
        horizon_s = min(startup_s + INTERVAL_S, MAX_HORIZON_S)
        growth = (mean - earlier) / (at - begin) * horizon_s
        self.forecast = min(max(0.0, mean + growth), MAX_GROWTH * mean)
        self.pending.append(PendingForecast(at + horizon_s, self.forecast, mean))
