"""Counts of one objective over time, in slots of 10 seconds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

SLOT_S = 10
HOUR_S = 3600


class Counts(NamedTuple):
    """Requests (or tokens) that count for an objective, and those of them that missed it."""

    requests: int = 0
    misses: int = 0

    @property
    def miss_rate(self) -> float:
        """Share that missed; 0 without requests."""
        return self.misses / self.requests if self.requests else 0.0


class HourCounts(NamedTuple):
    """Counts of one hour by one gateway. Slots without any are left out."""

    slots: Sequence[int]
    """Numbers of the slots within the hour, ascending."""
    requests: Sequence[int]
    misses: Sequence[int]


class _Hour(NamedTuple):
    """Sums of one hour before its first slot with counts, and up to and with each of them."""

    slots: Sequence[int]
    requests: Sequence[int]
    misses: Sequence[int]


class CountHistory:
    """Counts of one objective by hour and slot. Only slots with counts need memory."""

    def __init__(self) -> None:
        self._hours: dict[int, _Hour] = {}

    def replace_hour(self, start: int, parts: Sequence[HourCounts]) -> None:
        """Replace the counts of an hour by the sum over gateways.

        Args:
            start: Start of the hour in seconds since the epoch.
            parts: Counts of each gateway.
        """
        slots, requests, misses = parts[0] if len(parts) == 1 else _merge(parts)
        self._hours[start] = _Hour(
            slots, list(accumulate(requests, initial=0)), list(accumulate(misses, initial=0))
        )

    def count(self, start: int, end: int) -> Counts:
        """Return the counts from `start` to `end`, both multiples of `SLOT_S` in seconds since the epoch."""
        requests = misses = 0
        for begin in range(start - start % HOUR_S, end, HOUR_S):
            hour = self._hours.get(begin)
            if hour is None:
                continue
            first = bisect_left(hour.slots, (start - begin) // SLOT_S) if begin < start else 0
            last = len(hour.slots)
            if begin + HOUR_S > end:
                last = bisect_left(hour.slots, (end - begin) // SLOT_S)
            requests += hour.requests[last] - hour.requests[first]
            misses += hour.misses[last] - hour.misses[first]
        return Counts(requests, misses)


def _merge(parts: Sequence[HourCounts]) -> HourCounts:
    merged: dict[int, tuple[int, int]] = {}
    for part in parts:
        for slot, requests, misses in zip(*part, strict=True):
            before = merged.get(slot, (0, 0))
            merged[slot] = before[0] + requests, before[1] + misses
    slots = sorted(merged)
    return HourCounts(
        slots, [merged[each][0] for each in slots], [merged[each][1] for each in slots]
    )
