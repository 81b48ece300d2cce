"""Local meters of limits, which count usage in one gateway."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.policy import CalendarPeriod, ConcurrencyMeter, QuotaMeter, SlidingWindow
from argosy.store.clock import steady_clock
from argosy.store.records import Limit

WINDOW_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}

QuotaDemand = Sequence[tuple[QuotaMeter, int, int]]
"""Meters with the units that a request holds of each, and how many of them have to be free."""


def create_local_meter(limit: Limit) -> SlidingWindow | CalendarPeriod | ConcurrencyMeter:
    """Create a meter that counts in this gateway. Raises ValueError if the limit's window is missing or unknown."""
    if limit.unit == "concurrency":
        return ConcurrencyMeter(limit.amount)
    if limit.window is None:
        raise ValueError(f"The limit {limit.id} on {limit.unit} has no window. Give it one.")
    if limit.window in {"day", "month"}:
        return CalendarPeriod(limit.amount, limit.window, steady_clock)
    if limit.window not in WINDOW_SECONDS:
        raise ValueError(
            f"The limit {limit.id} has the window {limit.window!r}, which this version does not support."
        )
    return SlidingWindow(limit.amount, WINDOW_SECONDS[limit.window])
