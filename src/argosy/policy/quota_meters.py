"""What counts against a limit: over a sliding window, in a period of the calendar, or at a time.

A sliding window holds what was used in its last `seconds`, kept in `SLOTS` slots; a slot is forgotten only when all
of it is past. So in no interval of that length is more used than the limit, and room that was used
comes back at most `seconds / SLOTS` late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol

WINDOW_SLOTS = 60
DAY_S = 86_400
MIN_SEEDED_WINDOW_S = 10.0
"""A shorter window is past before anybody has read a ledger."""
SEED_PARTS = 6
"""What a ledger has of a sliding window is asked for in so many parts, so that it is forgotten as gradually."""

CalendarUnit = Literal["day", "month"]


class QuotaMeter(Protocol):
    """Units in use, and how many may be. Units are requests, tokens, nano-dollars or what else is counted.

    `now` is in seconds since the epoch, and should never go back; where it does, nothing is forgotten meanwhile.
    """

    limit: int
    needs_seed: bool
    """Whether `recall` is still to tell what was used before it was there."""

    @property
    def used(self) -> int:
        """Units that count now, as of the last call that told the time."""

    def remaining(self, now: float) -> int:
        """Units that may be used now; negative when the limit was lowered below what is used."""

    def add(self, units: int, now: float) -> int:
        """Count `units` (whatever the room) and return the slot, for `correct`."""

    def adjust(self, slot: int, units: int, now: float) -> bool:
        """Change what was counted in `slot` by `units`; False when it no longer counts: nothing happens then."""

    def wait_s(self, units: int, now: float) -> float:
        """Seconds until there is room for `units`: infinite when they exceed the limit, 0 when nobody knows."""

    def reset_s(self, now: float) -> float:
        """Seconds until all of the limit is free again, if nothing more is used."""

    def seed_points(self, now: float) -> tuple[float, ...]:
        """The moments, earliest first, since when sums of what was used are worth telling to `recall`."""

    def seed(self, used: Iterable[tuple[float, int]], now: float) -> None:
        """Count what was used before the counter was there: moments, in order, and what was used just before each.

        What was used in a period that is over by now does not count.
        """


class SlidingWindow:
    """At most `limit` units in any `seconds`."""

    __slots__ = (
        "_newest_slot",
        "_newest_slot_ends_at",
        "_slot_s",
        "_units_by_slot",
        "limit",
        "needs_seed",
        "used",
        "window_s",
    )

    def __init__(self, limit: int, window_s: float) -> None:
        self.limit = limit
        self.needs_seed = window_s > MIN_SEEDED_WINDOW_S
        self.window_s = window_s
        self.used = 0
        self._slot_s = window_s / WINDOW_SLOTS
        self._units_by_slot: dict[int, int] = {}
        """Slot number -> units, oldest first; at most SLOTS + 1."""
        self._newest_slot = 0
        """The last of them, where more is counted."""
        self._newest_slot_ends_at = -math.inf
        """When another slot begins."""

    def remaining(self, now: float) -> int:
        """See `Counter`."""
        if now >= self._newest_slot_ends_at:
            self._advance(now)
        return self.limit - self.used

    def add(self, units: int, now: float) -> int:
        """See `Counter`."""
        if now >= self._newest_slot_ends_at:
            self._advance(now)
        self._units_by_slot[self._newest_slot] += units
        self.used += units
        return self._newest_slot

    def adjust(self, slot: int, units: int, now: float) -> bool:
        """See `Counter`."""
        if now >= self._newest_slot_ends_at:
            self._advance(now)
        if slot not in self._units_by_slot:
            return False
        self._units_by_slot[slot] += units
        self.used += units
        return True

    def wait_s(self, units: int, now: float) -> float:
        """See `Counter`."""
        short = units - self.remaining(now)
        if short <= 0:
            return 0.0
        if units > self.limit:
            return math.inf
        for slot, used in self._units_by_slot.items():
            short -= used
            if short <= 0:
                return max(0.0, self._expires_at(slot) - now)
        return self.window_s

    def reset_s(self, now: float) -> float:
        """See `Counter`."""
        for slot in reversed(self._units_by_slot):
            if self._units_by_slot[slot]:
                return max(0.0, self._expires_at(slot) - now)
        return 0.0

    def seed_points(self, now: float) -> tuple[float, ...]:
        """See `Counter`."""
        return tuple(now - self.window_s * part / SEED_PARTS for part in range(SEED_PARTS, 0, -1))

    def seed(self, used: Iterable[tuple[float, int]], now: float) -> None:  # noqa: ARG002 - see `Counter`
        """See `Counter`."""
        self.needs_seed = False
        for at, units in used:
            slot = int(at // self._slot_s)
            self._units_by_slot[slot] = self._units_by_slot.get(slot, 0) + units
            self.used += units
        self._units_by_slot = dict(sorted(self._units_by_slot.items()))

    def _expires_at(self, slot: int) -> float:
        """When the slot no longer counts."""
        return (slot + 1) * self._slot_s + self.window_s

    def _advance(self, now: float) -> None:
        """Drop the slots whose last instant is a whole window ago, and begin the one that it is now."""
        current, slots = int(now // self._slot_s), self._units_by_slot
        while slots and (oldest := next(iter(slots))) < current - WINDOW_SLOTS:
            self.used -= slots.pop(oldest)
        self._newest_slot = current
        slots.setdefault(current, 0)
        self._newest_slot_ends_at = (current + 1) * self._slot_s


class CalendarPeriod:
    """At most `limit` units in each day or month of the calendar, in UTC."""

    __slots__ = ("_period_end", "_period_start", "calendar", "limit", "needs_seed", "used")

    def __init__(self, limit: int, calendar: CalendarUnit) -> None:
        self.limit = limit
        self.needs_seed = True
        self.calendar = calendar
        self.used = 0
        self._period_start = self._period_end = -math.inf

    def remaining(self, now: float) -> int:
        """See `Counter`."""
        if now >= self._period_end:
            self._start_period(now)
        return self.limit - self.used

    def add(self, units: int, now: float) -> int:
        """See `Counter`; the slot is the second when the period began."""
        if now >= self._period_end:
            self._start_period(now)
        self.used += units
        return int(self._period_start)

    def adjust(self, slot: int, units: int, now: float) -> bool:
        """See `Counter`."""
        self.remaining(now)
        if slot != self._period_start:
            return False
        self.used += units
        return True

    def wait_s(self, units: int, now: float) -> float:
        """See `Counter`."""
        if units <= self.remaining(now):
            return 0.0
        return math.inf if units > self.limit else self._period_end - now

    def reset_s(self, now: float) -> float:
        """See `Counter`."""
        self.remaining(now)
        return self._period_end - now if self.used else 0.0

    def seed_points(self, now: float) -> tuple[float, ...]:
        """See `Counter`."""
        self.remaining(now)
        return (self._period_start,)

    def seed(self, used: Iterable[tuple[float, int]], now: float) -> None:  # noqa: ARG002 - see `Counter`
        """See `Counter`."""
        self.needs_seed = False
        self.used += sum(units for at, units in used if at > self._period_start)

    def _start_period(self, now: float) -> None:
        self._period_start, self._period_end = calendar_bounds(self.calendar, now)
        self.used = 0


class ConcurrencyMeter:
    """At most `limit` at a time."""

    __slots__ = ("limit", "needs_seed", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.needs_seed = False
        self.used = 0

    def remaining(self, now: float) -> int:  # noqa: ARG002 - see `Counter`
        """See `Counter`."""
        return self.limit - self.used

    def add(self, units: int, now: float) -> int:  # noqa: ARG002 - see `Counter`
        """See `Counter`; there is one slot, which always counts."""
        self.used += units
        return 0

    def adjust(self, slot: int, units: int, now: float) -> bool:  # noqa: ARG002 - see `Counter`
        """See `Counter`."""
        self.used += units
        return True

    def wait_s(self, units: int, now: float) -> float:  # noqa: ARG002 - see `Counter`
        """See `Counter`: nobody knows when others end."""
        return math.inf if units > self.limit else 0.0

    def reset_s(self, now: float) -> float:  # noqa: ARG002 - see `Counter`
        """See `Counter`."""
        return 0.0

    def seed_points(self, now: float) -> tuple[float, ...]:  # noqa: ARG002 - see `Counter`
        """See `Counter`: what ran before has ended."""
        return ()

    def seed(self, used: Iterable[tuple[float, int]], now: float) -> None:
        """See `Counter`."""


def calendar_bounds(calendar: CalendarUnit, now: float) -> tuple[float, float]:
    """When the day or month around `now` begins and ends, in UTC; seconds since the epoch."""
    day = now // DAY_S * DAY_S
    if calendar == "day":
        return day, day + DAY_S
    first = datetime.fromtimestamp(day, UTC).replace(day=1)
    following = (first + timedelta(days=32)).replace(day=1)
    return first.timestamp(), following.timestamp()
