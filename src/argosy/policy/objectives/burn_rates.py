"""Windows in which burn rates are compared, from the SRE workbook (chapter 5), with three additions.

A rate counts only from a number of misses on. A threshold is at most half of all requests. An outage pages within
minutes, also if the objective permits many misses.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

MAX_MISS_RATE = 0.5
"""Share of misses that suffices for any threshold, since burn rates of lax objectives cannot be reached."""


class BurnWindow(NamedTuple):
    """Pair of a long and a short window that both have to exceed a burn rate."""

    severity: Literal["page", "ticket"]
    burn_rate: float
    """Multiple of the rate at which the budget lasts for exactly its window."""
    long_s: int
    short_s: int
    min_misses: int
    """Misses in the long window without which the rate says nothing."""

    def max_miss_rate(self, budget_share: float) -> float:
        """Return the share of misses that both windows have to exceed, for an objective with this share of misses."""
        return min(self.burn_rate * budget_share, MAX_MISS_RATE)

    def is_capped(self, budget_share: float) -> bool:
        """Return whether more than half of all requests would have to miss for its burn rate."""
        return self is not OUTAGE_WINDOW and self.burn_rate * budget_share > MAX_MISS_RATE

    def fires_after_s(self, budget_share: float, miss_rate: float = 1.0) -> float:
        """Return the seconds from the start of constant misses until both windows exceed the rate; inf if never.

        Before, there were as many requests and no misses. The 10-second slots and the interval of evaluation add to it.
        """
        threshold = self.max_miss_rate(budget_share)
        return self.long_s * threshold / miss_rate if miss_rate > threshold else math.inf

    def min_requests_per_s(self, budget_share: float) -> float:
        """Return the requests per second below which this window cannot fire at its own threshold."""
        return self.min_misses / (self.max_miss_rate(budget_share) * self.long_s)


BURN_WINDOWS = (
    BurnWindow("page", 14.4, 3600, 300, 5),
    BurnWindow("page", 6.0, 6 * 3600, 1800, 5),
    BurnWindow("ticket", 3.0, 24 * 3600, 2 * 3600, 10),
    BurnWindow("ticket", 1.0, 72 * 3600, 6 * 3600, 10),
)
OUTAGE_WINDOW = BurnWindow("page", math.inf, 300, 60, 20)
"""Half of all requests miss, whatever the objective permits."""
