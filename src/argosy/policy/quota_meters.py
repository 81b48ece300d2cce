"""Meters that count usage against a limit: in a sliding window, in a calendar period, or concurrently.

A sliding window counts the usage of its last `window_s` seconds in `WINDOW_SLOTS` slots. A slot expires only when all
of it is older than the window. Therefore no interval of that length exceeds the limit, and used units become free at
most `window_s / WINDOW_SLOTS` late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol

WINDOW_SLOTS = 60
DAY_S = 86_400
MIN_SEEDED_WINDOW_S = 10.0
"""Shorter windows are not seeded, because they are over before the ledger has been read."""
SEED_INTERVALS = 6
"""Intervals into which the past usage of a sliding window is divided, so that it expires gradually."""

CalendarUnit = Literal["day", "month"]


class ClockOffset:
    """Difference of the clock of the meters from the wall clock, by which days and months begin."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        """Seconds that the wall clock is behind. It changes when the wall clock is set."""


NO_OFFSET = ClockOffset()


class QuotaMeter(Protocol):
    """Counter of the units in use under one limit.

    Units are requests, tokens, nano-dollars or anything else that is counted. The argument `now` is in seconds since
    the epoch, by a clock that never goes back. Calendars know how far the wall clock is from it.
    """

    limit: int
    can_exceed: bool
    """Whether this gateway alone decides which request may hold more of a budget than is free."""
    needs_seed: bool
    """Whether `seed` still has to be called with the usage from before the meter existed."""

    @property
    def used(self) -> int:
        """Units in use as of the last call with a time."""

    @property
    def held(self) -> int:
        """Units in use that running requests of this gateway hold, which they may return."""

    def remaining(self, now: float) -> int:
        """Return how many units are free; negative if the limit was lowered below the usage."""

    def add(self, units: int, now: float) -> int:
        """Count `units` that a request holds, even beyond the limit, and return their slot for the other methods."""

    def adjust(self, slot: int, units: int, now: float) -> bool:
        """Change the held units of `slot`; return False, and count nothing else, if the slot has expired."""

    def settle(self, slot: int, units: int) -> None:
        """Count held units of `slot` as used for good, since their request does not return them."""

    def wait_s(self, units: int, now: float) -> float:
        """Return the seconds until `units` are free: infinite if they exceed the limit, 0 if unknown."""

    def reset_s(self, now: float) -> float:
        """Return the seconds until the whole limit is free, if nothing more is used."""

    def seed_points(self, now: float) -> tuple[float, ...]:
        """Return the times, in ascending order, that begin the intervals whose past usage `seed` needs."""

    def seed(self, used: Iterable[tuple[float, int]], now: float) -> None:
        """Count the usage from before the meter existed. Usage of a period that has ended is ignored.

        Args:
            used: Times in ascending order, each with the units used just before it.
            now: Seconds since the epoch.
        """


def is_exceeded(meter: QuotaMeter, now: float) -> bool:
    """Return whether more units are in use than the limit allows."""
    meter.remaining(now)  # updates `used`
    return meter.used > meter.limit


class SlidingWindow:
    """Meter that allows `limit` units in any interval of `window_s` seconds."""

    can_exceed = True
    __slots__ = (
        "_newest_slot",
        "_newest_slot_ends_at",
        "_slot_s",
        "_units_by_slot",
        "held",
        "limit",
        "needs_seed",
        "used",
        "window_s",
    )

    def __init__(self, limit: int, window_s: float) -> None:
        self.limit = limit
        self.needs_seed = window_s > MIN_SEEDED_WINDOW_S
        self.window_s = window_s
        self.used = self.held = 0
        self._slot_s = window_s / WINDOW_SLOTS
        self._units_by_slot: dict[int, int] = {}
        """Units by slot number, in ascending order; at most WINDOW_SLOTS + 1 slots."""
        self._newest_slot = 0
        """Slot that counts the present usage."""
        self._newest_slot_ends_at = -math.inf

    def remaining(self, now: float) -> int:
        if now >= self._newest_slot_ends_at:
            self._advance(now)
        return self.limit - self.used

    def add(self, units: int, now: float) -> int:
        if now >= self._newest_slot_ends_at:
            self._advance(now)
        self._units_by_slot[self._newest_slot] += units
        self.used += units
        self.held += units
        return self._newest_slot

    def adjust(self, slot: int, units: int, now: float) -> bool:
        if now >= self._newest_slot_ends_at:
            self._advance(now)
        self.held += units
        if slot not in self._units_by_slot:
            return False
        self._units_by_slot[slot] += units
        self.used += units
        return True

    def settle(self, slot: int, units: int) -> None:  # noqa: ARG002 - part of the protocol
        self.held -= units

    def wait_s(self, units: int, now: float) -> float:
        missing = units - self.remaining(now)
        if missing <= 0:
            return 0.0
        if units > self.limit:
            return math.inf
        for slot, used in self._units_by_slot.items():
            missing -= used
            if missing <= 0:
                return max(0.0, self._expires_at(slot) - now)
        return self.window_s

    def reset_s(self, now: float) -> float:
        for slot in reversed(self._units_by_slot):
            if self._units_by_slot[slot]:
                return max(0.0, self._expires_at(slot) - now)
        return 0.0

    def seed_points(self, now: float) -> tuple[float, ...]:
        return tuple(
            now - self.window_s * interval / SEED_INTERVALS
            for interval in range(SEED_INTERVALS, 0, -1)
        )

    def seed(self, used: Iterable[tuple[float, int]], now: float) -> None:  # noqa: ARG002 - part of the protocol
        self.needs_seed = False
        for at, units in used:
            slot = int(at // self._slot_s)
            self._units_by_slot[slot] = self._units_by_slot.get(slot, 0) + units
            self.used += units
        self._units_by_slot = dict(sorted(self._units_by_slot.items()))

    def _expires_at(self, slot: int) -> float:
        """Return the time from which the slot no longer counts."""
        return (slot + 1) * self._slot_s + self.window_s

    def _advance(self, now: float) -> None:
        """Drop the slots that ended a whole window ago and open the slot of `now`."""
        current, slots = int(now // self._slot_s), self._units_by_slot
        while slots and (oldest := next(iter(slots))) < current - WINDOW_SLOTS:
            self.used -= slots.pop(oldest)
        self._newest_slot = current
        slots.setdefault(current, 0)
        self._newest_slot_ends_at = (current + 1) * self._slot_s


class CalendarPeriod:
    """Meter that allows `limit` units in each calendar day or month, in UTC.

    If the wall clock is set back into an earlier period, the usage of the later one counts in the earlier one, beside
    what that period had before.
    """

    can_exceed = True
    __slots__ = (
        "_counted_before",
        "_previous",
        "_slots",
        "calendar",
        "clock",
        "held",
        "limit",
        "needs_seed",
        "period_end",
        "period_start",
        "used",
    )

    def __init__(self, limit: int, calendar: CalendarUnit, clock: ClockOffset = NO_OFFSET) -> None:
        self.limit = limit
        self.needs_seed = True
        self.calendar = calendar
        self.clock = clock
        self.used = self.held = 0
        self.period_start = self.period_end = -math.inf
        """Bounds of the period by the wall clock."""
        self._slots: frozenset[int] = frozenset()
        """Slots that the present period counts: its own, and those of later ones that were none."""
        self._previous = self._slots, 0
        """Slots of the period before, and what it has used."""
        self._counted_before = math.inf
        """Wall time since which this meter has counted the usage of the period itself."""

    def remaining(self, now: float) -> int:
        if not self.period_start <= now - self.clock.offset_s < self.period_end:
            self._start_period(now - self.clock.offset_s)
        return self.limit - self.used

    def add(self, units: int, now: float) -> int:
        """Count `units` and return the period's start in seconds since the epoch as their slot."""
        if not self.period_start <= now - self.clock.offset_s < self.period_end:
            self._start_period(now - self.clock.offset_s)
        self.used += units
        self.held += units
        return int(self.period_start)

    def adjust(self, slot: int, units: int, now: float) -> bool:
        self.remaining(now)
        if slot in self._slots:
            self.used += units
            self.held += units
            return True
        slots, used = self._previous
        if slot in slots:  # the clock may be set back there
            self._previous = slots, used + units
        return False

    def settle(self, slot: int, units: int) -> None:
        if slot in self._slots:
            self.held -= units

    def wait_s(self, units: int, now: float) -> float:
        if units <= self.remaining(now):
            return 0.0
        return math.inf if units > self.limit else self.period_end - (now - self.clock.offset_s)

    def reset_s(self, now: float) -> float:
        self.remaining(now)
        return self.period_end - (now - self.clock.offset_s) if self.used else 0.0

    def seed_points(self, now: float) -> tuple[float, ...]:
        self.remaining(now)
        points = self.period_start, self._counted_before
        return tuple(at + self.clock.offset_s for at in points if not math.isinf(at))

    def seed(self, used: Iterable[tuple[float, int]], now: float) -> None:  # noqa: ARG002 - part of the protocol
        self.needs_seed = False
        since = self.period_start + self.clock.offset_s
        pairs = [(at, units) for at, units in used if at > since]
        is_partly_counted = not math.isinf(self._counted_before)
        self.used += sum(units for _, units in (pairs[:1] if is_partly_counted else pairs))

    def _start_period(self, wall_time: float) -> None:
        """Begin the period of `wall_time`, which is an earlier one if the wall clock was set back."""
        start, end = calendar_bounds(self.calendar, wall_time)
        slots, used = frozenset((int(start),)), 0
        if start < self.period_start:
            previous_slots, previous_used = self._previous
            is_known = int(start) == min(previous_slots, default=None)
            used, slots = self.used + (previous_used if is_known else 0), slots | self._slots
            if not is_known:
                self.needs_seed, self._counted_before = True, self.period_start
            self._previous = frozenset(), 0
        else:
            self._previous, self._counted_before = (self._slots, self.used), math.inf
            self.held = 0
        self.period_start, self.period_end, self._slots, self.used = start, end, slots, used


class ConcurrencyMeter:
    """Meter that allows `limit` units at a time. Its single slot, 0, never expires."""

    can_exceed = False
    __slots__ = ("limit", "needs_seed", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.needs_seed = False
        self.used = 0

    def remaining(self, now: float) -> int:  # noqa: ARG002 - part of the protocol
        return self.limit - self.used

    def add(self, units: int, now: float) -> int:  # noqa: ARG002 - part of the protocol
        self.used += units
        return 0

    def adjust(self, slot: int, units: int, now: float) -> bool:  # noqa: ARG002 - part of the protocol
        self.used += units
        return True

    def settle(self, slot: int, units: int) -> None:
        """Do nothing, because an ended request has returned its slots."""

    @property
    def held(self) -> int:
        """Slots in use, since each is held by a running request."""
        return self.used

    def wait_s(self, units: int, now: float) -> float:  # noqa: ARG002 - part of the protocol
        """Return infinity if `units` exceed the limit, else 0, because the end of running requests is unknown."""
        return math.inf if units > self.limit else 0.0

    def reset_s(self, now: float) -> float:  # noqa: ARG002 - part of the protocol
        return 0.0

    def seed_points(self, now: float) -> tuple[float, ...]:  # noqa: ARG002 - part of the protocol
        return ()

    def seed(self, used: Iterable[tuple[float, int]], now: float) -> None:
        """Do nothing, because earlier requests have ended."""


def calendar_bounds(calendar: CalendarUnit, now: float) -> tuple[float, float]:
    """Return the start and end of the UTC day or month that contains `now`, in seconds since the epoch."""
    day = now // DAY_S * DAY_S
    if calendar == "day":
        return day, day + DAY_S
    first = datetime.fromtimestamp(day, UTC).replace(day=1)
    following = (first + timedelta(days=32)).replace(day=1)
    return first.timestamp(), following.timestamp()
