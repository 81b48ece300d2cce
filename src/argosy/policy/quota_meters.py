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

SLOTS = 60
DAY_S = 86_400
SHORT_S = 10.0
"""A shorter window is past before anybody has read a ledger."""
PARTS = 6
"""What a ledger has of a sliding window is asked for in so many parts, so that it is forgotten as gradually."""

Calendar = Literal["day", "month"]


class Counter(Protocol):
    """Units in use, and how many may be. Units are requests, tokens, nano-dollars or what else is counted.

    `now` is in seconds since the epoch, and should never go back; where it does, nothing is forgotten meanwhile.
    """

    limit: int
    unknown: bool
    """Whether `recall` is still to tell what was used before it was there."""

    @property
    def used(self) -> int:
        """Units that count now, as of the last call that told the time."""

    def room(self, now: float) -> int:
        """Units that may be used now; negative when the limit was lowered below what is used."""

    def add(self, units: int, now: float) -> int:
        """Count `units` (whatever the room) and return the slot, for `correct`."""

    def correct(self, slot: int, units: int, now: float) -> bool:
        """Change what was counted in `slot` by `units`; False when it no longer counts: nothing happens then."""

    def wait_s(self, units: int, now: float) -> float:
        """Seconds until there is room for `units`: infinite when they exceed the limit, 0 when nobody knows."""

    def reset_s(self, now: float) -> float:
        """Seconds until all of the limit is free again, if nothing more is used."""

    def since(self, now: float) -> tuple[float, ...]:
        """The moments, earliest first, since when sums of what was used are worth telling to `recall`."""

    def recall(self, used: Iterable[tuple[float, int]], now: float) -> None:
        """Count what was used before the counter was there: moments, in order, and what was used just before each.

        What was used in a period that is over by now does not count.
        """


class Window:
    """At most `limit` units in any `seconds`."""

    __slots__ = ("_newest", "_slots", "_until", "_width", "limit", "seconds", "unknown", "used")

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit = limit
        self.unknown = seconds > SHORT_S
        self.seconds = seconds
        self.used = 0
        self._width = seconds / SLOTS
        self._slots: dict[int, int] = {}
        """Slot number -> units, oldest first; at most SLOTS + 1."""
        self._newest = 0
        """The last of them, where more is counted."""
        self._until = -math.inf
        """When another slot begins."""

    def room(self, now: float) -> int:
        """See `Counter`."""
        if now >= self._until:
            self._go_on(now)
        return self.limit - self.used

    def add(self, units: int, now: float) -> int:
        """See `Counter`."""
        if now >= self._until:
            self._go_on(now)
        self._slots[self._newest] += units
        self.used += units
        return self._newest

    def correct(self, slot: int, units: int, now: float) -> bool:
        """See `Counter`."""
        if now >= self._until:
            self._go_on(now)
        if slot not in self._slots:
            return False
        self._slots[slot] += units
        self.used += units
        return True

    def wait_s(self, units: int, now: float) -> float:
        """See `Counter`."""
        short = units - self.room(now)
        if short <= 0:
            return 0.0
        if units > self.limit:
            return math.inf
        for slot, used in self._slots.items():
            short -= used
            if short <= 0:
                return max(0.0, self._end(slot) - now)
        return self.seconds

    def reset_s(self, now: float) -> float:
        """See `Counter`."""
        for slot in reversed(self._slots):
            if self._slots[slot]:
                return max(0.0, self._end(slot) - now)
        return 0.0

    def since(self, now: float) -> tuple[float, ...]:
        """See `Counter`."""
        return tuple(now - self.seconds * part / PARTS for part in range(PARTS, 0, -1))

    def recall(self, used: Iterable[tuple[float, int]], now: float) -> None:  # noqa: ARG002 - see `Counter`
        """See `Counter`."""
        self.unknown = False
        for at, units in used:
            slot = int(at // self._width)
            self._slots[slot] = self._slots.get(slot, 0) + units
            self.used += units
        self._slots = dict(sorted(self._slots.items()))

    def _end(self, slot: int) -> float:
        """When the slot no longer counts."""
        return (slot + 1) * self._width + self.seconds

    def _go_on(self, now: float) -> None:
        """Drop the slots whose last instant is a whole window ago, and begin the one that it is now."""
        current, slots = int(now // self._width), self._slots
        while slots and (oldest := next(iter(slots))) < current - SLOTS:
            self.used -= slots.pop(oldest)
        self._newest = current
        slots.setdefault(current, 0)
        self._until = (current + 1) * self._width


class Period:
    """At most `limit` units in each day or month of the calendar, in UTC."""

    __slots__ = ("_ends", "_starts", "calendar", "limit", "unknown", "used")

    def __init__(self, limit: int, calendar: Calendar) -> None:
        self.limit = limit
        self.unknown = True
        self.calendar = calendar
        self.used = 0
        self._starts = self._ends = -math.inf

    def room(self, now: float) -> int:
        """See `Counter`."""
        if now >= self._ends:
            self._turn(now)
        return self.limit - self.used

    def add(self, units: int, now: float) -> int:
        """See `Counter`; the slot is the second when the period began."""
        if now >= self._ends:
            self._turn(now)
        self.used += units
        return int(self._starts)

    def correct(self, slot: int, units: int, now: float) -> bool:
        """See `Counter`."""
        self.room(now)
        if slot != self._starts:
            return False
        self.used += units
        return True

    def wait_s(self, units: int, now: float) -> float:
        """See `Counter`."""
        if units <= self.room(now):
            return 0.0
        return math.inf if units > self.limit else self._ends - now

    def reset_s(self, now: float) -> float:
        """See `Counter`."""
        self.room(now)
        return self._ends - now if self.used else 0.0

    def since(self, now: float) -> tuple[float, ...]:
        """See `Counter`."""
        self.room(now)
        return (self._starts,)

    def recall(self, used: Iterable[tuple[float, int]], now: float) -> None:  # noqa: ARG002 - see `Counter`
        """See `Counter`."""
        self.unknown = False
        self.used += sum(units for at, units in used if at > self._starts)

    def _turn(self, now: float) -> None:
        self._starts, self._ends = period(self.calendar, now)
        self.used = 0


class Concurrency:
    """At most `limit` at a time."""

    __slots__ = ("limit", "unknown", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.unknown = False
        self.used = 0

    def room(self, now: float) -> int:  # noqa: ARG002 - see `Counter`
        """See `Counter`."""
        return self.limit - self.used

    def add(self, units: int, now: float) -> int:  # noqa: ARG002 - see `Counter`
        """See `Counter`; there is one slot, which always counts."""
        self.used += units
        return 0

    def correct(self, slot: int, units: int, now: float) -> bool:  # noqa: ARG002 - see `Counter`
        """See `Counter`."""
        self.used += units
        return True

    def wait_s(self, units: int, now: float) -> float:  # noqa: ARG002 - see `Counter`
        """See `Counter`: nobody knows when others end."""
        return math.inf if units > self.limit else 0.0

    def reset_s(self, now: float) -> float:  # noqa: ARG002 - see `Counter`
        """See `Counter`."""
        return 0.0

    def since(self, now: float) -> tuple[float, ...]:  # noqa: ARG002 - see `Counter`
        """See `Counter`: what ran before has ended."""
        return ()

    def recall(self, used: Iterable[tuple[float, int]], now: float) -> None:
        """See `Counter`."""


def period(calendar: Calendar, now: float) -> tuple[float, float]:
    """When the day or month around `now` begins and ends, in UTC; seconds since the epoch."""
    day = now // DAY_S * DAY_S
    if calendar == "day":
        return day, day + DAY_S
    first = datetime.fromtimestamp(day, UTC).replace(day=1)
    following = (first + timedelta(days=32)).replace(day=1)
    return first.timestamp(), following.timestamp()
