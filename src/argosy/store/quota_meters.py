"""Counters of limits: what one gateway counts with, alone or of its part."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.policy import Concurrency, Counter, Period, Window
from argosy.store.records import Limit

SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}

Wants = Sequence[tuple[Counter, int]]
"""Counters, and how many units somebody needs of each."""


def own_counter(limit: Limit) -> Window | Period | Concurrency:
    """What counts by itself. Raises ValueError when the limit needs a window, and has none that is known here."""
    if limit.unit == "concurrency":
        return Concurrency(limit.amount)
    if limit.window is None:
        raise ValueError(f"The limit {limit.id} on {limit.unit} has no window. Give it one.")
    if limit.window in {"day", "month"}:
        return Period(limit.amount, limit.window)
    if limit.window not in SECONDS:
        raise ValueError(
            f"The limit {limit.id} is by {limit.window!r}, which this version cannot count."
        )
    return Window(limit.amount, SECONDS[limit.window])
