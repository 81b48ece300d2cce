"""Seasonal baseline: the share of an event that is expected in an hour of the week, and how much hours differ."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

HOUR_S = 3600
WEEK_HOURS = 168
_MONDAY_OFFSET_S = 4 * 24 * HOUR_S
"""Time of the first Monday after the epoch, which was a Thursday, at 00:00 UTC."""
SHRINKAGE = 50.0
"""Requests with the share of the whole week that each hour has in addition."""
MIN_SHARE, MAX_SHARE = 0.005, 0.9
DEFAULT_CONCENTRATION = 60.0
"""Concentration of the shares of hours before it is known: a share of 10 % has a standard deviation of 4 points."""
MIN_CONCENTRATION, MAX_CONCENTRATION = 20.0, 1000.0
MIN_DISPERSION_HOURS = 48
"""Hours from which the concentration is estimated at least."""
MIN_KNOWN = 100
"""Opportunities from which the share of a first week is known."""
_DECAY = 0.5
"""Weight of a week in the next one."""


def hour_of_week(at: float) -> tuple[int, int]:
    """Return the number of the week since the first Monday after the epoch, and the hour within it (UTC)."""
    return divmod(int(at - _MONDAY_OFFSET_S) // HOUR_S, WEEK_HOURS)


class SeasonalBaseline(msgspec.Struct):
    """Baseline of one event. It changes at the beginning of a week only, so that a drift is not learned meanwhile.

    A later week has twice the weight of the one before. Storable as JSON.
    """

    share: float = 0.0
    """Share before hours are known."""
    week: int = -1
    hours: dict[int, tuple[float, float]] = {}
    """Events and opportunities by hour of the week, of the weeks before."""
    open_hours: dict[int, tuple[float, float]] = {}
    """The same of the current week."""
    excess: float = 0.0
    """Sum of squared differences from the expected counts, beyond what counting explains."""
    excess_scale: float = 0.0
    """The excess, if shares differed between hours as much as between single requests."""
    num_hours: int = 0
    """Hours in the sums."""

    @property
    def is_known(self) -> bool:
        """Whether anything is expected."""
        return self.share > 0.0

    def learn(self, at: float, events: int, opportunities: int) -> None:
        """Learn from the hour that begins at `at`, for the next weeks."""
        week, hour = hour_of_week(at)
        if week != self.week:
            self._begin_week(week)
        if not opportunities:
            return
        if self.is_known:
            share = self.expected(at)
            variance = share * (1.0 - share)
            difference = events - opportunities * share
            self.excess += difference * difference - opportunities * variance
            self.excess_scale += opportunities * (opportunities - 1.0) * variance
            self.num_hours += 1
        known = self.open_hours.get(hour, (0.0, 0.0))
        self.open_hours[hour] = (known[0] + events, known[1] + opportunities)

    def set_share(self, counts: Iterable[tuple[float, float]]) -> None:
        """Set the share from events and opportunities, unless it is known or these are too few."""
        listed = list(counts)
        events, total = sum(each[0] for each in listed), sum(each[1] for each in listed)
        if not self.is_known and total >= MIN_KNOWN:
            self.share = (events + 1.0) / (total + 2.0)

    def rescale(self, ratio: float) -> None:
        """Expect shares that are `ratio` times as large."""
        self.share = min(MAX_SHARE, self.share * ratio)
        for hours in (self.hours, self.open_hours):
            for hour, (events, total) in hours.items():
                hours[hour] = (min(total, events * ratio), total)

    def _begin_week(self, week: int) -> None:
        self.set_share(self.open_hours.values())
        if self.open_hours and self.is_known:
            merged = {
                hour: (events * _DECAY, total * _DECAY)
                for hour, (events, total) in self.hours.items()
            }
            for hour, (events, total) in self.open_hours.items():
                known = merged.get(hour, (0.0, 0.0))
                merged[hour] = (known[0] + events, known[1] + total)
            self.hours, self.open_hours = merged, {}
            self.share = self.overall()
        self.week = week

    def overall(self) -> float:
        """Return the share in the whole week."""
        events = sum(each[0] for each in self.hours.values())
        total = sum(each[1] for each in self.hours.values())
        return (events + SHRINKAGE * self.share) / (total + SHRINKAGE) if total else self.share

    def expected(self, at: float) -> float:
        """Return the share that is expected at a time, from its hour of the week and both neighbours."""
        _, hour = hour_of_week(at)
        near = [self.hours.get((hour + offset) % WEEK_HOURS, (0.0, 0.0)) for offset in (-1, 0, 1)]
        events, total = sum(each[0] for each in near), sum(each[1] for each in near)
        share = (events + SHRINKAGE * self.share) / (total + SHRINKAGE)
        return min(MAX_SHARE, max(MIN_SHARE, share))

    @property
    def concentration(self) -> float:
        """Concentration of the beta distribution of the shares of hours: smaller if they differ more."""
        if self.num_hours < MIN_DISPERSION_HOURS or self.excess_scale <= 0.0:
            return DEFAULT_CONCENTRATION
        correlation = max(1e-6, self.excess / self.excess_scale)
        return min(MAX_CONCENTRATION, max(MIN_CONCENTRATION, 1.0 / correlation - 1.0))
