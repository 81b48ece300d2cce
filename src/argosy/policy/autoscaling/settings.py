"""Settings of the autoscaler of one pool, with windows of the week in which it keeps more replicas than its minimum."""

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


class AutoscalerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and rules of one pool. The defaults were chosen by simulation, see docs/explanation/autoscaling.md.

    Raises:
        ValueError: The limits contradict each other, or a number is out of its range.
    """

    min_replicas: int = 1
    """Fewest replicas. With 0 the pool is scaled to zero when it is idle."""
    max_replicas: int
    """Most replicas."""
    spares: int = 0
    """Number of further replicas that are warm but do not serve, for bursts shorter than a start. A pool that is scaled
    to zero has none."""
    schedule: tuple[ScheduleWindow, ...] = ()
    """Times at which the minimum is higher."""
    is_advisory: bool = False
    """Whether decisions are recorded only."""
    uses_trend: bool = False
    """Whether the trend forecast is used while it is better than the last value on the recorded demand."""
    spare_fraction: float = 0.15
    """Part of the demand that is provided in addition."""
    kv_limit: float = 0.8
    """Part of the KV caches that may be in use."""
    drain_s: float = 60.0
    """Time in which the requests in the queue are to be served."""
    max_down_fraction: float = 0.8
    """Load of the remaining replicas up to which one is removed."""
    down_window_s: float = 600.0
    """Time whose peak demand the remaining replicas have to hold; at least two start-up times."""
    down_interval_s: float = 30.0
    """Time between two removals."""
    idle_s: float = 600.0
    """Time without requests after which the pool is scaled to zero."""
    stale_after_s: float = 15.0
    """Age from which metrics are not used."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas:
            raise ValueError("min_replicas must be at least 0 and at most max_replicas")
        if self.max_replicas < 1:
            raise ValueError("max_replicas must be at least 1; remove the pool to run no replicas")
        if self.spares < 0:
            raise ValueError("spares must be 0 or more")
        for window in self.schedule:
            if window.min_replicas > self.max_replicas:
                raise ValueError(
                    f"A schedule needs {window.min_replicas} replicas; raise max_replicas to that"
                )
        for field in ("kv_limit", "max_down_fraction"):
            if not 0.0 < getattr(self, field) <= 1.0:
                raise ValueError(f"{field} must be above 0 and at most 1")
        if self.spare_fraction < 0.0:
            raise ValueError("spare_fraction must be 0 or more")
        for field in ("drain_s", "down_window_s", "down_interval_s", "idle_s", "stale_after_s"):
            if not getattr(self, field) > 0.0:
                raise ValueError(f"{field} must be above 0")
