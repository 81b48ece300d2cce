"""Recorded demand of one pool: means of the last two minutes, and peaks of up to two hours."""

from __future__ import annotations

import math

import msgspec

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
