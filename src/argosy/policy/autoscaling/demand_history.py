"""Recorded demand of one pool: means of two minutes, peaks of up to two hours, and a trend forecast.

The forecast has to prove itself on the recorded demand before it may be used.
"""

from __future__ import annotations

import math

import msgspec

from argosy.policy.smoothing import decay_factor

SLOW_WINDOW_S = 120.0
FAST_WINDOW_S = 6.0
PEAK_MEAN_S = 60.0
"""A peak is the highest mean of this time."""
BURST_STANDARD_ERRORS = 3.5
"""Distance from the mean of two minutes from which the mean of the last seconds is significant."""
MAX_PEAK_WINDOW_S = 7200.0
MIN_SAMPLE_S = 1.0
"""Shorter intervals are merged, which bounds the number of samples."""
_BUCKET_S = 10.0


class PeakWindow(msgspec.Struct):
    """Peaks of a value over a sliding window. They expire up to 10 s late."""

    buckets: list[tuple[float, float]] = msgspec.field(default_factory=list)
    """Start and highest value of each interval of 10 s, oldest first."""

    def add(self, at: float, value: float) -> None:
        """Record a value."""
        start = at - at % _BUCKET_S
        if self.buckets and self.buckets[-1][0] >= start:
            newest, highest = self.buckets[-1]
            self.buckets[-1] = newest, max(highest, value)
            return
        self.buckets.append((start, value))
        if self.buckets[0][0] < at - MAX_PEAK_WINDOW_S - _BUCKET_S:
            del self.buckets[0]

    def peak(self, since: float) -> float:
        """Return the highest value recorded since then; 0 without any."""
        highest = 0.0
        for start, value in reversed(self.buckets):
            if start + _BUCKET_S <= since:
                break
            highest = max(highest, value)
        return highest


class RecentMean(msgspec.Struct, frozen=True):
    """Mean demand over the newest samples."""

    tokens_per_s: float
    seconds: float
    """Time that the samples cover."""
    variance: float
    """Variance of the demand of one second, from the differences between the samples."""


class DemandHistory(msgspec.Struct):
    """Recorded demand in tokens per second. Its fields are its state, which can be stored and restored."""

    samples: list[tuple[float, float]] = msgspec.field(default_factory=list)
    """Seconds and tokens of each interval within the longest mean, oldest first."""
    peaks: PeakWindow = msgspec.field(default_factory=PeakWindow)

    def add(self, end: float, seconds: float, tokens: float) -> None:
        """Record the tokens that arrived in the `seconds` before `end`."""
        if seconds <= 0.0:
            return
        if self.samples and self.samples[-1][0] + seconds <= MIN_SAMPLE_S:
            earlier_s, earlier_tokens = self.samples.pop()
            self.samples.append((earlier_s + seconds, earlier_tokens + tokens))
        else:
            self.samples.append((seconds, tokens))
        covered_s = 0.0
        for index in range(len(self.samples) - 1, -1, -1):
            if covered_s >= SLOW_WINDOW_S:
                del self.samples[: index + 1]
                break
            covered_s += self.samples[index][0]
        recent = self.mean(PEAK_MEAN_S)
        if recent.seconds >= PEAK_MEAN_S:
            self.peaks.add(end, recent.tokens_per_s)

    def forget_samples(self) -> None:
        """Forget what the means are computed from, because of a gap in the observation. Peaks are kept."""
        self.samples.clear()

    def mean(self, window_s: float) -> RecentMean:
        """Return the mean over the newest samples that cover `window_s` seconds, or over all if these are fewer."""
        covered_s = tokens = squares = 0.0
        count = 0
        for sample_s, sample_tokens in reversed(self.samples):
            if covered_s >= window_s:
                break
            covered_s += sample_s
            tokens += sample_tokens
            squares += sample_tokens * sample_tokens / sample_s
            count += 1
        if not count:
            return RecentMean(0.0, 0.0, 0.0)
        rate = tokens / covered_s
        # The rate of an interval of s seconds varies 1 / s as much as that of one second.
        variance = max(0.0, (squares - rate * tokens) / count)
        return RecentMean(rate, covered_s, variance)

    def burst(self, slow: RecentMean) -> float | None:
        """Return the demand of the last seconds if it is significantly above the mean of two minutes."""
        fast = self.mean(FAST_WINDOW_S)
        if not FAST_WINDOW_S <= fast.seconds < slow.seconds:
            return None
        standard_error = math.sqrt(slow.variance / fast.seconds)
        above = fast.tokens_per_s - slow.tokens_per_s
        is_significant = above > max(0.0, BURST_STANDARD_ERRORS * standard_error)
        return fast.tokens_per_s if is_significant else None


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
