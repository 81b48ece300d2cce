"""Conditions on requests: times of the week, and percentages of tenants or users."""

from __future__ import annotations

from typing import Literal

import msgspec

from argosy.policy.traffic.sticky_hash import TrafficSubject, hash_point, sticky_key

_DAY_S = 86_400
_DAY_MINUTES = 1_440
_EPOCH_WEEKDAY = 3
"""The epoch began on a Thursday; Monday is 0."""
_ALL_WEEK = tuple(range(7))


FlagUnit = Literal["tenant", "user"]
"""Unit that a percentage flag counts."""


class PercentageFlag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Feature flag that is on for a fixed part of the tenants or users. A larger share keeps it on for them."""

    name: str
    """Salt of the hash: flags of different names are on for different tenants and users."""
    share: float
    """Part of the tenants or users for which it is on, from 0 to 1."""
    unit: FlagUnit = "user"
    """Whether it is on for whole tenants or for single users."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"share of flag {self.name} must be between 0 and 1")

    def is_on(self, subject: TrafficSubject) -> bool:
        """Return whether the flag is on for the sender of a request."""
        key = sticky_key(subject, ()) if self.unit == "user" else (subject.tenant,)
        return hash_point(self.name, *key) < self.share


class DailyWindow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Minutes of the day on some days of the week, in a zone with a fixed offset. It may extend over midnight."""

    start_minute: int
    """First minute, counted from midnight: 480 is 8:00."""
    end_minute: int
    """First minute after the window. If it is not after `start_minute`, the window ends on the next day."""
    weekdays: tuple[int, ...] = _ALL_WEEK
    """Days on which it starts; Monday is 0."""
    utc_offset_minutes: int = 0
    """Minutes by which the zone is ahead of UTC."""

    def __post_init__(self) -> None:
        for minute in (self.start_minute, self.end_minute):
            if not 0 <= minute <= _DAY_MINUTES:
                raise ValueError("start_minute and end_minute must be between 0 and 1440")
        if not set(self.weekdays) <= set(_ALL_WEEK):
            raise ValueError("weekdays must be numbers from 0 (Monday) to 6 (Sunday)")

    def contains(self, now: float) -> bool:
        """Return whether the window is open at `now`, in seconds since the epoch."""
        days, second = divmod(int(now) + self.utc_offset_minutes * 60, _DAY_S)
        minute, today = second // 60, (days + _EPOCH_WEEKDAY) % 7
        if self.start_minute < self.end_minute:
            return today in self.weekdays and self.start_minute <= minute < self.end_minute
        if minute >= self.start_minute:
            return today in self.weekdays
        return minute < self.end_minute and (today - 1) % 7 in self.weekdays
