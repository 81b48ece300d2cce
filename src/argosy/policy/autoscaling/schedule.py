"""Windows of the week in which a pool keeps more replicas than its minimum."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, time, timedelta, tzinfo
from typing import Literal
from zoneinfo import ZoneInfo

import msgspec

Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
WEEKDAYS: tuple[Weekday, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class ScheduleWindow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Minimum replica count at certain times of the week.

    Raises:
        ValueError: The window is empty, its count is negative, or its time zone does not exist.
    """

    min_replicas: int
    start: time
    """Local time at which the replicas have to be ready. They are started earlier by the expected start-up time."""
    end: time
    """Local time at which the window ends, on the next day if it is not after `start`."""
    days: tuple[Weekday, ...] = WEEKDAYS
    """Days on which the window starts."""
    timezone: str = "UTC"
    """Name in the IANA time zone database, such as `Europe/Berlin`."""

    def __post_init__(self) -> None:
        if self.min_replicas < 0:
            raise ValueError("min_replicas of a schedule must be 0 or more")
        if not self.days:
            raise ValueError("A schedule without days has no effect; name some or leave days out")
        if self.start.tzinfo is not None or self.end.tzinfo is not None:
            raise ValueError("start and end of a schedule are local times; set timezone instead")
        try:
            _find_zone(self.timezone)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(
                f"Unknown time zone {self.timezone}; use an IANA name such as Europe/Berlin, "
                "and install the package tzdata if the system has no time zones"
            ) from error

    def is_open(self, now: float, lead_s: float) -> bool:
        """Return whether the window is open, or opens within `lead_s` seconds."""
        zone = _find_zone(self.timezone)
        at = datetime.fromtimestamp(now, UTC)
        day = at.astimezone(zone).date() - timedelta(days=1)
        last_day = (at + timedelta(seconds=lead_s)).astimezone(zone).date()
        while day <= last_day:
            if WEEKDAYS[day.weekday()] in self.days:
                end_day = day if self.end > self.start else day + timedelta(days=1)
                start = datetime.combine(day, self.start, zone).timestamp()
                if start - lead_s <= now < datetime.combine(end_day, self.end, zone).timestamp():
                    return True
            day += timedelta(days=1)
        return False


def scheduled_minimum(windows: Iterable[ScheduleWindow], now: float, lead_s: float) -> int:
    """Return the largest minimum of all windows that are open, or that open within `lead_s` seconds; 0 if none is."""
    return max((each.min_replicas for each in windows if each.is_open(now, lead_s)), default=0)


def _find_zone(name: str) -> tzinfo:
    """Return a time zone. UTC needs no time zone database."""
    return UTC if name == "UTC" else ZoneInfo(name)
