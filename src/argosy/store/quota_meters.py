"""Counters of limits: what one gateway counts with, alone or of its part."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.policy import CalendarPeriod, ConcurrencyMeter, QuotaMeter, SlidingWindow
from argosy.store.records import Limit

WINDOW_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}

QuotaDemand = Sequence[tuple[QuotaMeter, int]]
"""Counters, and how many units somebody needs of each."""


def create_local_meter(limit: Limit) -> SlidingWindow | CalendarPeriod | ConcurrencyMeter:
    """What counts by itself. Raises ValueError when the limit needs a window, and has none that is known here."""
    if limit.unit == "concurrency":
        return ConcurrencyMeter(limit.amount)
    if limit.window is None:
        raise ValueError(f"The limit {limit.id} on {limit.unit} has no window. Give it one.")
    if limit.window in {"day", "month"}:
        return CalendarPeriod(limit.amount, limit.window)
    if limit.window not in WINDOW_SECONDS:
        raise ValueError(
            f"The limit {limit.id} is by {limit.window!r}, which this version cannot count."
        )
    return SlidingWindow(limit.amount, WINDOW_SECONDS[limit.window])
